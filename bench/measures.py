"""Figures of a finished load, under the names that `vllm bench serve` gives them. Arithmetic only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_STATISTICS: dict[str, Callable[[Any], Any]] = {
    "mean": np.mean,
    "median": np.median,
    "std": np.std,
    "p99": lambda values: np.percentile(values, 99),
}


@dataclass
class RequestTimes:
    """What one request was sent and gave. `arrivals_s`: when each piece of output came, in seconds of one clock."""

    sent_s: float
    num_prompt_tokens: int
    arrivals_s: list[float] = field(default_factory=list)
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.arrivals_s[0] - self.sent_s

    @property
    def e2el_s(self) -> float:
        """End-to-end latency: to the last token."""
        return self.arrivals_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None when there is no other."""
        return (self.e2el_s - self.ttft_s) / (self.num_output_tokens - 1) if self.num_output_tokens > 1 else None


def summarize(requests: Sequence[RequestTimes], duration_s: float) -> dict[str, Any]:
    """Throughputs, and mean, median, std and P99 of TTFT, TPOT, ITL and E2EL in milliseconds (None without samples)."""
    done = [request for request in requests if request.error is None and request.arrivals_s]
    num_input = sum(request.num_prompt_tokens for request in done)
    num_output = sum(request.num_output_tokens for request in done)
    figures: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(requests) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "total_cached_tokens": sum(request.num_cached_tokens for request in done),
        "request_throughput": len(done) / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
    }
    samples = {
        "ttft": [request.ttft_s for request in done],
        "tpot": [request.tpot_s for request in done if request.tpot_s is not None],
        "itl": [gap for request in done for gap in np.diff(request.arrivals_s)],
        "e2el": [request.e2el_s for request in done],
    }
    for name, values in samples.items():
        milliseconds = 1000 * np.array(values)
        for statistic, function in _STATISTICS.items():
            figures[f"{statistic}_{name}_ms"] = float(function(milliseconds)) if values else None
    return figures
