"""Rules of rounds: how many a step has, what its plan says of them, and that no token shows how many there were."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from pagedserve.contract.errors import ProtocolError
from pagedserve.contract.messages import SAMPLE_ROW, Fork, StepPlan, pack_ids, unpack_ids
from pagedserve.scheduler.rounds import rounds_in_time
from tests.builders import CLIENT, Engine, alone, generate, prompt_of, small_limits


def num_rounds(plan: StepPlan | None) -> int:
    assert plan is not None
    return plan.num_rounds


def decoding(*options: dict[str, Any], **limits: Any) -> Engine:
    """An engine whose requests, of 4 prompt tokens each, have computed them and sampled a token."""
    engine = Engine(small_limits(**limits))
    for index, each in enumerate(options):
        engine.add(generate("abcdefgh"[index], prompt_of(4, index), **each))
    assert num_rounds(engine.step(4)) == 1
    return engine


def run(engine: Engine, max_rounds: int, ahead: bool) -> None:
    """Run everything, with `ahead` each step planned as early as it can be."""
    scheduler = engine.scheduler
    while scheduler.has_work or scheduler.in_flight:
        if not scheduler.in_flight:
            assert scheduler.plan(0.0, max_rounds) is not None
        if ahead and scheduler.has_work:
            scheduler.plan(0.0, max_rounds)
        scheduler.check()
        engine.receive(scheduler.apply(engine.team.run(scheduler.in_flight[0])))


@pytest.mark.parametrize("max_rounds", [1, 4])
def test_a_step_that_copies_a_block_can_be_run_again_though_another_writes_to_that_block(max_rounds: int) -> None:
    """A request is forked while it is computed: it goes on in a copy, and the fork, which is behind, in the block."""
    texts = []
    for is_lost in (False, True):
        engine = decoding({"temperature": 1.0, "seed": 5, "max_tokens": 20}, block_size=16, num_blocks=64)
        scheduler = engine.scheduler
        assert scheduler.plan(0.0, max_rounds) is not None
        scheduler.fork(CLIENT, Fork(request_id="a", new_request_id="b", seed=9), 0.0)
        engine.receive(scheduler.apply(engine.team.run(scheduler.in_flight[0])))
        plan = scheduler.plan(0.0, max_rounds)
        assert plan is not None and len(unpack_ids(plan.copies)) == 2 and plan.num_rounds == 1
        assert scheduler.plan(0.0, max_rounds) is None  # it would write to the block that was copied
        if is_lost:
            engine.team.run(plan)
        run(engine, max_rounds, ahead=True)
        texts.append((engine.tokens("a"), engine.tokens("b")))
    assert texts[0] == texts[1]


# ---- how many -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("round_s", "expected"), [(0.0, 1), (0.001, 4), (0.002, 4), (0.0021, 3), (0.004, 2), (0.0041, 1), (1.0, 1)]
)
def test_a_step_has_as_many_rounds_as_8_ms_allow_and_4_at_most(round_s: float, expected: int) -> None:
    assert rounds_in_time(round_s) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 4),
        ({"temperature": 1.0, "repetition_penalty": 1.5}, 4),
        ({"n": 2}, 4),
        ({"prompt_logprobs": 0}, 4),
        ({"max_tokens": 4}, 3),
        ({"max_tokens": 2}, 1),
        ({"min_tokens": 3, "stop_token_ids": (1,)}, 2),
        ({"min_tokens": 1, "stop_token_ids": (1,)}, 4),
        ({"min_tokens": 7, "stop_token_ids": (1,)}, 4),
        ({"num_speculative_tokens": 2}, 1),
        ({"logprobs": 0}, 1),
        ({"n": 1, "best_of": 2, "temperature": 1.0}, 1),
        ({"beam_width": 2}, 1),
    ],
)
def test_a_step_has_as_many_rounds_as_a_request_allows(options: dict[str, Any], expected: int) -> None:
    assert num_rounds(decoding(options).step(4)) == expected


def test_a_step_has_as_many_rounds_as_the_caller_allows_and_one_if_nothing_is_said() -> None:
    engine = decoding({"max_tokens": 20})
    assert [num_rounds(engine.step(n)) for n in (1, 2, 3)] == [1, 2, 3]
    assert num_rounds(engine.scheduler.plan(0.0)) == 1


def test_the_request_that_allows_fewest_rounds_decides() -> None:
    assert num_rounds(decoding({}, {"max_tokens": 3}, {"max_tokens": 5}, max_num_rows=32).step(4)) == 2


def test_the_limits_of_rows_and_tokens_of_a_step_hold_for_all_rounds_together() -> None:
    assert num_rounds(decoding({}, {}, {}, max_num_rows=8).step(4)) == 2
    assert num_rounds(decoding({}, {}, {}, max_num_rows=12).step(4)) == 4
    engine = Engine(small_limits(max_num_rows=32, max_num_seqs=3, max_num_batched_tokens=11))
    for name in "abc":
        engine.add(generate(name, prompt_of(3), max_tokens=20))
    engine.step(4)
    assert num_rounds(engine.step(4)) == 3


@pytest.mark.parametrize(("n", "expected"), [(1, 4), (2, 1)])
def test_a_prompt_of_one_token_has_rounds_at_once_unless_its_outputs_must_part(n: int, expected: int) -> None:
    engine = Engine()
    engine.add(generate("a", [1], n=n, temperature=1.0, seed=1))
    assert num_rounds(engine.step(4)) == expected


def test_a_step_has_one_round_while_somebody_waits() -> None:
    engine = decoding({}, max_num_seqs=1, max_num_rows=8)
    engine.add(generate("b", prompt_of(4, 1)))
    assert num_rounds(engine.step(4)) == 1
    engine.scheduler.abort(CLIENT, "b")
    assert num_rounds(engine.step(4)) == 4


def test_a_step_has_one_round_beside_a_prompt() -> None:
    engine = decoding({"max_tokens": 20})
    engine.add(generate("b", prompt_of(40, 1)))
    assert [num_rounds(engine.step(4)) for _ in range(3)] == [1, 1, 4]


def test_a_step_has_one_round_while_a_running_sequence_is_not_in_it() -> None:
    engine = decoding({"max_tokens": 2}, {"max_tokens": 20})
    assert num_rounds(engine.scheduler.plan(0.0, 4)) == 1
    after = engine.scheduler.plan(0.0, 4)  # the first ends in the step in flight, which is not known yet
    assert after is not None and len(unpack_ids(after.token_ids)) == 1
    assert after.num_rounds == 1


@pytest.mark.parametrize(("length", "num_blocks", "expected"), [(7, 5, 1), (6, 5, 2), (5, 5, 3), (6, 6, 4)])
def test_a_step_has_as_many_rounds_as_there_are_blocks_for(length: int, num_blocks: int, expected: int) -> None:
    engine = Engine(small_limits(num_blocks=num_blocks))  # both have two blocks, and need a third soon
    for seed, name in enumerate("ab"):
        engine.add(generate(name, prompt_of(length, seed), max_tokens=10))
    engine.step(4)
    assert num_rounds(engine.step(4)) == expected


# ---- what a plan says -----------------------------------------------------------------------------------------------


def test_a_history_has_room_for_what_the_rounds_sample() -> None:
    engine = decoding({"repetition_penalty": 1.5}, {}, {"presence_penalty": 1.0}, max_num_rows=32)
    a, c = engine.tokens("a"), engine.tokens("c")
    plan = engine.scheduler.plan(0.0, 3)
    assert plan is not None
    assert unpack_ids(plan.history).tolist() == [*prompt_of(4), *a, 0, 0, *c, 0, 0]
    rows = np.frombuffer(plan.rows, dtype=SAMPLE_ROW)
    spans = list(zip(rows["history_start"].tolist(), rows["history_end"].tolist(), strict=True))
    assert spans == [(0, 5), (0, 0), (7, 8)]


def test_the_step_after_begins_where_the_last_round_ends_and_names_what_it_samples() -> None:
    engine = decoding({"max_tokens": 20}, {"max_tokens": 20, "frequency_penalty": 1.0})
    first, second = engine.scheduler.plan(0.0, 3), engine.scheduler.plan(0.0, 2)
    assert first is not None and second is not None
    assert unpack_ids(first.num_computed_tokens).tolist() == [4, 4]
    assert unpack_ids(second.num_computed_tokens).tolist() == [7, 7]
    assert unpack_ids(second.token_ids).tolist() == [-5, -6]
    assert unpack_ids(second.history).tolist() == [*engine.tokens("b"), -2, -4, -6, 0]
    assert np.frombuffer(second.rows, dtype=SAMPLE_ROW)["position"].tolist() == [8, 8]
    assert engine.scheduler.snapshot()["num_steps_ahead"] == 2


def test_all_tokens_of_a_step_come_in_one_record() -> None:
    engine = decoding({"max_tokens": 6})
    engine.step(4)
    assert [len(unpack_ids(record.token_ids)) for record in engine.records["a"]] == [1, 4]
    assert (engine.team.num_steps, engine.scheduler.counters.num_generation_tokens) == (5, 5)


@pytest.mark.parametrize("num_ids", [2, 6, 8, 9])
def test_a_result_with_other_than_an_id_of_each_row_and_round_is_refused(num_ids: int) -> None:
    engine = decoding({}, {})
    plan = engine.scheduler.plan(0.0, 4)
    assert plan is not None
    result = engine.team.run(plan)
    if num_ids != 8:
        with pytest.raises(ProtocolError, match=f"sampled_token_ids: expected 8 ids, got {num_ids}"):
            engine.scheduler.apply(msgspec.structs.replace(result, sampled_token_ids=pack_ids([0] * num_ids)))
    engine.receive(engine.scheduler.apply(result))


# ---- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("max_rounds", [2, 3, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0, "seed": 3},
        {"repetition_penalty": 1.5},
        {"frequency_penalty": 0.7, "presence_penalty": 0.2},
        {"logit_bias": {2: 5.0}, "temperature": 1.0, "seed": 1},
        {"min_tokens": 6, "stop_token_ids": tuple(range(32))},
        {"min_tokens": 3, "stop_token_ids": (1, 2, 3, 4, 5, 6, 7)},
    ],
)
def test_tokens_are_those_of_one_round_a_step(options: dict[str, Any], max_rounds: int, ahead: bool) -> None:
    message = generate("a", prompt_of(9), max_tokens=23, **options)
    engine = Engine()
    engine.add(message)
    engine.add(generate("b", prompt_of(5, 1), max_tokens=17, temperature=1.0, seed=1, presence_penalty=0.5))
    run(engine, max_rounds, ahead)
    assert engine.tokens("a") == alone(message, engine.limits)
    assert len(engine.records["b"]) < 17


def test_outputs_of_one_request_go_on_in_rounds() -> None:
    message = generate("a", prompt_of(6), n=3, temperature=1.0, seed=5, max_tokens=12)
    engine = Engine(small_limits(max_num_rows=32))
    engine.add(message)
    run(engine, 4, ahead=True)
    for index in range(3):
        assert engine.tokens("a", index) == alone(message, engine.limits, index=index)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("place", [1, 2, 3, 4])
def test_what_follows_a_stop_token_within_a_step_is_dropped(place: int, ahead: bool) -> None:
    message = generate("a", prompt_of(4), max_tokens=30, temperature=1.0, seed=2)
    engine = Engine()
    tokens = alone(message, engine.limits)
    stop = tokens[place]
    assert tokens.index(stop) == place
    engine.add(generate("a", prompt_of(4), max_tokens=30, temperature=1.0, seed=2, stop_token_ids=(stop,)))
    engine.add(generate("b", prompt_of(4, 1), max_tokens=30))
    engine.step(4)
    run(engine, 4, ahead)
    assert engine.tokens("a") == tokens[: place + 1]
    assert (engine.last("a").finish_reason, engine.last("a").stop_token_id) == ("stop", stop)
    assert engine.tokens("b") == alone(generate("b", prompt_of(4, 1), max_tokens=30), engine.limits)
    assert engine.scheduler.counters.num_generation_tokens == place + 1 + 30
    assert engine.scheduler.snapshot()["num_referenced_blocks"] == 0


def test_the_blocks_of_a_sequence_that_was_stopped_stay_until_the_step_after_is_answered() -> None:
    message = generate("a", prompt_of(4), max_tokens=30)
    engine = decoding({"max_tokens": 30, "stop_token_ids": (alone(message, small_limits())[2],)})
    scheduler = engine.scheduler
    scheduler.plan(0.0, 4)
    scheduler.plan(0.0, 4)
    for num_blocks in (3, 0):  # positions 0 to 11
        engine.receive(scheduler.apply(engine.team.run(scheduler.in_flight[0])))
        assert scheduler.snapshot()["num_referenced_blocks"] == num_blocks
    assert engine.tokens("a") == alone(message, engine.limits)[:3]


def test_a_request_that_is_aborted_within_its_rounds_leaves_nothing_behind() -> None:
    engine = decoding({"max_tokens": 30}, {"max_tokens": 30})
    scheduler = engine.scheduler
    scheduler.plan(0.0, 4)
    scheduler.plan(0.0, 4)
    scheduler.abort(CLIENT, "a")
    scheduler.check()
    run(engine, 4, ahead=True)
    assert scheduler.snapshot()["num_referenced_blocks"] == 0
    assert len(engine.tokens("a")) == 1
    assert engine.tokens("b") == alone(generate("b", prompt_of(4, 1), max_tokens=30), engine.limits)


def test_a_request_that_is_forked_within_its_rounds_goes_on_from_the_tokens_known_then() -> None:
    engine = decoding({"max_tokens": 20})
    scheduler = engine.scheduler
    scheduler.plan(0.0, 4)
    scheduler.fork(CLIENT, Fork(request_id="a", new_request_id="b", seed=1), 0.0)
    run(engine, 4, ahead=True)
    expected = alone(generate("a", prompt_of(4), max_tokens=20), engine.limits)
    assert engine.tokens("a") == expected
    assert engine.tokens("b") == expected[1:]


def test_steps_that_were_lost_are_run_again_from_their_first_round_with_the_same_result() -> None:
    engine = decoding({"max_tokens": 20, "repetition_penalty": 1.5})
    scheduler = engine.scheduler
    plans = [scheduler.plan(0.0, 4), scheduler.plan(0.0, 4)]
    assert scheduler.in_flight == tuple(plans)
    results = [engine.team.run(plan) for plan in scheduler.in_flight]
    assert [engine.team.run(plan) for plan in scheduler.in_flight] == results
    run(engine, 4, ahead=True)
    message = generate("a", prompt_of(4), max_tokens=20, repetition_penalty=1.5)
    assert engine.tokens("a") == alone(message, engine.limits)


def test_blocks_that_the_rounds_fill_are_found_by_later_requests() -> None:
    engine = decoding({"max_tokens": 9})
    run(engine, 4, ahead=True)
    known = prompt_of(4) + engine.tokens("a")
    engine.add(generate("b", [*known, 1]))
    engine.step()
    assert engine.last("b").num_cached_tokens == 12
