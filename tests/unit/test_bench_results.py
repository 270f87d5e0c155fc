"""Result documents, their comparison, and the slopes of the context benchmark. No figure here is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.compare import print_comparison, ratios
from bench.report import document, number, write_json
from pagedserve.contract.errors import PagedServeError


def _result(name: str, **figures: Any) -> dict[str, Any]:
    return {"name": name, **figures}


def test_a_document_says_on_what_and_how_it_was_measured(tmp_path: Path) -> None:
    write_json(tmp_path / "new" / "r.json", document("serve", "before", {"seed": 1}, [_result("conc8", x=1 / 3)]))
    content = json.loads((tmp_path / "new" / "r.json").read_text())
    assert (content["benchmark"], content["label"], content["setup"]) == ("serve", "before", {"seed": 1})
    assert content["results"] == [{"name": "conc8", "x": 0.33333}]
    assert content["commit"]
    assert {"cpu", "cores", "memory", "python", "numba"} <= set(content["machine"])


def test_more_throughput_and_less_latency_are_both_better() -> None:
    a = {"results": [_result("conc8", output_throughput=100.0, median_tpot_ms=10.0, completed=32, std_ttft_ms=1.0)]}
    b = {"results": [_result("conc8", output_throughput=150.0, median_tpot_ms=5.0, completed=31, std_ttft_ms=9.0)]}
    found = {row.figure: (row.ratio, row.better) for row in ratios(a, b)}
    assert found == {"output_throughput": (1.5, 1.5), "median_tpot_ms": (0.5, 2.0)}


def test_results_are_compared_by_name_and_missing_figures_are_left_out() -> None:
    a = {"results": [_result("conc8", mean_itl_ms=1.0), _result("decode1", mean_itl_ms=2.0, mean_tpot_ms=None)]}
    b = {"results": [_result("decode1", mean_itl_ms=3.0, mean_tpot_ms=1.0), _result("conc32", mean_itl_ms=1.0)]}
    assert [(row.name, row.figure, row.ratio) for row in ratios(a, b)] == [("decode1", "mean_itl_ms", 1.5)]


def test_compare_refuses_what_is_no_result(tmp_path: Path) -> None:
    for text in ("not json", "[]", '{"results": 1}'):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(PagedServeError, match=r"a\.json"):
            print_comparison(Console(), tmp_path / "a.json", tmp_path / "a.json")
    (tmp_path / "a.json").write_text('{"results": []}')
    with pytest.raises(PagedServeError, match="no result in common"):
        print_comparison(Console(), tmp_path / "a.json", tmp_path / "a.json")


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (7, "7"), (0.12345, "0.123"), (1.2346, "1.235"), (12.346, "12.35"), (123.46, "123.5")],
)
def test_figures_have_four_digits(value: Any, text: str) -> None:
    assert number(value) == text
