"""Rules of planning ahead: the step after the one in flight, before its result is known, and when that is not done."""

from __future__ import annotations

from typing import Any

import pytest

from pagedserve.contract.messages import Fork, unpack_ids
from tests.builders import CLIENT, Engine, alone, generate, prompt_of, small_limits


def run_ahead(engine: Engine) -> int:
    """Run everything, each step planned as early as it can be; how many were planned ahead."""
    scheduler, num_ahead = engine.scheduler, 0
    while scheduler.has_work or scheduler.in_flight:
        if not scheduler.in_flight:
            assert scheduler.plan(0.0) is not None
        if scheduler.has_work:
            num_ahead += scheduler.plan(0.0) is not None
        scheduler.check()
        engine.receive(scheduler.apply(engine.team.run(scheduler.in_flight[0])))
    return num_ahead


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0, "seed": 3},
        {"repetition_penalty": 1.5},
        {"frequency_penalty": 0.7, "presence_penalty": 0.2},
        {"min_tokens": 6, "stop_token_ids": tuple(range(32))},
        {"logprobs": 2, "prompt_logprobs": 1},
    ],
)
def test_tokens_are_those_of_steps_one_by_one(options: dict[str, Any]) -> None:
    message = generate("a", prompt_of(9), max_tokens=12, **options)
    engine = Engine()
    engine.add(message)
    engine.add(generate("b", prompt_of(5, 1), max_tokens=7, temperature=1.0, seed=1))
    assert run_ahead(engine) >= 5
    assert engine.tokens("a") == alone(message, engine.limits)


def test_a_token_that_is_not_known_yet_is_named_by_the_row_that_samples_it() -> None:
    engine = Engine()
    engine.add(generate("a", prompt_of(4)))
    engine.add(generate("b", prompt_of(5, 1), prompt_logprobs=0, repetition_penalty=1.5))
    first, second = engine.scheduler.plan(0.0), engine.scheduler.plan(0.0)
    assert first is not None and second is not None and second.step_id == first.step_id + 1
    assert unpack_ids(second.token_ids).tolist() == [-1, -6]  # b has rows for four prompt tokens before
    assert unpack_ids(second.num_computed_tokens).tolist() == [4, 5]
    assert unpack_ids(second.history).tolist() == [*prompt_of(5, 1), -6]


def test_a_sequence_that_ends_by_length_is_not_in_the_step_after() -> None:
    engine = Engine()
    engine.add(generate("a", prompt_of(4), max_tokens=1))
    engine.add(generate("b", prompt_of(5, 1), max_tokens=2))
    engine.scheduler.plan(0.0)
    second = engine.scheduler.plan(0.0)
    assert second is not None and len(unpack_ids(second.num_computed_tokens)) == 1
    assert run_ahead(engine) == 0
    assert (len(engine.tokens("a")), len(engine.tokens("b"))) == (1, 2)


def test_what_was_computed_after_a_stop_token_is_dropped_and_its_blocks_are_given_back_then() -> None:
    engine = Engine()
    message = generate("a", prompt_of(4), max_tokens=20)
    stop = alone(message, engine.limits)[2]
    engine.add(generate("a", prompt_of(4), max_tokens=20, stop_token_ids=(stop,)))
    while not engine.records.get("a") or not engine.last("a").finished:
        while engine.scheduler.has_work and engine.scheduler.plan(0.0) is not None:
            pass
        engine.receive(engine.scheduler.apply(engine.team.run(engine.scheduler.in_flight[0])))
    assert len(engine.scheduler.in_flight) == 1  # too late
    assert engine.scheduler.snapshot()["num_referenced_blocks"] == 2
    assert engine.scheduler.apply(engine.team.run(engine.scheduler.in_flight[0])) == []
    engine.scheduler.check()
    assert engine.scheduler.snapshot()["num_referenced_blocks"] == 0
    assert engine.tokens("a") == alone(message, engine.limits)[:3]


def test_an_abort_between_two_steps_in_flight_waits_for_both() -> None:
    engine = Engine()
    engine.add(generate("a", prompt_of(4)))
    engine.scheduler.plan(0.0)
    engine.scheduler.plan(0.0)
    engine.scheduler.abort(CLIENT, "a")
    for num_blocks in (2, 0):
        engine.scheduler.check()
        assert engine.scheduler.apply(engine.team.run(engine.scheduler.in_flight[0])) == []
        assert engine.scheduler.snapshot()["num_referenced_blocks"] == num_blocks
    engine.scheduler.check()


