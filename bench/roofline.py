"""The roofline picture: operations per byte against operations per second, kernels below this machine's roofs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pagedserve.contract.errors import PagedServeError

_MARKERS = {"attention": "o", "linear": "s"}


def draw_roofline(path: Path, setup: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> None:
    """Write the picture as PNG (or what the suffix says). PagedServeError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise PagedServeError("the plot needs matplotlib: pip install 'pagedserve[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    peaks = setup["peaks"]
    figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
    intensities = np.geomspace(0.25, 4096, 200)
    for name, arithmetic in (("int8 dot product", "int8_gops"), ("float32 multiply-add", "float32_gflops")):
        roof = np.minimum(intensities * peaks["read_gbytes_per_s"], peaks[arithmetic])
        axes.plot(intensities, roof, color="0.4", linewidth=1.5)
        axes.annotate(f"{name}, {peaks[arithmetic]:.0f} Gop/s", (1400, peaks[arithmetic]), (0, 4), ha="center",
                      textcoords="offset points", color="0.3")  # fmt: skip
    axes.annotate(f"read, {peaks['read_gbytes_per_s']:.1f} GB/s", (0.3, 0.3 * peaks["read_gbytes_per_s"]), (0, 8),
                  textcoords="offset points", rotation=35, color="0.3")  # fmt: skip
    for index, (series, points) in enumerate(sorted(_series(results).items())):
        kernel = series.split()[0]
        axes.scatter(
            [point["operations_per_byte"] for point in points],
            [point["gops_per_s"] for point in points],
            label=series,
            marker=_MARKERS[kernel],
            color=f"C{index}",
            s=26,
        )
    axes.set(xscale="log", yscale="log", xlabel="operations per byte read", ylabel="Gop/s")
    axes.set_title(f"Kernels, cores: {peaks['cores']}, {setup['isa']}")
    axes.grid(visible=True, which="major", color="0.9")
    axes.legend(fontsize="small", loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _series(results: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Points by what is one colour: a weight type, or a variant of attention in decode or prefill."""
    series: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        if result["kernel"] == "linear":
            name = f"linear {result['type']}"
        else:
            name = f"attention {'decode' if result['query_len'] == 1 else 'prefill'}, {result['variant']}"
        series.setdefault(name, []).append(result)
    return series
