"""Scheduler: the pure core. Events in (add, fork, abort, plan, apply), records out; no I/O, no clock, no environment.

It owns the live requests and the steps in flight: the one that runs, and at most one that was planned before its result
is known. Planner (and ahead.py) decides what is in a step, rounds.py how often it is run, Progress what its result
means, Pool what happens to blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from pagedserve.contract.errors import ProtocolError, RequestError
from pagedserve.contract.messages import Fork, Generate, Int32, StepPlan, StepResult
from pagedserve.scheduler import ahead, refusals
from pagedserve.scheduler.batch import Batch
from pagedserve.scheduler.beam import BeamSearch
from pagedserve.scheduler.counters import Counters
from pagedserve.scheduler.invariants import require
from pagedserve.scheduler.limits import Limits
from pagedserve.scheduler.outputs import Output, Outputs
from pagedserve.scheduler.planner import Planner
from pagedserve.scheduler.pool import Pool
from pagedserve.scheduler.progress import Progress
from pagedserve.scheduler.queues import Queues
from pagedserve.scheduler.request import Request, Sequence, State, new_request
from pagedserve.scheduler.results import Results
from pagedserve.scheduler.rounds import add_rounds


@dataclass(frozen=True)
class _Flight:
    """A step that awaits its result; num_logprobs is what each of its rows asked for."""

    batch: Batch
    plan: StepPlan
    num_logprobs: list[int]


class Scheduler:
    """Continuous batching over one paged pool. `now` is in seconds of any monotonic clock."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.counters = Counters()
        self._pool = Pool(limits)
        self._queues = Queues()
        self._planner = Planner(limits, self._pool, self._queues, self.counters)
        self._progress = Progress(limits, self._pool, self._queues, self.counters)
        self._requests: dict[tuple[bytes, str], Request] = {}
        self._num_arrivals = 0
        self._num_plans = 0
        self._flights: deque[_Flight] = deque()  # the first runs, the second waits for it

    # ---- requests ---------------------------------------------------------------------------------------------------

    def add(self, client: bytes, message: Generate, now: float) -> None:
        """Put a request into the queue; RequestError when it is wrong, can never fit, or finds the queue full."""
        self._check_new_id(client, message.request_id, "request_id")
        prompt = refusals.check_generate(message, self.limits)
        refusals.check_queue(len(self._queues.waiting), self.limits)
        request = self._new_request(client, message, prompt, now)
        if request.sampling.beam_width > 1:
            request.beam = BeamSearch(request)
        self._queues.wait(request.sequences[0])

    def fork(self, client: bytes, message: Fork, now: float) -> None:
        """Go on from a live request's tokens under a new id and seed, sharing every block it has computed.

        Only tokens after the fork are reported; the original's limits hold for the copy. Without a free seat the copy
        waits in the queue like any request. RequestError: not_found, queue_full, or a request with several outputs.
        """
        original = self._requests.get((client, message.request_id))
        if original is None:
            raise RequestError(f"no live request {message.request_id!r}", code="not_found", param="request_id")
        if original.num_sequences > 1:
            raise RequestError(
                f"request {message.request_id!r} has {original.num_sequences} outputs; only one output can be forked",
                param="request_id",
            )
        self._check_new_id(client, message.new_request_id, "new_request_id")
        parent = original.sequences[0]
        num_seats = sum(sequence.num_seats for sequence in self._queues.running)
        shares = parent.state is State.RUNNING and num_seats < self.limits.max_num_seqs
        if not shares:
            refusals.check_queue(len(self._queues.waiting), self.limits)
        sampling = msgspec.structs.replace(original.sampling, seed=message.seed, prompt_logprobs=None)
        copied = Generate(
            request_id=message.new_request_id,
            prompt_token_ids=b"",
            sampling=sampling.validate(),
            priority=original.priority,
            cache_salt=original.cache_salt,
        )
        prompt = parent.tokens.values[: original.num_prompt_tokens]
        request = self._new_request(client, copied, prompt, now)
        self._progress.fork(parent, request.sequences[0], shares)
        request.num_cached_tokens = min(request.sequences[0].num_computed_tokens, request.num_prompt_tokens)

    def abort(self, client: bytes, request_id: str, finish_reason: str = "abort") -> list[Output]:
        """End a request in whatever state it is; its last records, none when there is no such request.

        Blocks that a step in flight writes are given back when it has been answered. RequestError: finish_reason.
        """
        if finish_reason not in ("abort", "stop"):
            raise RequestError(f"finish_reason must be abort or stop, got {finish_reason!r}", param="finish_reason")
        request = self._requests.pop((client, request_id), None)
        if request is None:
            return []
        outputs = Outputs(self.counters)
        outputs.end(request, finish_reason)
        for sequence in request.sequences:
            self._queues.leave(sequence, State.FINISHED)
            if sequence.num_steps_in_flight == 0:
                self._pool.release(sequence)
        return outputs.records

    def abort_client(self, client: bytes) -> None:
        """End all requests of a client that is gone."""
        for owner, request_id in tuple(self._requests):
            if owner == client:
                self.abort(client, request_id)

    def _new_request(self, client: bytes, message: Generate, prompt: Int32, now: float) -> Request:
        request = new_request(client, message, prompt, self.limits, self._num_arrivals, now)
        self._num_arrivals += 1
        self._requests[client, message.request_id] = request
        return request

    def _check_new_id(self, client: bytes, request_id: str, param: str) -> None:
        if (client, request_id) in self._requests:
            raise RequestError(f"{param}: a live request is called {request_id!r} already", param=param)

    # ---- steps ------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step could be planned now."""
        return len(self._flights) < 2 and bool(self._queues.running or self._queues.waiting)

    @property
    def in_flight(self) -> tuple[StepPlan, ...]:
        """The plans that await their results: after a loss of workers they are sent again as they are, in order."""
        return tuple(flight.plan for flight in self._flights)

    def plan(self, now: float, max_rounds: int = 1) -> StepPlan | None:
        """The next step, `team` left empty, of max_rounds rounds at most; None when nothing can be computed now.

        With a step in flight it is the one after it, if that can be told already. InvariantError with two in flight.
        """
        require(len(self._flights) < 2, "a step is planned while two others are in flight")
        if self._flights:
            batch = ahead.next_batch(self._flights[0].batch, self.limits, self._pool, self._queues)
        else:
            batch = self._planner.next_batch(now)
        if batch is None:
            return None
        add_rounds(batch, self.limits, self._pool, self._queues, max_rounds)
        plan, num_logprobs = batch.plan(self._num_plans)
        self._num_plans += 1
        self.counters.num_steps_ahead += len(self._flights) * plan.num_rounds
        self._flights.append(_Flight(batch, plan, num_logprobs))
        for sequence in batch.parts:
            sequence.num_steps_in_flight += 1
        return plan

    def apply(self, result: StepResult) -> list[Output]:
        """Take the result of the first step in flight; new tokens and ends as records for (client, request).

        ProtocolError, and nothing is changed, when it is another step's, was aborted, or does not fit the plan.
        """
        if not self._flights or result.step_id != self._flights[0].plan.step_id or not result.ok:
            expected = str(self._flights[0].plan.step_id) if self._flights else "none"
            raise ProtocolError(f"result of step {result.step_id} (ok: {result.ok}), expected {expected}")
        flight = self._flights[0]
        results = Results(result, flight.num_logprobs, flight.plan.num_rounds, self.limits.vocab_size)
        self._flights.popleft()
        records = self._progress.apply(flight.batch, results)
        for client, record in records:
            if record.finished:
                del self._requests[client, record.request_id]
        return records

    # ---- state ------------------------------------------------------------------------------------------------------

    def snapshot(self, blocks: bool = False) -> dict[str, Any]:
        """The fields of Status that the core knows; `blocks` adds the state of every block."""
        allocator = self._pool.allocator
        return {
            "num_running": len(self._queues.running),
            "num_waiting": len(self._queues.waiting),
            "num_free_blocks": allocator.num_free,
            "num_cached_blocks": allocator.num_cached,
            "num_referenced_blocks": allocator.num_referenced,
            "block_states": allocator.states() if blocks else b"",
            **asdict(self.counters),
        }

    def check(self) -> None:
        """InvariantError naming the promise that does not hold. Slow: for tests."""
        holders = list(self._holders())
        self._pool.check(holders)
        for sequence in self._queues.waiting:
            require(sequence.state is State.WAITING and sequence.table.length == 0, "a waiting sequence holds blocks")
        for name, ordered in (("waiting", self._queues.waiting), ("running", self._queues.running)):
            require(ordered == sorted(ordered, key=lambda s: s.order), f"the {name} sequences are out of order")
            require(len(set(ordered)) == len(ordered), f"a sequence is {name} twice")
        queued = {*self._queues.waiting, *self._queues.running}
        for request in self._requests.values():
            for sequence in request.sequences:
                is_live = sequence.state in (State.WAITING, State.RUNNING)
                require(is_live == (sequence in queued), "a live sequence is in no queue, or another one is in one")
                require(0 <= sequence.num_computed_tokens <= sequence.num_tokens, "more tokens computed than known")
        for sequence, ends in self._flying().items():
            require(sequence.num_steps_in_flight == len(ends), "a sequence is in more or fewer steps than it knows")
            self._pool.check_writes(sequence, ends[-1])

    def _flying(self) -> dict[Sequence, list[int]]:
        """The sequences in flight, and for each of their steps the position behind the last that it writes."""
        flying: dict[Sequence, list[int]] = {}
        for flight in self._flights:
            for sequence, part in flight.batch.parts.items():
                end = part.start + part.num_written + flight.batch.num_rounds - 1
                flying.setdefault(sequence, []).append(end)
        return flying

    def _holders(self) -> Iterator[Sequence]:
        """Sequences that may hold blocks: the running, and those that ended while steps with them are in flight."""
        yield from self._queues.running
        yield from (sequence for sequence in self._flying() if sequence.state is State.FINISHED)
