"""`pagedserve chat` and `status` as a person uses them: on a terminal, with a question, from a pipe, with no server."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pagedserve.client import Client
from tests.server import START_S, RunFolder, Running, command, contention, eventually

Shared = tuple[RunFolder, Running]


class Terminal:
    """A command on a terminal of its own: what it shows, and keys to press."""

    def __init__(self, folder: RunFolder, *arguments: str) -> None:
        self.shown = ""
        self._seen = 0
        environment = {**folder.environment, "TERM": "xterm", "COLUMNS": "100", "PAGEDSERVE_HOME": str(folder.path)}
        self.pid, self._descriptor = pty.fork()
        if self.pid == 0:
            os.execvpe(command()[0], command(*arguments), environment)

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self._descriptor, keys.encode())

    def wait_for(self, text: str, timeout_s: float = 30.0) -> str:
        """Read until `text` comes, after what earlier calls waited for; what came until then."""
        deadline = time.monotonic() + timeout_s
        while (place := self.shown.find(text, self._seen)) < 0:
            assert time.monotonic() < deadline, f"no {text!r} in {self.shown[self._seen :]!r}"
            if not self._read(0.1):
                raise AssertionError(f"ended without {text!r}: {self.shown[self._seen :]!r}")
        part = self.shown[self._seen : place]
        self._seen = place + len(text)
        return part

    def press_at_prompt(self, keys: str) -> None:
        """Wait until it asks again, then type; a control character before that is the terminal's, not the chat's.

        A prompt that begins turns bracketed paste on, once and after it took over the keyboard; its ">>>" is drawn
        again when it ends.
        """
        self.wait_for("\x1b[?2004h")
        self.press(keys)

    def enter(self, line: str) -> None:
        """Wait until it asks again, then type a line."""
        self.press_at_prompt(line + "\r")

    def end(self, timeout_s: float = 10.0) -> int:
        """Wait until it has ended by itself; its exit code."""
        deadline = time.monotonic() + timeout_s * contention()
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            if not self._read(0.05):
                time.sleep(0.05)
        raise AssertionError(f"still runs: {self.shown[self._seen :]!r}")

    def _read(self, timeout_s: float) -> bool:
        """Take what it shows within this time; False when it has ended."""
        if not select.select([self._descriptor], [], [], timeout_s)[0]:
            return True
        try:
            new = os.read(self._descriptor, 65536).decode(errors="replace")
        except OSError:
            return False
        self.shown += new
        for _ in range(new.count("\x1b[6n")):  # it asks where the cursor is, as a terminal can say
            self.press("\x1b[1;1R")
        return True

    def close(self) -> None:
        """End it, whatever it does."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._descriptor)


@pytest.fixture
def terminal(shared: Shared) -> Iterator[Terminal]:
    """A chat with the shared server."""
    chat = Terminal(shared[0], "chat", "--set", "max_tokens=30", "--set", "ignore_eos=true")
    yield chat
    chat.close()


def test_one_question_prints_the_answer_only(shared: Shared) -> None:
    result = shared[0].run("chat", "--set", "max_tokens=5", "--set", "temperature=0", "hello", "there")
    assert result.returncode == 0
    assert result.stdout.strip() != ""
    assert result.stderr == "(cut at 5 tokens)\n"
    again = shared[0].run("chat", "--set", "max_tokens=5", "--set", "temperature=0", text="hello there\n")
    assert again.stdout == result.stdout


def test_stats_are_one_line_on_the_error_output(shared: Shared) -> None:
    # Few tokens of so small a model may all arrive at once, and then nobody knows how quick they were.
    result = shared[0].run("chat", "--stats", "--set", "max_tokens=200", "--set", "ignore_eos=true", "hello")
    assert re.search(
        r"^\[first token after \d\.\d{3} s, [\d.]+ tokens/s, \d+ tokens of prompt \(\d+ from cache\), 200 of answer\]$",
        result.stderr,
        re.M,
    )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "error: nothing to ask: give a question, or text on standard input\n"),
        (("--set", "temperature=-1", "x"), 2, "error: temperature must be within [0.0, 100.0], got -1.0\n"),
        (("--set", "heat=1", "x"), 2, "error: heat: unknown sampling parameter"),
        (("--set", "heat", "x"), 2, "error: --set: expected NAME=VALUE, got heat\n"),
        (("--endpoint", "ipc:///no/such", "x"), 1, "error: no server answers at ipc:///no/such"),
    ],
)
def test_what_cannot_be_asked_is_one_line(shared: Shared, arguments: tuple[str, ...], code: int, message: str) -> None:
    result = shared[0].run("chat", *arguments)
    assert (result.returncode, result.stdout) == (code, "")
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1


