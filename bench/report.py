"""What a person or a file gets of a benchmark: a table on the terminal, a JSON document. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.machine import circumstances

# Row of the table, key of the figures, unit. The names and their order are those of `vllm bench serve`.
_ROWS = (
    ("Successful requests", "completed", ""),
    ("Failed requests", "failed", ""),
    ("Benchmark duration", "duration", "s"),
    ("Total input tokens", "total_input_tokens", ""),
    ("Total generated tokens", "total_output_tokens", ""),
    ("Prompt tokens from cache", "total_cached_tokens", ""),
    ("Request throughput", "request_throughput", "req/s"),
    ("Output token throughput", "output_throughput", "tok/s"),
    ("Total token throughput", "total_token_throughput", "tok/s"),
)
_LATENCIES = (
    ("Time to first token", "ttft"),
    ("Time per output token, first excluded", "tpot"),
    ("Inter-token latency", "itl"),
    ("End-to-end latency", "e2el"),
)
_STATISTICS = ("mean", "median", "p99")
_SERVER_ROWS = (
    ("Steps", "num_steps", ""),
    ("Time in kernels", "kernel_share", "%"),
    ("Time in workers outside kernels", "worker_share", "%"),
    ("Time outside workers", "outside_share", "%"),
)


def document(
    benchmark: str, label: str, setup: Mapping[str, Any], results: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The JSON document of a run; `setup` says how it was run, each result has a `name`."""
    return {"benchmark": benchmark, "label": label, **circumstances(), "setup": dict(setup), "results": list(results)}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a document, numbers to five digits: more are noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_rounded(content), indent=1) + "\n")


def print_serving(console: Console, results: Sequence[Mapping[str, Any]]) -> None:
    """A column for each workload, a row for each figure."""
    table = Table(title="Serving benchmark", title_justify="left")
    table.add_column("")
    for result in results:
        table.add_column(str(result["name"]), justify="right")
    for name, key, unit in _ROWS:
        table.add_row(_titled(name, unit), *(number(result[key]) for result in results))
    for name, key in _LATENCIES:
        table.add_section()
        table.add_row(f"{name} ({key.upper()})", *("" for _ in results))
        for statistic in _STATISTICS:
            cells = (number(result[f"{statistic}_{key}_ms"]) for result in results)
            table.add_row(f"  {statistic.capitalize()} {key.upper()} (ms)", *cells)
    if all("server" in result for result in results):
        table.add_section()
        for name, key, unit in _SERVER_ROWS:
            table.add_row(_titled(name, unit), *(number(result["server"][key]) for result in results))
        for process in results[0]["server"]["cpu_cores"]:
            cells = (number(result["server"]["cpu_cores"].get(process)) for result in results)
            table.add_row(f"CPU of {process} (cores)", *cells)
    console.print(table)


def number(value: Any) -> str:
    """A figure for people: four digits, integers whole, "-" for none."""
    if value is None:
        return "-"
    if isinstance(value, str | int):
        return str(value)
    digits = max(0, 3 - len(str(int(abs(value)))) + 1)
    return f"{value:.{min(digits, 3)}f}"


def _titled(name: str, unit: str) -> str:
    return f"{name} ({unit})" if unit else name


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_rounded(item) for item in value]
    return value
