"""Rules of the scheduler's shell that no pure core can show, with a scripted worker on a real socket."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import zmq

from pagedserve.contract import segments
from pagedserve.contract.control import CONTROL_BYTES
from pagedserve.contract.messages import (
    PROTOCOL,
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


def answer_out_of_vocabulary(endpoint: str) -> None:
    """A worker that joins, and answers its first plan with a token id that the model does not have."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        socket.send(encode(Join(protocol=PROTOCOL, worker_id=0, pid=os.getpid())))
        decode(socket.recv(), TeamMessage)
        socket.send(encode(Ready(worker_id=0, isa="generic", weights_bytes=1, team_bytes=1)))
        plan = decode(socket.recv(), TeamMessage)
        assert isinstance(plan, StepPlan)
        result = StepResult(step_id=plan.step_id, worker_id=0, ok=True, sampled_token_ids=pack_ids([1_000_000]))
        socket.send(encode(result))


def test_a_result_that_does_not_fit_its_plan_ends_the_scheduler_and_does_not_halt_it(tmp_path: Path) -> None:
    limits = small_limits()
    scheduler = Scheduler(limits)
    scheduler.add(b"client", generate("a", prompt_of(4)), 0.0)
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
    try:
        service = Service(settings, scheduler, Team(SETUP))
        worker = threading.Thread(target=answer_out_of_vocabulary, args=(settings.worker_endpoint,), daemon=True)
        worker.start()
        with pytest.raises(
            InvariantError, match=r"does not fit its plan: sampled_token_ids: expected ids within \[0, 31\]"
        ):
            service.run()
        worker.join()
    finally:
        segments.unlink_instance(TAG)
