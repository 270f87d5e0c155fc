"""`compare`: the figures of two result files side by side, with ratios."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from bench.report import number
from pagedserve.contract.errors import PagedServeError

_COUNTS = ("completed", "failed", "total_input_tokens", "total_output_tokens", "total_cached_tokens", "duration")
_HIGHER_IS_BETTER = ("throughput", "gbytes_per_s", "gops_per_s", "gflops_per_s")
_LOWER_IS_BETTER = ("_ms", "_us")


class Ratio(NamedTuple):
    """One figure in both files. `better` is how many times better B is than A; above 1 is a gain."""

    name: str
    figure: str
    a: float
    b: float
    ratio: float  # b / a
    better: float


def read_document(path: Path) -> dict[str, Any]:
    """A result file; PagedServeError when it is none."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PagedServeError(f"{path}: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("results"), list):
        raise PagedServeError(f"{path}: expected a result of pagedserve bench (an object with results)")
    return content


def ratios(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Ratio]:
    """The ratio of every figure that results of the same name have in both."""
    others = {result["name"]: result for result in b["results"]}
    for result in a["results"]:
        other = others.get(result["name"], {})
        for figure, value in result.items():
            sense = _sense(figure)
            if sense and isinstance(value, int | float) and value and other.get(figure):
                ratio = other[figure] / value
                yield Ratio(result["name"], figure, value, other[figure], ratio, ratio**sense)


def print_comparison(console: Console, a: Path, b: Path) -> None:
    """Print a row for each figure. PagedServeError when the files have none in common."""
    first, second = read_document(a), read_document(b)
    rows = list(ratios(first, second))
    if not rows:
        raise PagedServeError(f"{a} and {b} have no result in common")
    for letter, path, content in (("A", a, first), ("B", b, second)):
        cpu = content.get("machine", {}).get("cpu", "?")
        console.print(f"{letter}: {path.name}  {content.get('label', '')}  {content.get('commit', '?')}  {cpu}")
    table = Table()
    for heading in ("", "figure", "A", "B", "B / A", "B is better"):
        table.add_column(heading, justify="left" if heading in ("", "figure") else "right")
    for i, row in enumerate(rows):
        if i and rows[i - 1].name != row.name:
            table.add_section()
        better = f"{row.better:.2f} ×" if row.better >= 1 else f"[red]{row.better:.2f} ×[/red]"
        table.add_row(row.name, row.figure, number(row.a), number(row.b), f"{row.ratio:.3f}", better)
    console.print(table)


def _sense(figure: str) -> int:
    """1: more is better, -1: less is better, 0: neither."""
    if figure in _COUNTS or figure.startswith("std_"):
        return 0
    if any(part in figure for part in _HIGHER_IS_BETTER):
        return 1
    return -1 if figure.endswith(_LOWER_IS_BETTER) else 0