def test_a_conversation_streams_and_its_second_turn_comes_from_the_cache(terminal: Terminal) -> None:
    terminal.enter("/stats")
    terminal.wait_for("figures on")
    terminal.enter("tell me something long enough to fill a few blocks of the pool")
    terminal.wait_for("(cut at 30 tokens)")
    terminal.wait_for("first token after")
    num_prompt_tokens = int(re.findall(r"(\d+) tokens of prompt", terminal.wait_for(" of answer]"))[0])
    terminal.enter("and more")
    terminal.wait_for("(cut at 30 tokens)")
    terminal.wait_for("tokens of prompt (")
    cached = int(re.findall(r"\d+", terminal.wait_for(" from cache)"))[0])
    assert cached > num_prompt_tokens - 16  # of the answer nothing here: the demo model writes bytes that are no text
    terminal.press_at_prompt("\x04")
    assert terminal.end() == 0


def test_slash_commands_answer_and_wrong_ones_end_nothing(terminal: Terminal, shared: Shared) -> None:
    file = shared[0].path / "saved.json"
    for line, answer in (
        ("/help", "Ctrl-C              stops the answer"),
        ("/set temperature 0.3", "temperature = 0.3"),
        ("/set temperature -3", "error: temperature must be within"),
        ("/nonsense", "error: unknown command /nonsense"),
        ("/system Be kind.", "system prompt set"),
        (f"/save {file}", "saved 0 messages"),
        (f"/load {file}", "loaded 0 messages"),
        ("/clear", "forgotten"),
    ):
        terminal.enter(line)
        terminal.wait_for(answer)
    assert '"system": "Be kind."' in file.read_text()
    terminal.enter("/bye")
    assert terminal.end() == 0


def test_triple_quotes_begin_and_end_a_text_of_many_lines(terminal: Terminal, shared: Shared) -> None:
    file = shared[0].path / "many.json"
    terminal.enter('"""one')
    terminal.enter("two")
    terminal.wait_for("...")
    terminal.enter('three"""')
    terminal.wait_for("...")
    terminal.wait_for("(cut at 30 tokens)")
    terminal.enter(f"/save {file}")
    terminal.wait_for("saved 2 messages")
    assert r'"one\ntwo\nthree"' in file.read_text()


def test_ctrl_c_stops_the_answer_only_and_frees_its_blocks_within_a_second(terminal: Terminal, shared: Shared) -> None:
    terminal.enter("/set max_tokens 3900")
    terminal.wait_for("max_tokens = 3900")
    with Client(shared[0].endpoint()) as client:
        terminal.enter("hello")
        assert eventually(lambda: client.status().num_running == 1, 10.0)
        time.sleep(0.05)  # the demo model needs half a second for all 3,900
        terminal.press("\x03")
        assert eventually(lambda: client.status().num_referenced_blocks == 0, 1.0)
    terminal.wait_for("(stopped)")
    terminal.enter("/clear")  # a random model's text has more tokens than it was made of: too many for the context
    terminal.enter("/set max_tokens 5")
    terminal.wait_for("max_tokens = 5")
    terminal.enter("hello again")
    terminal.wait_for("(cut at 5 tokens)")
    terminal.press_at_prompt("\x03")  # it forgets the line
    terminal.press_at_prompt("\x04")
    assert terminal.end() == 0


def test_with_no_server_it_starts_one_says_so_and_leaves_nothing(folder: RunFolder) -> None:
    arguments = ("--model", "demo", "--set", "max_tokens=5", "--set", "ignore_eos=true", "hello")
    chat = Running(command("chat", *arguments), folder.environment)
    try:
        chat.wait_for("no server is running: starting one")
        assert chat.process.wait(START_S) == 0
        assert chat.lines[-1] == "(cut at 5 tokens)" or "(cut at 5 tokens)" in chat.lines
        assert list((folder.path / "pagedserve").iterdir()) == []
    finally:
        chat.kill()


def test_when_a_chat_is_killed_its_server_ends_too(folder: RunFolder) -> None:
    chat = Terminal(folder, "chat", "--model", "demo", "--home", str(Path.home() / ".cache" / "pagedserve"))
    try:
        chat.wait_for(">>>", START_S)
        children = psutil.Process(chat.pid).children(recursive=True)
        assert len(children) >= 3
        os.kill(chat.pid, signal.SIGKILL)
        assert eventually(lambda: not any(child.is_running() for child in children), 5.0)
        assert list((folder.path / "pagedserve").iterdir()) == []
    finally:
        chat.close()


def test_a_server_that_cannot_start_says_why_in_one_line(folder: RunFolder) -> None:
    model = folder.path / "broken.gguf"
    model.write_bytes(b"GGUF broken")
    result = folder.run("chat", "--model", str(model), "hello")
    assert result.returncode == 1
    assert re.search(r"^error: .*broken\.gguf", result.stderr.splitlines()[-1])
    assert "Traceback" not in result.stderr


def test_status_shows_the_running_server(shared: Shared) -> None:
    result = shared[0].run("status")
    assert result.returncode == 0
    assert result.stdout.startswith("default: demo, ready, up 0:0")
    assert len(re.findall(r"worker\.\d .* ready ", result.stdout)) == 2


def test_status_watch_goes_on_until_ctrl_c(shared: Shared) -> None:
    watch = Running(command("status", "--watch"), shared[0].environment)
    try:
        assert eventually(lambda: sum("default: demo" in line for line in watch.lines) >= 2, 10.0)
        assert watch.end(signal.SIGINT) == 0
    finally:
        watch.kill()
