"""The documented example of the kernel layer runs as shown."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "paged_attention.py"


def test_the_example_forks_attends_and_agrees_with_dense_attention(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "prompt: 300 tokens in 19 blocks",
        "3 forks: 19 blocks, each with 4 references",
        "1, 3, 5 and 7 own tokens: 24 blocks, of which the 18 full ones are shared",
    ]
    assert len([line for line in lines if "differs from dense attention by" in line]) == 4
    assert lines[-1] == "the last query alone: the same bits"
