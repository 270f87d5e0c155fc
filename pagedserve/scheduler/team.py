"""Team: which workers there are, what each is doing, and whether a step ended. Events in, messages to send out; no I/O.

A step goes to all ready workers; the one after it may be sent, to the same workers, while it runs. If one dies or was
freed by the abort flag, the same plans go again to those who are left: a step is idempotent, so nothing is lost.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from pagedserve.contract.messages import Join, Ready, Setup, StepPlan, StepResult, WorkerStatus

Outgoing = list[tuple[bytes, Setup | StepPlan]]  # (identity of the worker, message)


@dataclass
class Worker:
    """One worker process. state: joined (waits for the preparing one), loading, ready, busy."""

    worker_id: int
    identity: bytes
    pid: int
    state: str = "joined"
    isa: str = ""


@dataclass
class _Step:
    """A step in flight: who has not answered yet, and what came of it."""

    plan: StepPlan
    pending: set[int] = field(default_factory=set)
    failed: bool = False
    result: StepResult | None = None

    @property
    def is_done(self) -> bool:
        return not self.pending and not self.failed and self.result is not None


class Team:
    """The workers of one instance. `setup` is what each is told when it may map the segments."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._workers: dict[int, Worker] = {}
        self._prepared = False
        self._steps: deque[_Step] = deque()
        self.weights_bytes = 0

    @property
    def can_start(self) -> bool:
        """Whether a plan can be sent: no step runs and somebody is ready, or one step runs, on all who could go on."""
        if not self._steps:
            return any(worker.state == "ready" for worker in self._workers.values())
        step = self._steps[0]
        able = {worker.worker_id for worker in self._workers.values() if worker.state in ("ready", "busy")}
        is_same = able.issuperset(step.plan.team) and len(step.plan.team) == min(len(able), self._setup.max_team)
        return len(self._steps) == 1 and not step.failed and is_same

    def join(self, message: Join, identity: bytes) -> tuple[int, Outgoing]:
        """A worker process came: its worker_id, and Setup for it if its turn has come."""
        worker_id = message.worker_id
        if worker_id < 0:
            worker_id = next(i for i in range(len(self._workers) + 1) if i not in self._workers)
        self._workers[worker_id] = Worker(worker_id, identity, message.pid)
        return worker_id, self._set_up()

    def has(self, worker_id: int) -> bool:
        """Whether a live worker has this id."""
        return worker_id in self._workers

    def ready(self, message: Ready) -> Outgoing:
        """A worker has mapped everything; the first one has made the segments that the others wait for."""
        worker = self._workers[message.worker_id]
        worker.state, worker.isa = "ready", message.isa
        self._prepared = True
        self.weights_bytes = message.weights_bytes
        return self._set_up()

    def start(self, plan: StepPlan) -> Outgoing:
        """Send a step to every ready worker, or to the team of the running one; `plan.team` is filled in here."""
        assert self.can_start
        if not self._steps:
            self._steps.append(_Step(plan))
            return self._send()
        step = _Step(msgspec.structs.replace(plan, team=self._steps[0].plan.team))
        self._steps.append(step)
        return self._send_step(step)

    def result(self, message: StepResult) -> None:
        """Take one worker's answer; results of other steps are dropped."""
        worker_id = message.worker_id
        for step in self._steps:
            if step.plan.step_id != message.step_id or worker_id not in step.pending:
                continue
            step.pending.discard(worker_id)
            if not message.ok:
                step.failed = True
            elif step.plan.team[0] == worker_id:
                step.result = message
            if not any(worker_id in step.pending for step in self._steps):
                self._workers[worker_id].state = "ready"
            return

    def lose(self, worker_id: int) -> tuple[bool, Outgoing]:
        """A worker is dead: whether the others must be freed by the abort flag, and Setup for who goes on preparing."""
        del self._workers[worker_id]
        in_step = False
        for step in self._steps:
            if worker_id in step.pending:
                step.pending.discard(worker_id)
                step.failed = in_step = True
        return in_step, self._set_up()

    def finish_step(self) -> StepResult | None:
        """The first step's result once every worker has answered; None while it runs, or when it must be retried."""
        if not self._steps or not self._steps[0].is_done:
            return None
        return self._steps.popleft().result

    @property
    def must_retry(self) -> bool:
        """Whether a step failed and nobody is inside one any more. Reset the control words, then call `retry`."""
        return bool(self._steps) and not self._steps[0].is_done and not any(step.pending for step in self._steps)

    def retry(self) -> Outgoing:
        """Send the steps in flight again to those who are ready; nobody yet: nothing, and must_retry stays true."""
        return self._send()

    @property
    def stuck_pids(self) -> list[int]:
        """Process ids of the workers that have not answered the steps in flight."""
        pending = set().union(*(step.pending for step in self._steps))
        return [self._workers[worker_id].pid for worker_id in sorted(pending)]

    def status(self) -> tuple[WorkerStatus, ...]:
        """The workers as Status shows them."""
        return tuple(
            WorkerStatus(worker_id=w.worker_id, pid=w.pid, state=w.state, isa=w.isa)
            for w in sorted(self._workers.values(), key=lambda w: w.worker_id)
        )

    def identities(self) -> list[bytes]:
        """Of all workers, for Shutdown."""
        return [worker.identity for worker in self._workers.values()]

    def _set_up(self) -> Outgoing:
        joined = sorted((w for w in self._workers.values() if w.state == "joined"), key=lambda w: w.worker_id)
        loading = any(w.state == "loading" for w in self._workers.values())
        if not self._prepared:
            joined = joined[:1] if not loading else []
        out: Outgoing = []
        for worker in joined:
            worker.state = "loading"
            setup = msgspec.structs.replace(self._setup, worker_id=worker.worker_id, prepare=not self._prepared)
            out.append((worker.identity, setup))
        return out

    def _send(self) -> Outgoing:
        ready = sorted((w for w in self._workers.values() if w.state == "ready"), key=lambda w: w.worker_id)
        ready = ready[: self._setup.max_team]
        out: Outgoing = []
        for step in self._steps if ready else ():
            step.failed, step.result = False, None
            step.plan = msgspec.structs.replace(step.plan, team=tuple(w.worker_id for w in ready))
            out += self._send_step(step)
        return out

    def _send_step(self, step: _Step) -> Outgoing:
        step.pending = set(step.plan.team)
        for worker_id in step.plan.team:
            self._workers[worker_id].state = "busy"
        return [(self._workers[worker_id].identity, step.plan) for worker_id in step.plan.team]
