"""Metrics: vLLM's names and meanings, so that its dashboards fit.

Gauges and counters are the scheduler's, over all clients, and are asked for at each scrape; histograms are of the
requests that came through this process.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pagedserve.client import Timing, Usage
from pagedserve.contract.messages import Status

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SHORT_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_TTFT_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_LONG_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 600.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "From sending a request to its first token", _TTFT_S),
    ("inter_token_latency_seconds", "Time between two tokens of a request", _SHORT_S),
    ("request_time_per_output_token_seconds", "Mean time per token after the first, by request", _SHORT_S),
    ("e2e_request_latency_seconds", "From sending a request to its last token", _LONG_S),
    ("request_queue_time_seconds", "Waiting to be scheduled", _LONG_S),
    ("request_prefill_time_seconds", "From being scheduled to the first token", _LONG_S),
    ("request_decode_time_seconds", "From the first token to the last", _LONG_S),
    ("request_prompt_tokens", "Prompt tokens by request", _TOKENS),
    ("request_generation_tokens", "Generated tokens by request", _TOKENS),
)
_NUM_RECENT = 500


class Metrics:
    """All that /metrics tells. `recent_ttft` holds (Unix time, seconds) of the last requests."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._server = _ServerCollector()
        self._registry.register(self._server)
        self._histograms = {
            name: Histogram(f"vllm:{name}", documentation, ("model_name",), buckets=buckets, registry=self._registry)
            for name, documentation, buckets in _HISTOGRAMS
        }
        self.recent_ttft: deque[tuple[float, float]] = deque(maxlen=_NUM_RECENT)

    def of_requests(self, model_name: str) -> RequestMetrics:
        """Where requests to this model are counted."""
        children = {name: histogram.labels(model_name) for name, histogram in self._histograms.items()}
        return RequestMetrics(children, self.recent_ttft)

    def render(self, status: Status | None) -> bytes:
        """Prometheus text; without the scheduler's part when it does not answer."""
        self._server.status = status
        return generate_latest(self._registry)


class RequestMetrics:
    """The histograms of one model."""

    def __init__(self, histograms: Mapping[str, Histogram], recent_ttft: deque[tuple[float, float]]) -> None:
        self._histograms = histograms
        self._inter_token = histograms["inter_token_latency_seconds"]
        self._recent_ttft = recent_ttft

    def tokens(self, num_tokens: int, seconds: float) -> None:
        """So many tokens of one request came together, so long after those before."""
        self._inter_token.observe(seconds / max(1, num_tokens))

    def finished(self, usage: Usage, timing: Timing) -> None:
        """One request ended by itself."""
        self._observe("e2e_request_latency_seconds", timing.total_s)
        self._observe("request_queue_time_seconds", timing.queue_s)
        self._observe("request_prompt_tokens", usage.prompt_tokens)
        self._observe("request_generation_tokens", usage.completion_tokens)
        if timing.ttft_s is None:
            return
        self._recent_ttft.append((time.time(), timing.ttft_s))
        self._observe("time_to_first_token_seconds", timing.ttft_s)
        self._observe("request_prefill_time_seconds", max(0.0, timing.ttft_s - timing.queue_s))
        self._observe("request_decode_time_seconds", timing.total_s - timing.ttft_s)
        if timing.tokens_per_s:
            self._observe("request_time_per_output_token_seconds", 1 / timing.tokens_per_s)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)


class _ServerCollector(Collector):
    """A Status as gauges and counters."""

    def __init__(self) -> None:
        self.status: Status | None = None

    def collect(self) -> Iterator[Metric]:
        status = self.status
        if status is None:
            return
        used = 1 - (status.num_free_blocks + status.num_cached_blocks) / status.num_blocks
        for name, documentation, value in (
            ("num_requests_running", "Requests in the running batch", status.num_running),
            ("num_requests_waiting", "Requests waiting to be scheduled", status.num_waiting),
            ("kv_cache_usage_perc", "Share of the KV pool's blocks in use (1: all)", used),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", documentation, labels=("model_name",))
            gauge.add_metric((status.model.name,), value)
            yield gauge
        for name, documentation, value in (
            ("prefix_cache_queries", "Prefix cache queries, in tokens", status.num_queried_tokens),
            ("prefix_cache_hits", "Prefix cache hits, in tokens", status.num_cached_tokens),
            ("num_preemptions", "Preemptions", status.num_preemptions),
            ("prompt_tokens", "Prompt tokens", status.num_prompt_tokens),
            ("generation_tokens", "Generated tokens", status.num_generation_tokens),
            ("spec_decode_num_draft_tokens", "Tokens drafted by speculation", status.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Drafted tokens that were right", status.num_accepted_tokens),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", documentation, labels=("model_name",))
            counter.add_metric((status.model.name,), value)
            yield counter
        finished = CounterMetricFamily(
            "vllm:request_success", "Finished requests by reason", labels=("model_name", "finished_reason")
        )
        for reason in sorted({"stop", "length", "abort"} | set(status.num_finished)):
            finished.add_metric((status.model.name, reason), status.num_finished.get(reason, 0))
        yield finished
