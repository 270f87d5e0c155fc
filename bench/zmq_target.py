"""A PagedServe server as a target, through its client library: text is made of the tokens, as for any user."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from bench.measures import RequestTimes
from pagedserve.client import AsyncClient, SamplingParams
from pagedserve.contract.errors import PagedServeError
from pagedserve.contract.messages import Status


@dataclass(frozen=True)
class Spent:
    """Where a server's time went. Seconds: inside kernels and inside steps (of rank 0), and CPU of each process."""

    kernel_time_s: float
    step_time_s: float
    num_steps: int
    cpu_s: dict[str, float]

    def since(self, before: Spent) -> Spent:
        """What was spent after `before`."""
        return Spent(
            self.kernel_time_s - before.kernel_time_s,
            self.step_time_s - before.step_time_s,
            self.num_steps - before.num_steps,
            {name: seconds - before.cpu_s.get(name, 0.0) for name, seconds in self.cpu_s.items()},
        )


class ZmqTarget:
    """Requests over one client connection. A run's prompts share the prefix cache among themselves only."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._cache_salt = ""

    @property
    def vocab_size(self) -> int:
        """Of the model that is served."""
        return self._client.model.vocab_size

    def new_run(self) -> None:
        """Forget the blocks that earlier runs have left in the prefix cache."""
        self._cache_salt = secrets.token_hex(8)

    async def complete(self, prompt: Sequence[int], output_len: int, request: RequestTimes) -> None:
        """Target.complete; RuntimeError with the server's words when it refuses."""
        sampling = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
        try:
            async with await self._client.generate(prompt, sampling=sampling, cache_salt=self._cache_salt) as stream:
                while deltas := await stream.batch():
                    if any(delta.token_ids for delta in deltas):
                        request.arrivals_s.append(time.perf_counter())
        except PagedServeError as error:
            raise RuntimeError(str(error)) from None
        request.num_output_tokens = stream.usage.completion_tokens
        request.num_cached_tokens = stream.usage.cached_tokens

    async def spent(self) -> Spent:
        """What the server has spent since its start, and this process, its client."""
        status = await self._client.status()
        return Spent(status.kernel_time_s, status.step_time_s, status.num_steps, _cpu_seconds(status))


def _cpu_seconds(status: Status) -> dict[str, float]:
    """CPU seconds of each process of the server, of the client, and of all else on this machine."""
    processes = {"client": psutil.Process()}
    try:
        processes["scheduler"] = psutil.Process(status.scheduler_pid)
        for worker in status.workers:
            processes[f"worker.{worker.worker_id}"] = psutil.Process(worker.pid)
    except psutil.NoSuchProcess:  # a server on another machine
        processes = {"client": psutil.Process()}
    seconds = {name: float(sum(process.cpu_times()[:2])) for name, process in processes.items()}
    machine = psutil.cpu_times()
    busy = sum(machine) - machine.idle - getattr(machine, "iowait", 0.0) - getattr(machine, "guest", 0.0)
    return {**seconds, "others": busy - sum(seconds.values())}
