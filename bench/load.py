"""Put a workload on a server and take the times. Knows neither protocols (those are Targets) nor figures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Protocol

from bench.measures import RequestTimes
from bench.workloads import Workload


class Target(Protocol):
    """A server that completes prompts of token ids, greedily, without stopping at an end token."""

    async def complete(self, prompt: Sequence[int], output_len: int, request: RequestTimes) -> None:
        """Stream one completion; note the arrival of each piece, and the counts, in `request`."""
        ...


async def put_load(
    target: Target,
    workload: Workload,
    prompts: Sequence[Sequence[int]],
    seed: int,
    on_end: Callable[[RequestTimes], None],
) -> tuple[list[RequestTimes], float]:
    """Run all requests; their times, and the seconds from the start to the last token.

    A request that fails is counted, with its error, and the others go on.
    """
    seats = asyncio.Semaphore(workload.concurrency) if workload.concurrency else None
    started = time.perf_counter()

    async def run(prompt: Sequence[int], arrives_s: float) -> RequestTimes:
        await asyncio.sleep(arrives_s - (time.perf_counter() - started))
        async with AsyncExitStack() as stack:
            if seats is not None:
                await stack.enter_async_context(seats)
            request = RequestTimes(time.perf_counter(), len(prompt))
            try:
                await target.complete(prompt, workload.output_len, request)
            except (OSError, RuntimeError) as error:
                request.error = str(error) or type(error).__name__
        on_end(request)
        return request

    arrivals = workload.arrivals_s(seed)
    requests = await asyncio.gather(*(run(prompt, at) for prompt, at in zip(prompts, arrivals, strict=True)))
    return requests, time.perf_counter() - started
