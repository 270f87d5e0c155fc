"""`context`: TTFT and TPOT against context length, beside what the arithmetic predicts from this machine's peaks.

Importing this imports Numba, which reads its environment once: whoever does sets that first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.cost import Cost, model_cost
from bench.peaks import PeakMeter, Peaks
from bench.report import number
from bench.serving import Options, run_workloads
from bench.team import Team
from bench.workloads import Workload
from pagedserve.config import Config
from pagedserve.models.catalog import fetch_if_missing

LENGTHS = (128, 512, 1024, 2048, 3072, 4096, 6144, 8192)  # prompt and output together
OUTPUT_LEN, NUM_PROMPTS = 32, 2


def run_context(
    config: Config, lengths: Sequence[int], num_cores: int, options: Options, console: Console
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure the peaks, then one workload for each length; the setup holds the slopes, measured and predicted."""
    peaks = PeakMeter(Team(num_cores)).measure()
    path = fetch_if_missing(config.model, config.models_dir, console.print)
    cost = model_cost(str(path), config.compute, config.quantize)
    workloads = [Workload(f"context {n}", 1, NUM_PROMPTS, n - OUTPUT_LEN, OUTPUT_LEN) for n in lengths]
    setup, results = run_workloads(config, workloads, options, console)
    for length, result in zip(lengths, results, strict=True):
        result["predicted_ttft_ms"] = 1e3 * cost.ttft_s(length - OUTPUT_LEN, peaks)
        result["predicted_tpot_ms"] = 1e3 * cost.tpot_s(length, peaks)
    setup |= {"peaks": asdict(peaks), "cost": asdict(cost), "slopes": slopes(lengths, results, cost, peaks)}
    return setup, results


def slopes(
    lengths: Sequence[int], results: Sequence[dict[str, Any]], cost: Cost, peaks: Peaks
) -> dict[str, dict[str, float]]:
    """Least-squares fits: TPOT a line in the context, TTFT a parabola through zero; each with its prediction.

    tpot_us_per_token: more time a decoded token for each token of context. ttft_us_per_token and ttft_ns_per_pair:
    the linear layers' and the attention's part of the time of a prompt.
    """
    contexts = np.array(lengths, dtype=np.float64)
    prompts = contexts - OUTPUT_LEN
    tpot_ms = np.array([result["median_tpot_ms"] for result in results])
    ttft_ms = np.array([result["median_ttft_ms"] for result in results])
    line = np.polyfit(contexts - OUTPUT_LEN / 2, tpot_ms, 1)
    parts, *_ = np.linalg.lstsq(np.stack([prompts, prompts * (prompts + 1) / 2], axis=1), ttft_ms, rcond=None)
    return {
        "measured": {
            "tpot_us_per_token": 1e3 * float(line[0]),
            "ttft_us_per_token": 1e3 * float(parts[0]),
            "ttft_ns_per_pair": 1e6 * float(parts[1]),
        },
        "predicted": {
            "tpot_us_per_token": cost.kv_bytes_per_token / peaks.read_gbytes_per_s / 1e3,
            "ttft_us_per_token": cost.linear_operations_per_token / peaks.int8_gops / 1e3,
            "ttft_ns_per_pair": cost.attention_operations_per_pair / peaks.float32_gflops,
        },
    }


def print_context(console: Console, setup: dict[str, Any], results: Sequence[dict[str, Any]]) -> None:
    """A row for each length, then the slopes."""
    table = Table(title="Context length", title_justify="left")
    for heading in ("", "TTFT (ms)", "at the peaks", "TPOT (ms)", "at the peaks"):
        table.add_column(heading, justify="right")
    for result in results:
        keys = ("median_ttft_ms", "predicted_ttft_ms", "median_tpot_ms", "predicted_tpot_ms")
        table.add_row(result["name"], *(number(result[key]) for key in keys))
    console.print(table)
    measured, predicted = setup["slopes"]["measured"], setup["slopes"]["predicted"]
    for key, what in (
        ("tpot_us_per_token", "TPOT, µs for each token of context"),
        ("ttft_us_per_token", "TTFT, µs for each token of the prompt"),
        ("ttft_ns_per_pair", "TTFT, ns for each pair of a query and a token it sees"),
    ):
        console.print(f"{what}: {number(measured[key])}, at the peaks {number(predicted[key])}")
