"""Workloads, the load they make, and the figures that come of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from bench.load import put_load
from bench.measures import RequestTimes, summarize
from bench.workloads import PRESETS, Workload


def test_a_workload_gives_the_same_prompts_for_the_same_seed() -> None:
    workload = PRESETS["conc8"]
    prompts = workload.prompts(1, 49_152)
    assert prompts == workload.prompts(1, 49_152)
    assert prompts != workload.prompts(2, 49_152)
    assert [len(prompt) for prompt in prompts] == [128] * 32
    assert prompts[0][:4] == [8322, 11920, 25791, 25639]  # those that earlier measurements of peers were given


def test_prompts_of_the_prefix_workload_share_their_beginning_only() -> None:
    prompts = PRESETS["prefix"].prompts(1, 49_152)
    assert len({tuple(prompt[:960]) for prompt in prompts}) == 1
    assert len({tuple(prompt[960:]) for prompt in prompts}) == 32


def test_prompts_stay_within_a_small_vocabulary() -> None:
    assert {token_id for prompt in PRESETS["conc8"].prompts(1, 300) for token_id in prompt} <= set(range(150, 300))


def test_arrivals_come_at_the_request_rate_and_at_once_without_one() -> None:
    assert set(Workload("at once", 0, 100, 1, 1).arrivals_s(1)) == {0.0}
    arrivals = list(Workload("poisson", 0, 2000, 1, 1, request_rate=50.0).arrivals_s(1))
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(2000 / 50, rel=0.1)


def test_figures_are_those_of_vllm_bench_serve() -> None:
    requests = [
        RequestTimes(0.0, 10, [0.1, 0.2, 0.4], num_output_tokens=5, num_cached_tokens=2),
        RequestTimes(1.0, 20, [1.3], num_output_tokens=1),
        RequestTimes(2.0, 30, error="refused"),
    ]
    figures = summarize(requests, duration_s=2.0)
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"], figures["total_cached_tokens"]) == (30, 6, 2)
    assert figures["request_throughput"] == 1.0
    assert figures["output_throughput"] == 3.0
    assert figures["total_token_throughput"] == 18.0
    assert figures["mean_ttft_ms"] == pytest.approx(200.0)
    assert figures["p99_ttft_ms"] == pytest.approx(299.8 - 1.8)
    assert figures["mean_tpot_ms"] == pytest.approx(300.0 / 4)  # of the only request with a second token
    assert figures["median_itl_ms"] == pytest.approx(150.0)
    assert figures["mean_e2el_ms"] == pytest.approx((400.0 + 300.0) / 2)


def test_figures_without_samples_are_none() -> None:
    figures = summarize([RequestTimes(0.0, 10, [0.1], num_output_tokens=1)], 1.0)
    assert figures["median_tpot_ms"] is None
    assert figures["p99_itl_ms"] is None


class _Target:
    """Takes a moment for each request, fails on prompts that begin with 13; counts how many run at once."""

    def __init__(self) -> None:
        self.running = self.most = 0

    async def complete(self, prompt: Sequence[int], output_len: int, request: RequestTimes) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.002)
        self.running -= 1
        if prompt[0] == 13:
            raise RuntimeError("unlucky")
        request.arrivals_s.append(time.perf_counter())
        request.num_output_tokens = output_len


def test_a_load_keeps_its_concurrency_and_counts_failures() -> None:
    target, ended = _Target(), []
    prompts = [[number] for number in range(20)]
    requests, duration_s = asyncio.run(put_load(target, Workload("load", 4, 20, 1, 3), prompts, 1, ended.append))
    assert target.most == 4
    assert [request.error for request in requests if request.error] == ["unlucky"]
    assert len(ended) == 20
    figures = summarize(requests, duration_s)
    assert (figures["completed"], figures["failed"], figures["total_output_tokens"]) == (19, 1, 57)


def test_a_load_without_concurrency_runs_everything_at_once() -> None:
    target = _Target()
    asyncio.run(put_load(target, Workload("load", 0, 9, 1, 1), [[1]] * 9, 1, lambda request: None))
    assert target.most == 9
