"""The README's examples run as they are shown."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server import REPOSITORY, RunFolder, Running, command

BLOCKS = re.findall(r"```(python|sh)\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
SHELL = [text for language, text in BLOCKS if language == "sh"]


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[RunFolder]:
    """What `pagedserve up` starts, with its default model and port."""
    folder = RunFolder()
    running = Running(command("up", "--pool-tokens", "8192"), folder.environment)
    try:
        running.wait_for("ready: ")
        yield folder
    finally:
        running.kill()
        folder.remove()


@pytest.mark.parametrize("text", PYTHON, ids=lambda text: text.split("\n")[0])
def test_a_python_example_runs(server: RunFolder, text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", text], env=server.environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    if "France" in text:
        assert "Paris" in done.stdout


@pytest.mark.parametrize("text", SHELL)
def test_a_shell_example_runs(server: RunFolder, text: str) -> None:
    done = subprocess.run(
        ["bash", "-c", text], env=server.environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("data: [DONE]")
