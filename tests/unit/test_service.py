"""Rules of the scheduler's shell that no pure core can show, with a scripted worker on a real socket."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

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
from pagedserve.scheduler.service import AHEAD_S, Service, ServiceSettings
from pagedserve.scheduler.team import Team
from tests.builders import FakeTeam, generate, prompt_of, small_limits
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
    worker = threading.Thread(target=answer_out_of_vocabulary, args=(f"ipc://{tmp_path}/workers",), daemon=True)
    worker.start()
    with pytest.raises(
        InvariantError, match=r"does not fit its plan: sampled_token_ids: expected ids within \[0, 31\]"
    ):
        service.run()
    worker.join()


@pytest.mark.parametrize(("round_s", "num_rounds"), [(0.001, 4), (0.0021, 3), (0.003, 2), (0.0041, 1)])
def test_a_step_has_the_rounds_that_it_has_time_for_and_each_is_counted(
    service: Service, monkeypatch: pytest.MonkeyPatch, round_s: float, num_rounds: int
) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("pagedserve.scheduler.service.time", SimpleNamespace(monotonic=lambda: clock.now))
    service._team.join(Join(protocol=PROTOCOL, worker_id=0, pid=os.getpid()), b"worker")
    service._team.ready(Ready(worker_id=0, isa="generic", weights_bytes=1, team_bytes=1))
    seen = []
    for _ in range(6):
        service._step(clock.now)
        [plan] = service._scheduler.in_flight
        seen.append(plan.num_rounds)
        clock.now += plan.num_rounds * round_s
        sampled = pack_ids([1] * plan.num_rounds)
        service._on_worker(
            b"worker", encode(StepResult(step_id=plan.step_id, worker_id=0, ok=True, sampled_token_ids=sampled))
        )
    assert seen == [1] + 5 * [num_rounds]  # nothing is known of the first
    assert service._status(False, 0.0).num_steps == sum(seen)


def test_an_answer_that_was_read_together_with_the_one_before_does_not_make_a_step_short(service: Service) -> None:
    service._team.join(Join(protocol=PROTOCOL, worker_id=0, pid=os.getpid()), b"worker")
    service._team.ready(Ready(worker_id=0, isa="generic", weights_bytes=1, team_bytes=1))
    service._step(0.0)
    [plan] = service._scheduler.in_flight
    ids = pack_ids([1])
    result = StepResult(step_id=plan.step_id, worker_id=0, ok=True, sampled_token_ids=ids, step_time_s=1e6)
    service._on_worker(b"worker", encode(result))
    assert service._round_s == 1e6


def test_the_step_after_is_planned_shortly_before_the_last_round_ends(service: Service) -> None:
    scheduler, team = service._scheduler, FakeTeam(small_limits())
    service._round_s = 0.002
    for num_rounds in (1, 4):
        plan = scheduler.plan(0.0, 4)
        assert plan is not None and plan.num_rounds == num_rounds
        service._begin_step(100.0)
        assert service._ahead_at == pytest.approx(100.0 + 0.002 * num_rounds - AHEAD_S)
        scheduler.apply(team.run(plan))
