"""Rules of the scheduler's shell that no pure core can show, with a scripted worker on a real socket."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from pagedserve.contract import segments
from pagedserve.contract.control import CONTROL_BYTES
from pagedserve.contract.messages import (
    PROTOCOL,
    SAMPLE_ROW,
    Join,
    Ready,
    StepPlan,
    StepResult,
    TeamMessage,
    decode,
    encode,
    pack_ids,
)
from pagedserve.scheduler.invariants import InvariantError
from pagedserve.scheduler.scheduler import Scheduler
from pagedserve.scheduler.service import Service, ServiceSettings
from pagedserve.scheduler.team import Team
from tests.builders import generate, prompt_of, small_limits
from tests.fake_scheduler import MODEL
from tests.unit.test_team import SETUP

TAG = f"test-service-{os.getpid()}"


def answer(endpoint: str, token_id: int, seconds: float, until: Callable[[StepPlan], bool]) -> None:
    """A worker that joins, and answers plans with one token id, seconds a round, until a plan is the last one."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        socket.send(encode(Join(protocol=PROTOCOL, worker_id=0, pid=os.getpid())))
        decode(socket.recv(), TeamMessage)
        socket.send(encode(Ready(worker_id=0, isa="generic", weights_bytes=1, team_bytes=1)))
        is_last = False
        while not is_last:
            plan = decode(socket.recv(), TeamMessage)
            assert isinstance(plan, StepPlan)
            time.sleep(seconds * plan.num_rounds)
            num_sampled = plan.num_rounds * len(plan.rows) // SAMPLE_ROW.itemsize
            is_last = until(plan)
            sampled = pack_ids([token_id] * num_sampled)
            socket.send(encode(StepResult(step_id=plan.step_id, worker_id=0, ok=True, sampled_token_ids=sampled)))


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """A service with one request of 40 tokens."""
    limits = small_limits()
    scheduler = Scheduler(limits)
    scheduler.add(b"client", generate("a", prompt_of(4), max_tokens=40), 0.0)
    settings = ServiceSettings(
        instance="test",
        tag=TAG,
        client_endpoints=(f"ipc://{tmp_path}/clients",),
        worker_endpoint=f"ipc://{tmp_path}/workers",
        model=MODEL,
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        pool_bytes=1,
        max_num_seqs=limits.max_num_seqs,
        step_timeout_s=60.0,
    )
    segments.create(segments.segment_name(TAG, "team"), CONTROL_BYTES)
    yield Service(settings, scheduler, Team(SETUP))
    segments.unlink_instance(TAG)


def test_a_result_that_does_not_fit_its_plan_ends_the_scheduler_and_does_not_halt_it(
    service: Service, tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/workers"
    worker = threading.Thread(target=answer, args=(endpoint, 1_000_000, 0.0, lambda plan: True), daemon=True)
    worker.start()
    with pytest.raises(
        InvariantError, match=r"does not fit its plan: sampled_token_ids: expected ids within \[0, 31\]"
    ):
        service.run()
    worker.join()


@pytest.mark.parametrize(("seconds", "most"), [(0.0, 4), (0.003, 2), (0.01, 1)])
def test_a_step_has_the_rounds_that_its_time_allows_and_each_is_counted(
    service: Service, tmp_path: Path, seconds: float, most: int
) -> None:
    plans: list[StepPlan] = []

    def until(plan: StepPlan) -> bool:
        plans.append(plan)
        if sum(plan.num_rounds for plan in plans) == 40:
            service.stop()
            return True
        return False

    worker = threading.Thread(target=answer, args=(f"ipc://{tmp_path}/workers", 1, seconds, until), daemon=True)
    worker.start()
    service.run()
    worker.join()
    assert plans[0].num_rounds == 1
    assert max(plan.num_rounds for plan in plans) == most
    assert service._status(False, 0.0).num_steps == 40
