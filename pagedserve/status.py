"""`pagedserve status`: a server's processes, requests, pool and speed as text, once or every second."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from pagedserve.client import Client
from pagedserve.contract.instance import Instance
from pagedserve.contract.messages import Status

_INTERVAL_S = 1.0
_BAR_WIDTH = 40


@dataclass(frozen=True)
class Rates:
    """Tokens a second, from two looks at the counters."""

    prompt_tokens_per_s: float
    generation_tokens_per_s: float


def show_status(endpoint: str | None, instance: str, *, watch: bool) -> None:
    """Print the status, with speeds measured over a moment; with `watch` again every second until Ctrl-C."""
    with Client(endpoint or Instance(instance).client_endpoint) as client:
        before, then = client.status(), time.monotonic()
        try:
            while True:
                time.sleep(_INTERVAL_S)
                status, now = client.status(), time.monotonic()
                text = render(status, rates(before, status, now - then))
                if watch and sys.stdout.isatty():
                    text = "\x1b[H\x1b[2J" + text
                print(text, flush=True)
                if not watch:
                    return
                before, then = status, now
        except KeyboardInterrupt:
            return


def rates(before: Status, after: Status, seconds: float) -> Rates:
    """The speed between two looks."""
    return Rates(
        (after.num_prompt_tokens - before.num_prompt_tokens) / seconds,
        (after.num_generation_tokens - before.num_generation_tokens) / seconds,
    )


def render(status: Status, speed: Rates) -> str:
    """The status as lines of text."""
    used = status.num_referenced_blocks
    cached = status.num_cached_blocks
    hit_rate = status.num_cached_tokens / status.num_queried_tokens if status.num_queried_tokens else 0.0
    finished = ", ".join(f"{count} {reason}" for reason, count in sorted(status.num_finished.items()) if count)
    processes = [f"  scheduler   pid {status.scheduler_pid}"]
    processes += [
        f"  worker.{worker.worker_id:<4} pid {worker.pid:<8} {worker.state:<8} {worker.isa}".rstrip()
        for worker in status.workers
    ]
    return "\n".join(
        [
            f"{status.instance}: {status.model.name}, {'ready' if status.ready else 'loading'}, "
            f"up {_duration(status.uptime_s)}",
            *processes,
            f"requests      {status.num_running} running, {status.num_waiting} waiting; "
            f"finished: {finished or 'none'}; {status.num_preemptions} preemptions",
            f"pool          {_bar(used, cached, status.num_blocks)} {used:,} used + {cached:,} cached "
            f"of {status.num_blocks:,} blocks of {status.block_size} tokens ({status.pool_bytes / 1e6:,.0f} MB)",
            f"speed         {speed.generation_tokens_per_s:,.1f} tokens/s out, {speed.prompt_tokens_per_s:,.1f} in",
            f"total         {status.num_generation_tokens:,} tokens out, {status.num_prompt_tokens:,} in, "
            f"{hit_rate:.0%} of prompts from cache, {status.num_steps:,} steps",
        ]
    )


def _bar(used: int, cached: int, total: int) -> str:
    first = round(_BAR_WIDTH * used / total)
    second = round(_BAR_WIDTH * (used + cached) / total) - first
    return "[" + "#" * first + "+" * second + "." * (_BAR_WIDTH - first - second) + "]"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
