"""Children of the supervisor: when they are started again, their lines, and the rule that they do not outlive us."""

from __future__ import annotations

import io
import os
import re
import select
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from pagedserve.children import Child, Restarts, describe_end
from pagedserve.log_lines import LogLines
from tests.server import eventually


def test_the_first_death_is_followed_at_once_by_a_new_start_then_ever_later() -> None:
    restarts = Restarts()
    assert [restarts.delay_s(1, lived_s=0.1) for _ in range(5)] == [0.0, 0.25, 0.5, 1.0, None]


def test_a_process_that_others_kill_is_started_again_without_end_and_soon() -> None:
    restarts = Restarts()
    delays = [restarts.delay_s(-signal.SIGKILL, lived_s=0.1) for _ in range(20)]
    assert delays[:4] == [0.0, 0.25, 0.5, 1.0]
    assert set(delays[4:]) == {1.0}


def test_a_process_that_lived_long_has_a_clean_record() -> None:
    restarts = Restarts()
    for _ in range(4):
        restarts.delay_s(-signal.SIGSEGV, lived_s=0.1)
    assert restarts.delay_s(-signal.SIGSEGV, lived_s=60.0) == 0.0
    assert restarts.delay_s(-signal.SIGSEGV, lived_s=0.1) == 0.25


def test_ends_are_named() -> None:
    assert (describe_end(2), describe_end(-9)) == ("exit code 2", "SIGKILL")


def run(child: Child) -> tuple[list[str], int]:
    """Start a child; its lines and return code."""
    child.start(time.monotonic())
    select.select([child.handle], [], [], 10.0)
    lines = child.read_lines()
    returncode, _ = child.reap(time.monotonic())
    return lines, returncode


def test_both_outputs_come_by_lines_and_the_last_one_is_kept(tmp_path: Path) -> None:
    code = "import sys; print('one', flush=True); print('error: two', file=sys.stderr); print(end='three'); sys.exit(3)"
    child = Child("x", [sys.executable, "-c", code], os.environ, tmp_path)
    lines, returncode = run(child)
    assert (lines, returncode, child.last_line) == (["one", "error: two", "three"], 3, "three")


def test_a_child_ignores_ctrl_c(tmp_path: Path) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('alive')"
    assert run(Child("x", [sys.executable, "-c", code], os.environ, tmp_path)) == (["alive"], 0)


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; from pathlib import Path; from pagedserve.children import Child\n"
        "child = Child('x', [sys.executable, '-c', 'import time; time.sleep(60)'], os.environ, Path('.'))\n"
        "child.start(0.0); print(child._process.pid, flush=True); time.sleep(60)"
    )
    parent = Child("parent", [sys.executable, "-c", code], os.environ, Path(__file__).parents[2])
    parent.start(time.monotonic())
    lines: list[str] = []
    assert eventually(lambda: bool(lines.extend(parent.read_lines()) or lines), 10.0)
    (line,) = lines
    grandchild = psutil.Process(int(line))
    parent.send_signal(signal.SIGKILL)
    parent.reap(time.monotonic())
    assert eventually(lambda: not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE, 5.0)


class Output(io.StringIO):
    """A text output that may be a terminal, or closed at the other end."""

    def __init__(self, *, terminal: bool = False, closed: bool = False) -> None:
        super().__init__()
        self._terminal, self._closed_there = terminal, closed

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> int:
        if self._closed_there:
            raise BrokenPipeError
        return super().write(text)


def test_log_lines_have_time_and_name_and_no_colour_in_a_file() -> None:
    output = Output()
    LogLines(output).write("worker.0", "hello")
    assert re.fullmatch(r"\d\d:\d\d:\d\d worker\.0  \| hello\n", output.getvalue())


def test_log_lines_have_a_colour_for_each_name_on_a_terminal() -> None:
    output = Output(terminal=True)
    log = LogLines(output)
    for name in ("a", "b", "a"):
        log.write(name, "x")
    assert re.findall(r"\x1b\[(\d+)m\d", output.getvalue()) == ["36", "32", "36"]


def test_a_reader_who_went_away_ends_nothing() -> None:
    LogLines(Output(closed=True)).write("a", "x")


@pytest.mark.parametrize("variable", ["OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_children_get_no_thread_pools(variable: str) -> None:
    from pagedserve.config import Config, child_environment

    assert child_environment(Config())[variable] == "1"
