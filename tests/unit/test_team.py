"""Rules of the Team: who is set up when, and that a step ends with a result or is sent again."""

from __future__ import annotations

from pagedserve.contract.messages import Join, Ready, Setup, StepPlan, StepResult, pack_ids
from pagedserve.scheduler.team import Team

SETUP = Setup(
    worker_id=0,
    tag="t",
    prepare=True,
    model_path="demo",
    compute="auto",
    quantize="none",
    block_size=16,
    num_blocks=8,
    pool_dtype="float16",
    max_num_batched_tokens=64,
    max_num_seqs=8,
    max_model_len=128,
    max_team=4,
)


def plan(step_id: int = 1) -> StepPlan:
    empty = pack_ids([0])
    return StepPlan(
        step_id=step_id,
        team=(),
        token_ids=empty,
        query_start_loc=empty,
        num_computed_tokens=empty,
        block_tables=empty,
        block_table_start=empty,
    )


def join(team: Team, worker_id: int) -> list[tuple[bytes, Setup | StepPlan]]:
    return team.join(Join(protocol=1, worker_id=worker_id, pid=100 + worker_id), b"%d" % worker_id)[1]


def ready(team: Team, worker_id: int) -> list[tuple[bytes, Setup | StepPlan]]:
    return team.ready(Ready(worker_id=worker_id, isa="generic", weights_bytes=1, team_bytes=1))


def answer(team: Team, worker_id: int, *, ok: bool = True, step_id: int = 1) -> None:
    ids = pack_ids([7]) if ok and worker_id == 0 else b""
    team.result(StepResult(step_id=step_id, worker_id=worker_id, ok=ok, sampled_token_ids=ids))


def team_of(size: int) -> Team:
    team = Team(SETUP)
    for worker_id in range(size):
        join(team, worker_id)
        ready(team, worker_id)
    return team


def test_one_worker_prepares_and_the_others_wait_for_it() -> None:
    team = Team(SETUP)
    [(identity, setup)] = join(team, 1)
    assert identity == b"1" and isinstance(setup, Setup) and setup.prepare and setup.worker_id == 1
    assert join(team, 0) == []
    [(identity, setup)] = ready(team, 1)
    assert identity == b"0" and isinstance(setup, Setup) and not setup.prepare


def test_when_the_preparing_worker_dies_the_next_one_prepares() -> None:
    team = Team(SETUP)
    join(team, 0)
    join(team, 1)
    in_step, [(identity, setup)] = team.lose(0)
    assert not in_step
    assert identity == b"1" and isinstance(setup, Setup) and setup.prepare


def test_a_worker_without_an_id_gets_the_lowest_free_one() -> None:
    team = team_of(2)
    team.lose(0)
    worker_id, [(_, setup)] = team.join(Join(protocol=1, worker_id=-1, pid=9), b"x")
    assert worker_id == 0 and isinstance(setup, Setup) and setup.worker_id == 0


def test_a_step_goes_to_all_ready_workers_and_ends_when_all_have_answered() -> None:
    team = team_of(3)
    sent = team.start(plan())
    assert [identity for identity, _ in sent] == [b"0", b"1", b"2"]
    assert all(isinstance(message, StepPlan) and message.team == (0, 1, 2) for _, message in sent)
    answer(team, 1)
    answer(team, 0)
    assert team.finish_step() is None
    answer(team, 2)
    result = team.finish_step()
    assert result is not None and result.sampled_token_ids == pack_ids([7])
    assert team.can_start


def test_a_step_whose_worker_died_is_sent_again_to_the_rest_once_they_have_answered() -> None:
    team = team_of(3)
    team.start(plan())
    answer(team, 0)
    in_step, _ = team.lose(1)
    assert in_step and not team.must_retry
    answer(team, 2, ok=False)
    assert team.finish_step() is None and team.must_retry
    sent = team.retry()
    assert [identity for identity, _ in sent] == [b"0", b"2"]
    answer(team, 0)
    answer(team, 2)
    assert team.finish_step() is not None


def test_a_worker_that_dies_after_its_answer_does_not_spoil_the_step() -> None:
    team = team_of(2)
    team.start(plan())
    answer(team, 0)
    assert team.lose(0)[0] is False
    answer(team, 1)
    assert team.finish_step() is not None


def test_a_step_without_any_worker_left_waits_for_the_next_one() -> None:
    team = team_of(1)
    team.start(plan())
    team.lose(0)
    assert team.must_retry and team.retry() == [] and team.must_retry
    join(team, 0)
    ready(team, 0)
    assert len(team.retry()) == 1 and not team.must_retry


def test_results_of_other_steps_and_second_answers_are_dropped() -> None:
    team = team_of(2)
    team.start(plan(step_id=5))
    answer(team, 0, step_id=4)
    answer(team, 1, step_id=5)
    answer(team, 1, step_id=5)
    assert team.finish_step() is None
    answer(team, 0, step_id=5)
    assert team.finish_step() is not None


def test_a_worker_that_joins_during_a_step_takes_part_from_the_next_one() -> None:
    team = team_of(1)
    team.start(plan())
    join(team, 1)
    ready(team, 1)
    answer(team, 0)
    assert team.finish_step() is not None
    assert len(team.start(plan(2))) == 2


def test_the_next_step_is_sent_while_one_runs_and_they_end_in_order() -> None:
    team = team_of(2)
    team.start(plan(1))
    assert team.can_start
    assert [identity for identity, _ in team.start(plan(2))] == [b"0", b"1"]
    assert not team.can_start
    answer(team, 0, step_id=1)
    answer(team, 0, step_id=2)
    answer(team, 1, step_id=1)
    result = team.finish_step()
    assert result is not None and result.step_id == 1
    assert team.finish_step() is None and team.can_start
    answer(team, 1, step_id=2)
    result = team.finish_step()
    assert result is not None and result.step_id == 2


def test_a_worker_that_joins_during_a_step_lets_no_step_be_sent_ahead() -> None:
    team = team_of(1)
    team.start(plan(1))
    join(team, 1)
    assert team.can_start  # it still loads
    ready(team, 1)
    assert not team.can_start


def test_a_worker_that_died_lets_no_step_be_sent_ahead() -> None:
    team = team_of(2)
    team.start(plan(1))
    answer(team, 0)
    team.lose(0)
    assert not team.can_start
    team = team_of(2)
    team.start(plan(1))
    team.lose(0)
    assert not team.can_start


def test_when_a_worker_dies_both_steps_are_sent_again_once_nobody_is_inside_one() -> None:
    team = team_of(2)
    team.start(plan(1))
    team.start(plan(2))
    assert team.lose(1)[0]
    answer(team, 0, ok=False, step_id=1)
    assert not team.must_retry
    answer(team, 0, ok=False, step_id=2)
    assert team.finish_step() is None and team.must_retry
    sent = team.retry()
    assert [message.step_id for _, message in sent if isinstance(message, StepPlan)] == [1, 2]
    assert {message.team for _, message in sent if isinstance(message, StepPlan)} == {(0,)}
    for step_id in (1, 2):
        answer(team, 0, step_id=step_id)
        assert team.finish_step() is not None


def test_a_step_that_is_done_is_not_sent_again_with_the_one_after_it() -> None:
    team = team_of(2)
    team.start(plan(1))
    team.start(plan(2))
    answer(team, 0, step_id=1)
    answer(team, 1, step_id=1)
    assert team.finish_step() is not None
    team.lose(1)
    answer(team, 0, ok=False, step_id=2)
    assert team.must_retry
    assert [message.step_id for _, message in team.retry() if isinstance(message, StepPlan)] == [2]
