"""The command line in one process: help, flags, errors in one line, and the text of status."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from pagedserve import __version__
from pagedserve.cli import app
from pagedserve.config import KEYS
from pagedserve.contract.messages import ModelInfo, Status, WorkerStatus
from pagedserve.status import Rates, rates, render
from pagedserve.supervisor import ready_line

STATUS = Status(
    instance="default",
    model=ModelInfo(name="smollm2", path="/m", architecture="llama", vocab_size=10, max_model_len=100),
    ready=True,
    uptime_s=3723.4,
    scheduler_pid=10,
    workers=(
        WorkerStatus(worker_id=0, pid=11, state="busy", isa="avx512"),
        WorkerStatus(worker_id=1, pid=12, state="ready", isa="avx512"),
    ),
    num_running=3,
    num_waiting=2,
    block_size=16,
    num_blocks=1000,
    pool_bytes=123_456_789,
    weights_bytes=1,
    num_free_blocks=650,
    num_cached_blocks=100,
    num_referenced_blocks=250,
    num_steps=1234,
    num_prompt_tokens=5000,
    num_generation_tokens=700,
    num_cached_tokens=250,
    num_queried_tokens=1000,
    num_preemptions=1,
    num_draft_tokens=0,
    num_accepted_tokens=0,
    num_finished={"stop": 5, "length": 2, "abort": 0},
)


def invoke(*arguments: str) -> tuple[int, str]:
    """Exit code and everything printed."""
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def test_help_names_every_command_and_comes_at_once() -> None:
    started = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-m", "pagedserve", "--help"], capture_output=True, text=True, check=True, timeout=10
    )
    elapsed_s = time.monotonic() - started
    for name in ("up", "chat", "status", "pull", "list", "show", "rm"):
        assert f"\n  {name} " in result.stdout
    assert elapsed_s < 1.0  # 0.1 s on an idle machine


def test_help_imports_nothing_slow() -> None:
    code = "import sys, pagedserve.cli; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=10)
    assert set(result.stdout.split()) & {"numpy", "zmq", "rich", "gguf", "jinja2", "tiktoken"} == set()


def test_every_key_is_a_flag_of_up_with_its_description() -> None:
    code, output = invoke("up", "--help")
    words = " ".join(output.split())
    assert code == 0
    for key in KEYS:
        assert f"--{key.name.replace('_', '-')}" in words
        assert key.description in words


def test_version() -> None:
    assert invoke("--version") == (0, f"pagedserve {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("up", "--block-size", "17"), 2, "error: --block-size: expected a multiple of 16 within 16..256, got '17'\n"),
        (("up", "--config", "/no.toml"), 2, "error: /no.toml: No such file or directory\n"),
        (("up", "--instance", "a/b"), 2, "error: instance: expected letters, digits, '_' and '-' (at most 41), got"),
        (("show", "/no.gguf"), 1, "error: model /no.gguf: no such file or folder"),
        (("status", "--instance", "nobody"), 1, "error: no server answers at ipc://"),
    ],
)
def test_an_expected_error_is_one_line_and_a_code(
    arguments: tuple[str, ...], code: int, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    actual_code, output = invoke(*arguments)
    assert actual_code == code
    assert output.startswith(message)
    assert output.count("\n") == 1


def test_show_tells_the_shape_of_the_demo_model() -> None:
    code, output = invoke("show", "demo")
    assert code == 0
    assert "architecture llama\n" in output
    assert "context      4,096 tokens\n" in output


def test_pull_list_and_list_print_the_catalogue(tmp_path: Path) -> None:
    first, second = invoke("list", "--home", str(tmp_path)), invoke("pull", "list", "--home", str(tmp_path))
    assert first == second
    assert "\nsmollm2 " in first[1]


def test_status_shows_processes_requests_pool_and_speed() -> None:
    lines = render(STATUS, Rates(prompt_tokens_per_s=10.0, generation_tokens_per_s=55.55)).splitlines()
    assert lines == [
        "default: smollm2, ready, up 1:02:03",
        "  scheduler   pid 10",
        "  worker.0    pid 11       busy     avx512",
        "  worker.1    pid 12       ready    avx512",
        "requests      3 running, 2 waiting; finished: 2 length, 5 stop; 1 preemptions",
        "pool          [##########++++..........................] "
        "250 used + 100 cached of 1,000 blocks of 16 tokens (123 MB)",
        "speed         55.5 tokens/s out, 10.0 in",
        "total         700 tokens out, 5,000 in, 25% of prompts from cache, 1,234 steps",
    ]


def test_rates_are_differences_a_second() -> None:
    later = msgspec.structs.replace(STATUS, num_prompt_tokens=5100, num_generation_tokens=710)
    assert rates(STATUS, later, 2.0) == Rates(prompt_tokens_per_s=50.0, generation_tokens_per_s=5.0)


def test_the_ready_line_has_model_instruction_set_team_pool_and_endpoints() -> None:
    assert ready_line(STATUS, ["ipc:///x", "http://127.0.0.1:8000"]) == (
        "ready: smollm2 on avx512, team of 2, pool of 16,000 tokens (123,456,789 bytes), "
        "at ipc:///x http://127.0.0.1:8000"
    )
