"""What issue and design promise about processes: starting, ending, dying, and leaving nothing behind."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pagedserve.client import Client
from tests.server import TINY, RunFolder, Running, command, contention, eventually

Start = Callable[..., Running]
PROMPT, PARAMS = "Once upon a time", {"temperature": 0.7, "seed": 7, "max_tokens": 60, "ignore_eos": True}


def tokens(client: Client) -> tuple[int, ...]:
    """The output of one fixed request."""
    return client.generate(PROMPT, **PARAMS).result().outputs[0].token_ids  # type: ignore[arg-type]


def assert_clean_end(server: Running, folder: RunFolder, children: list[psutil.Process]) -> None:
    """No process, no segment, no run folder, no warning."""
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert folder.segments() == []
    assert list((folder.path / "pagedserve").iterdir()) == []
    assert "resource_tracker" not in server.output
    assert "Traceback" not in server.output


def test_up_prints_one_ready_line_with_everything_in_it(start: Start, folder: RunFolder) -> None:
    server = start()
    line = server.wait_for("ready: ")
    assert re.search(
        r"server +\| ready: demo on (avx512|avx2|generic), team of 2, pool of 4,096 tokens \([0-9,]+ bytes\), at ipc://",
        line,
    )
    assert folder.endpoint() in line
    assert sum("ready: " in line for line in server.lines) == 1
    assert any("2 workers (as configured)" in line for line in server.lines)
    assert {line.split()[1] for line in server.lines} == {"server", "scheduler", "worker.0", "worker.1"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_everything_within_five_seconds(start: Start, folder: RunFolder, number: signal.Signals) -> None:
    server = start()
    server.wait_for("ready: ")
    children = server.children()
    assert len(children) == 3
    assert len(folder.segments()) == 3
    assert server.end(number, timeout_s=5.0) == 0
    assert_clean_end(server, folder, children)


def test_ctrl_c_reaches_the_whole_process_group_and_ends_it_in_order(start: Start, folder: RunFolder) -> None:
    server = start()
    server.wait_for("ready: ")
    children = server.children()
    os.killpg(server.process.pid, signal.SIGINT)
    assert server.process.wait(5.0) == 0
    assert_clean_end(server, folder, children)


def test_a_signal_while_loading_ends_it_too(start: Start, folder: RunFolder) -> None:
    server = start()
    server.wait_for("scheduler | ")
    children = server.children()
    assert server.end(signal.SIGTERM, timeout_s=5.0) == 0
    assert_clean_end(server, folder, children)


def test_a_signal_in_the_middle_of_requests_ends_it_too(start: Start, folder: RunFolder) -> None:
    server = start()
    server.wait_for("ready: ")
    children = server.children()
    with Client(folder.endpoint()) as client:
        streams = [client.generate(PROMPT, max_tokens=3000, ignore_eos=True) for _ in range(4)]
        next(streams[0])
        assert server.end(signal.SIGTERM, timeout_s=5.0) == 0
        assert_clean_end(server, folder, children)


def test_when_the_supervisor_is_killed_nobody_is_left_and_the_next_up_reaps_its_segments(
    start: Start, folder: RunFolder
) -> None:
    server = start()
    server.wait_for("ready: ")
    children = server.children()
    server.process.kill()
    assert eventually(lambda: not any(child.is_running() for child in children), 5.0)
    assert len(folder.segments()) == 3
    other = start("--instance", "other", *TINY)
    other.wait_for("removed what was left of instance default")
    other.wait_for("ready: ")
    assert {name for name in folder.segments() if folder.tag("default") in name} == set()
    assert not (folder.path / "pagedserve" / "default").exists()


def test_the_same_instance_starts_again_after_a_kill(start: Start, folder: RunFolder) -> None:
    server = start()
    server.wait_for("scheduler | ")
    server.process.kill()
    server.process.wait()
    start().wait_for("ready: ")
    with Client(folder.endpoint()) as client:
        assert len(tokens(client)) == 60


def test_a_second_up_fails_at_once_and_names_the_endpoint(start: Start, folder: RunFolder) -> None:
    server = start()
    server.wait_for("ready: ")
    started = time.monotonic()
    second = folder.run("up", *TINY)
    assert time.monotonic() - started < 1.0 * contention()
    assert second.returncode == 1
    assert second.stderr.splitlines() == [
        f"error: {folder.endpoint()} is in use: an instance named 'default' is running (another name: --instance)"
    ]


def test_two_instances_side_by_side_do_not_meet(start: Start, folder: RunFolder) -> None:
    first, second = start("--instance", "one", *TINY), start("--instance", "two", *TINY)
    first.wait_for("ready: ")
    second.wait_for("ready: ")
    with Client(folder.endpoint("one")) as one, Client(folder.endpoint("two")) as two:
        assert (one.welcome.instance, two.welcome.instance) == ("one", "two")
        assert tokens(one) == tokens(two)
        assert first.end() == 0
        assert len(tokens(two)) == 60
    assert len(folder.segments()) == 3


def test_a_killed_worker_is_back_and_no_token_changes(start: Start, folder: RunFolder) -> None:
    server = start()
    server.wait_for("ready: ")
    with Client(folder.endpoint()) as client:
        expected = tokens(client)
        stream = client.generate(PROMPT, **PARAMS)  # type: ignore[arg-type]
        next(stream)
        server.child("--worker-id", "1").kill()
        assert stream.result().outputs[0].token_ids == expected
        server.wait_for("worker.1 ended with SIGKILL: starting it again")
        assert eventually(
            lambda: [worker.state for worker in client.status().workers] == ["ready", "ready"], timeout_s=10.0
        )
        assert tokens(client) == expected


def test_a_killed_scheduler_is_started_again_and_streams_go_on(start: Start, folder: RunFolder) -> None:
    server = start()
    server.wait_for("ready: ")
    with Client(folder.endpoint(), give_up_s=60.0) as client:
        expected = tokens(client)
        params = {**PARAMS, "max_tokens": 1500}
        stream = client.generate(PROMPT, **params)  # type: ignore[arg-type]
        first = next(stream)
        server.child("pagedserve.scheduler").kill()
        output = stream.result().outputs[0]
        assert first.token_ids == output.token_ids[: len(first.token_ids)]
        assert output.token_ids[:60] == expected
        assert len(output.token_ids) == 1500
        server.wait_for("scheduler ended with SIGKILL: starting it again, and its workers with it")
    assert server.end() == 0
    assert folder.segments() == []


def test_an_idle_server_uses_no_cpu(shared: tuple[RunFolder, Running]) -> None:
    _, server = shared
    processes = [psutil.Process(server.process.pid), *server.children()]

    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    before = used()
    time.sleep(2.0)
    assert used() - before < 0.1


def test_honcho_runs_the_same_entry_points(folder: RunFolder) -> None:
    environment = {
        **folder.environment,
        "PAGEDSERVE_MODEL": "demo",
        "PAGEDSERVE_POOL_TOKENS": "4096",
        "PAGEDSERVE_HTTP": "false",
        "PATH": f"{Path(sys.executable).parent}:{folder.environment['PATH']}",
    }
    honcho = Running([sys.executable, "-m", "honcho", "start", "-c", "worker=2,scheduler=1"], environment)
    try:
        honcho.wait_for("worker 0 is ready")
        honcho.wait_for("worker 1 is ready")
        with Client(folder.endpoint()) as client:
            assert len(client.wait_ready().workers) == 2
            assert len(tokens(client)) == 60
        children = honcho.children()
        honcho.end(signal.SIGTERM, timeout_s=10.0)
        assert eventually(lambda: not any(child.is_running() for child in children), 5.0)
        assert folder.segments() == []
    finally:
        honcho.kill()


# ---- what cannot start says so in one line ----------------------------------------------------------------------


def assert_fails_in_one_line(start: Start, folder: RunFolder, message: str, code: int, *arguments: str) -> None:
    """`up` ends with this code, `message` is the last line, and nothing is left."""
    server = start(*arguments)
    assert server.process.wait(60.0) == code
    server.kill()
    assert re.search(message, server.lines[-1]), server.output
    assert sum(line.startswith("error: ") for line in server.lines) == 1
    assert "Traceback" not in server.output
    assert folder.segments() == []


def test_a_damaged_model_file_is_named(start: Start, folder: RunFolder) -> None:
    model = folder.path / "broken.gguf"
    model.write_bytes(b"GGUF" + b"\x03\x00\x00\x00" + b"\xff" * 64)
    assert_fails_in_one_line(start, folder, r"^error: .*broken\.gguf", 1, "--model", str(model), "--no-http")


def test_a_missing_model_file_is_named(start: Start, folder: RunFolder) -> None:
    assert_fails_in_one_line(start, folder, r"^error: .*/no/such\.gguf", 1, "--model", "/no/such.gguf", "--no-http")


def test_too_little_shared_memory_names_needed_and_free_bytes(start: Start, folder: RunFolder) -> None:
    arguments = ("--model", "demo", "--workers", "1", "--pool-bytes", str(1 << 50), "--no-http")
    assert_fails_in_one_line(
        start, folder, r"^error: .*/dev/shm .*needed [0-9,]+ bytes, free [0-9,]+ bytes", 1, *arguments
    )


def test_an_unknown_key_ends_with_code_2_and_names_file_and_key(start: Start, folder: RunFolder) -> None:
    file = folder.path / "c.toml"
    file.write_text("wrokers = 2\n")
    message = rf"^error: {re.escape(str(file))}: wrokers: unknown key, did you mean workers\?$"
    assert_fails_in_one_line(start, folder, message, 2, "--config", str(file))


def test_debug_shows_the_traceback(folder: RunFolder) -> None:
    result = folder.run("up", "--model", "/no/such.gguf", "--no-http", "--debug")
    assert result.returncode != 0
    assert "Traceback" in result.stderr


def test_a_folder_named_workers_where_the_user_stands_is_not_taken(folder: RunFolder) -> None:
    (folder.path / "workers").mkdir()
    (folder.path / "workers" / "__main__.py").write_text("raise SystemExit('the wrong one')")
    server = Running(command("up", *TINY), folder.environment, folder.path)
    try:
        server.wait_for("ready: ")
    finally:
        server.kill()
