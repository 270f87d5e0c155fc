"""`kernels`: attention and linear layers by themselves, each figure beside what this machine can do at most.

Importing this imports Numba, which reads its environment once: whoever does sets that first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import attention, linear
from bench.peaks import PeakMeter, Peaks
from bench.report import number
from bench.team import Team
from workers.kernels.linear_pack import is_quantized, native_wtype
from workers.kernels.simd import isa_name

CONTEXTS, BATCHES, PREFILL_LEN = (128, 256, 512, 1024, 2048), (1, 2, 4, 8), 256

Result = dict[str, Any]


def run_kernels(num_cores: int, console: Console) -> tuple[dict[str, Any], list[Result]]:
    """Measure everything; the setup with the peaks, memory's best, and a result for each kernel, shape and variant."""
    team = Team(num_cores)
    meter = PeakMeter(team)
    decode = [attention.Shape(context, batch) for context in CONTEXTS for batch in BATCHES]
    prefill = [attention.Shape(context, 1, min(context, PREFILL_LEN)) for context in CONTEXTS]
    results: list[Result] = []
    with Progress(console=console, refresh_per_second=2, transient=True) as progress:
        task = progress.add_task("peaks", total=1 + len(decode) + len(prefill) + len(linear.TYPES))
        peaks = best = meter.measure()

        def memory_now() -> Peaks:
            nonlocal best
            now = meter.measure_memory(peaks)
            best = max(best, now, key=lambda p: p.read_gbytes_per_s)
            return now

        progress.advance(task)
        for shape in (*decode, *prefill):
            progress.update(task, description=f"attention, context {shape.context}, batch {shape.batch}")
            results += _attention_results(shape, memory_now(), attention.measure(shape, team))
            progress.advance(task)
        for kind in linear.TYPES:
            progress.update(task, description=f"linear, {kind.name}")
            layer, now = linear.packed_layer(kind), memory_now()
            for rows in linear.ROWS:
                shape_ = linear.Shape(kind, rows)
                results.append(_linear_result(shape_, now, layer.nbytes, linear.measure(shape_, layer, team)))
            progress.advance(task)
    return {"isa": isa_name(), "peaks": asdict(best)}, results


def print_kernels(console: Console, setup: Mapping[str, Any], results: Sequence[Result]) -> None:
    """The peaks, then a table for attention and one for linear layers."""
    peaks = setup["peaks"]
    console.print(
        f"{setup['isa']}, {peaks['cores']} cores: {peaks['int8_gops']:.0f} GOP/s int8 dot products, "
        f"{peaks['float32_gflops']:.0f} GFLOP/s float32; at best {peaks['read_gbytes_per_s']:.1f} GB/s read, "
        f"{peaks['read_pages_gbytes_per_s']:.1f} GB/s in pages of 4 KB; shares: of what was read just before"
    )
    console.print(
        f"attention: {attention.NUM_HEADS} heads of {attention.HEAD_DIM}, {attention.NUM_KV_HEADS} for keys and "
        f"values, float16 pool; linear: {linear.N_IN} inputs, {linear.N_OUT} outputs; one layer, from memory"
    )
    for kernel, columns in (("attention", ("context", "batch", "query_len", "variant")), ("linear", ("type", "rows"))):
        table = Table(title=kernel, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        headings = (column.replace("query_len", "queries") for column in columns)
        for heading in (*headings, "µs", "GB/s", "of peak", "GOP/s", "of peak"):
            table.add_column(heading, justify="right", no_wrap=True)
        group = None
        for result in (result for result in results if result["kernel"] == kernel):
            if group not in (None, result[columns[0]]):
                table.add_section()
            group = result[columns[0]]
            table.add_row(
                *(str(result[column]) for column in columns),
                *(number(result[key]) for key in ("time_us", "gbytes_per_s")),
                f"{result['share_of_read']:.0%}",
                number(result["gops_per_s"]),
                f"{result['share_of_arithmetic']:.0%}",
            )
        console.print(table)


def _attention_results(shape: attention.Shape, peaks: Peaks, seconds: Mapping[str, float]) -> list[Result]:
    kind = "decode" if shape.query_len == 1 else "prefill"
    return [
        {
            "name": f"attention {kind} context {shape.context} batch {shape.batch} {variant}",
            "kernel": "attention",
            **asdict(shape),
            "variant": variant,
            **_figures(shape.num_bytes, shape.num_operations, taken, peaks, peaks.float32_gflops),
        }
        for variant, taken in seconds.items()
    ]


def _linear_result(shape: linear.Shape, peaks: Peaks, weight_bytes: int, seconds: float) -> Result:
    wtype = native_wtype(shape.type)
    assert wtype is not None
    arithmetic = peaks.int8_gops if is_quantized(wtype) else peaks.float32_gflops
    num_bytes = weight_bytes + 4 * shape.rows * (linear.N_IN + linear.N_OUT)
    return {
        "name": f"linear {shape.type.name} rows {shape.rows}",
        "kernel": "linear",
        "type": shape.type.name,
        "rows": shape.rows,
        **_figures(num_bytes, shape.num_operations, seconds, peaks, arithmetic),
    }


def _figures(num_bytes: int, num_operations: int, seconds: float, peaks: Peaks, arithmetic: float) -> Result:
    """Speeds and their shares of the peaks, memory's as just measured; `roof` is which of the two limits the shape."""
    gbytes_per_s, gops_per_s = num_bytes / seconds / 1e9, num_operations / seconds / 1e9
    intensity = num_operations / num_bytes
    return {
        "time_us": seconds * 1e6,
        "gbytes_per_s": gbytes_per_s,
        "gops_per_s": gops_per_s,
        "operations_per_byte": intensity,
        "read_gbytes_per_s": peaks.read_gbytes_per_s,
        "read_pages_gbytes_per_s": peaks.read_pages_gbytes_per_s,
        "share_of_read": gbytes_per_s / peaks.read_gbytes_per_s,
        "share_of_arithmetic": gops_per_s / arithmetic,
        "roof": "memory" if intensity * peaks.read_gbytes_per_s < arithmetic else "arithmetic",
    }
