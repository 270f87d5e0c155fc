"""`latency` and `serve`: workloads on one server, over its ZeroMQ client or HTTP, with a progress bar."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.http_target import HttpTarget
from bench.load import put_load
from bench.measures import RequestTimes, summarize
from bench.workloads import Workload
from bench.zmq_target import Spent, ZmqTarget
from pagedserve.client import AsyncClient
from pagedserve.config import Config
from pagedserve.contract.errors import PagedServeError
from pagedserve.contract.instance import Instance
from pagedserve.private_server import running_or_private

_WARM_UP_SEED = -1
_HTTP_VOCAB_SIZE = 40_000  # what is assumed of a server that does not tell
_SERVER_KEYS = (
    "compute", "quantize", "block_size", "max_num_batched_tokens", "max_num_seqs", "prefix_caching",
    "num_speculative_tokens",
)


@dataclass(frozen=True)
class Options:
    """How workloads are run. `repeat`: so many times each; the run with the median duration is what is reported."""

    seed: int = 1
    repeat: int = 1
    url: str = ""  # an OpenAI-compatible server; empty: PagedServe's own protocol
    api_key: str = ""
    extra_body: dict[str, Any] = field(default_factory=dict)
    endpoint: str | None = None  # ZeroMQ address of a server elsewhere


def run_workloads(
    config: Config, workloads: Sequence[Workload], options: Options, console: Console
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run all workloads; the setup and a result for each. PagedServeError when the server cannot be had."""
    try:
        if options.url:
            return asyncio.run(_over_http(workloads, options, console))
        with running_or_private(config, options.endpoint, console.print) as endpoint:
            own = endpoint not in (options.endpoint, Instance(config.instance).client_endpoint)
            return asyncio.run(_over_zmq(endpoint, config if own else None, workloads, options, console))
    except (OSError, RuntimeError) as error:
        raise PagedServeError(f"{options.url}: {error}") from None


async def _over_http(
    workloads: Sequence[Workload], options: Options, console: Console
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    target = HttpTarget(options.url, api_key=options.api_key, extra_body=options.extra_body)
    await target.connect()
    setup = {"seed": options.seed, "url": options.url, "model": target.model, "extra_body": options.extra_body}
    results = []
    for workload in workloads:
        runs = [
            await _run(target, workload, options.seed + repetition, _HTTP_VOCAB_SIZE, console)
            for repetition in range(options.repeat)
        ]
        results.append(_median_run(workload, runs))
    return setup, results


async def _over_zmq(
    endpoint: str, config: Config | None, workloads: Sequence[Workload], options: Options, console: Console
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    async with AsyncClient(endpoint) as client:
        status = await client.wait_ready()
        await client.load_text()
        target = ZmqTarget(client)
        setup: dict[str, Any] = {
            "seed": options.seed,
            "model": status.model.name,
            "workers": len(status.workers),
            "isa": status.workers[0].isa,
            "weights_bytes": status.weights_bytes,
            "pool_bytes": status.pool_bytes,
        }
        if config is not None:
            setup |= {key: getattr(config, key) for key in _SERVER_KEYS}
        results = []
        for workload in workloads:
            runs = []
            for repetition in range(options.repeat):
                target.new_run()
                run = await _run(target, workload, options.seed + repetition, target.vocab_size, console)
                runs.append(run)
            results.append(_median_run(workload, runs))
        return setup, results


async def _run(
    target: HttpTarget | ZmqTarget, workload: Workload, seed: int, vocab_size: int, console: Console
) -> dict[str, Any]:
    """One run of a workload, after a request that warms up: its figures, and where the server's time went."""
    warm_up = workload.prompts(_WARM_UP_SEED, vocab_size)[0]
    await target.complete(warm_up, workload.output_len, RequestTimes(0.0, len(warm_up)))
    prompts = workload.prompts(seed, vocab_size)
    before = await target.spent() if isinstance(target, ZmqTarget) else None
    with _progress(console, workload) as on_end:
        requests, duration_s = await put_load(target, workload, prompts, seed, on_end)
    figures = summarize(requests, duration_s)
    if errors := sorted({request.error for request in requests if request.error is not None}):
        figures["errors"] = errors
    if isinstance(target, ZmqTarget) and before is not None:
        figures["server"] = _shares((await target.spent()).since(before), duration_s)
    return figures


def _shares(spent: Spent, duration_s: float) -> dict[str, Any]:
    """Percent of the duration in kernels, in workers beside them, and elsewhere; cores that each process kept busy."""
    kernel, step = 100 * spent.kernel_time_s / duration_s, 100 * spent.step_time_s / duration_s
    return {
        "num_steps": spent.num_steps,
        "kernel_share": kernel,
        "worker_share": step - kernel,
        "outside_share": 100 - step,
        "cpu_cores": {name: seconds / duration_s for name, seconds in spent.cpu_s.items()},
    }


def _median_run(workload: Workload, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run with the median duration, the durations of all."""
    ordered = sorted(runs, key=lambda run: float(run["duration"]))
    median = ordered[(len(ordered) - 1) // 2]
    return {"name": workload.name, "workload": asdict(workload), **median, "durations": [r["duration"] for r in runs]}


@contextlib.contextmanager
def _progress(console: Console, workload: Workload) -> Iterator[Any]:
    """A bar of finished requests; yields what to call at the end of each."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]:.1f} tok/s"),
        TimeElapsedColumn(),
    )
    started, num_tokens = time.perf_counter(), 0
    with Progress(*columns, console=console, refresh_per_second=2, transient=True) as progress:
        task = progress.add_task(workload.name, total=workload.num_prompts, speed=0.0)

        def on_end(request: RequestTimes) -> None:
            nonlocal num_tokens
            num_tokens += request.num_output_tokens
            progress.update(task, advance=1, speed=num_tokens / (time.perf_counter() - started))

        yield on_end
