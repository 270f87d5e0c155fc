"""Team: which workers there are, what each is doing, and whether a step ended. Events in, messages to send out; no I/O.

A step goes to all ready workers. If one dies or was freed by the abort flag, the same plan goes again to those who are
left: a step is idempotent, so nothing is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

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


class Team:
    """The workers of one instance. `setup` is what each is told when it may map the segments."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._workers: dict[int, Worker] = {}
        self._prepared = False
        self._plan: StepPlan | None = None
        self._pending: set[int] = set()
        self._failed = False
        self._result: StepResult | None = None
        self.weights_bytes = 0

    @property
    def can_start(self) -> bool:
        """Whether a step can begin: somebody is ready and no step runs."""
        return self._plan is None and any(worker.state == "ready" for worker in self._workers.values())

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
        """Send a step to every ready worker; `plan.team` is filled in here."""
        assert self._plan is None
        self._plan = plan
        return self._send()

    def result(self, message: StepResult) -> None:
        """Take one worker's answer; results of other steps are dropped."""
        worker = self._workers.get(message.worker_id)
        if worker is None or self._plan is None or message.step_id != self._plan.step_id:
            return
        if worker.worker_id not in self._pending:
            return
        worker.state = "ready"
        self._pending.discard(worker.worker_id)
        if not message.ok:
            self._failed = True
        elif message.sampled_token_ids or self._plan.team[0] == message.worker_id:
            self._result = message

    def lose(self, worker_id: int) -> tuple[bool, Outgoing]:
        """A worker is dead: whether the others must be freed by the abort flag, and Setup for who goes on preparing."""
        del self._workers[worker_id]
        in_step = worker_id in self._pending
        if in_step:
            self._pending.discard(worker_id)
            self._failed = True
        return in_step, self._set_up()

    def finish_step(self) -> StepResult | None:
        """The step's result once every worker has answered; None while it runs, or when it must be retried."""
        if self._plan is None or self._pending or self._failed or self._result is None:
            return None
        result, self._plan, self._result = self._result, None, None
        return result

    @property
    def must_retry(self) -> bool:
        """Whether a step failed and nobody is inside it any more. Reset the control words, then call `retry`."""
        return self._plan is not None and not self._pending and (self._failed or self._result is None)

    def retry(self) -> Outgoing:
        """Send the failed step again to those who are ready; nobody yet: nothing, and must_retry stays true."""
        return self._send()

    @property
    def stuck_pids(self) -> list[int]:
        """Process ids of the workers that have not answered the running step."""
        return [self._workers[worker_id].pid for worker_id in sorted(self._pending)]

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
        assert self._plan is not None
        ready = sorted((w for w in self._workers.values() if w.state == "ready"), key=lambda w: w.worker_id)
        ready = ready[: self._setup.max_team]
        if not ready:
            self._failed = True
            return []
        self._failed, self._result = False, None
        self._plan = msgspec.structs.replace(self._plan, team=tuple(w.worker_id for w in ready))
        self._pending = {w.worker_id for w in ready}
        for worker in ready:
            worker.state = "busy"
        return [(worker.identity, self._plan) for worker in ready]