def test_a_lost_step_and_the_one_after_it_are_run_again_with_the_same_result() -> None:
    engine = Engine()
    engine.add(message := generate("a", prompt_of(4), max_tokens=3))
    engine.scheduler.plan(0.0)
    engine.scheduler.plan(0.0)
    for plan in engine.scheduler.in_flight:
        engine.team.run(plan)
    run_ahead(engine)
    assert engine.tokens("a") == alone(message, engine.limits)


@pytest.mark.parametrize(
    "options",
    [{"n": 2}, {"beam_width": 2, "n": 1}, {"num_speculative_tokens": 2}, {"max_tokens": 1}, {"max_tokens": 0}],
)
def test_no_step_is_planned_ahead_that_depends_on_the_result(options: dict[str, Any]) -> None:
    engine = Engine()
    engine.add(generate("a", prompt_of(6), **options))
    assert engine.scheduler.plan(0.0) is not None
    assert engine.scheduler.plan(0.0) is None
    run_ahead(engine)


def test_no_step_is_planned_ahead_during_a_prompt() -> None:
    engine = Engine()
    engine.add(generate("a", prompt_of(40)))
    assert engine.scheduler.plan(0.0) is not None
    assert engine.scheduler.plan(0.0) is None


def test_no_step_is_planned_ahead_where_somebody_may_be_admitted_but_it_is_where_all_seats_are_taken() -> None:
    engine = Engine(small_limits(max_num_seqs=2))
    engine.add(generate("a", prompt_of(6), max_tokens=4))
    assert engine.scheduler.plan(0.0) is not None
    engine.add(generate("b", prompt_of(6, 1), max_tokens=9))
    assert engine.scheduler.plan(0.0) is None
    engine.receive(engine.scheduler.apply(engine.team.run(engine.scheduler.in_flight[0])))
    engine.add(generate("c", prompt_of(6, 2)))
    assert engine.scheduler.plan(0.0) is not None  # a and b
    assert engine.scheduler.plan(0.0) is not None  # a and b again, since c has no seat
    assert run_ahead(engine) > 0
    for name, seed, length in (("a", 0, 4), ("b", 1, 9), ("c", 2, 8)):
        assert engine.tokens(name) == alone(generate(name, prompt_of(6, seed), max_tokens=length), engine.limits)


def test_no_step_is_planned_ahead_beside_a_fork_that_shares_a_partial_block() -> None:
    engine = Engine()
    engine.add(generate("a", prompt_of(6)))
    engine.step()
    engine.scheduler.plan(0.0)
    engine.scheduler.fork(CLIENT, Fork(request_id="a", new_request_id="b", seed=1), 0.0)
    assert engine.scheduler.plan(0.0) is None
    run_ahead(engine)
    assert engine.tokens("b") == alone(generate("a", prompt_of(6)), engine.limits)[1:]


def test_no_step_is_planned_ahead_that_would_preempt() -> None:
    engine = Engine(small_limits(num_blocks=5, max_num_seqs=2))
    engine.add(generate("a", prompt_of(7), max_tokens=9))
    engine.add(generate("b", prompt_of(7, 1), max_tokens=9))
    assert engine.scheduler.plan(0.0) is not None
    assert engine.scheduler.plan(0.0) is not None
    engine.receive(engine.scheduler.apply(engine.team.run(engine.scheduler.in_flight[0])))
    assert engine.scheduler.plan(0.0) is None  # both need a third block, and there is one
    run_ahead(engine)
    for name, seed in (("a", 0), ("b", 1)):
        assert engine.tokens(name) == alone(generate(name, prompt_of(7, seed), max_tokens=9), engine.limits)


def test_a_block_that_a_step_in_flight_reads_is_not_written_by_the_one_after_it() -> None:
    engine = Engine()
    same = prompt_of(6)  # two requests fill the same block: one gives its own back, while a step reads it
    for name, prompt in (("a", same), ("b", same), ("c", prompt_of(5, 1)), ("d", prompt_of(8, 2))):
        engine.add(generate(name, prompt, max_tokens=30))
    scheduler, team, num_pairs = engine.scheduler, engine.team, 0
    while scheduler.has_work or scheduler.in_flight:
        while scheduler.has_work and scheduler.plan(0.0) is not None:
            pass
        plans = scheduler.in_flight
        results = [team.run(plan) for plan in plans]
        assert [team.run(plan) for plan in plans] == results
        num_pairs += len(plans) == 2
        engine.receive(scheduler.apply(results[0]))
    assert num_pairs > 20
