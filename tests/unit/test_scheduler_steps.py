"""What is in a step: chunks, budget, order, admission. The tokens that come out are the FakeTeam's."""

from __future__ import annotations

from itertools import pairwise

from pagedserve.contract.messages import StepPlan, unpack_ids
from tests.builders import CLIENT, Engine, alone, generate, prompt_of, small_limits


def lengths(plan: StepPlan | None) -> list[int]:
    """Tokens of each sequence of a step."""
    assert plan is not None
    starts = unpack_ids(plan.query_start_loc).tolist()
    return [end - start for start, end in pairwise(starts)]


def test_an_idle_scheduler_plans_nothing() -> None:
    assert Engine().scheduler.plan(0.0) is None


def test_a_prompt_is_computed_in_chunks_and_its_last_chunk_samples() -> None:
    engine = Engine(small_limits(max_num_batched_tokens=10))
    engine.add(generate("a", prompt_of(23)))
    steps = [engine.step() for _ in range(4)]
    assert [lengths(plan) for plan in steps] == [[10], [10], [3], [1]]
    assert [bool(plan and plan.rows) for plan in steps] == [False, False, True, True]
    assert len(engine.tokens("a")) == 2


def test_a_chunked_prompt_gives_the_tokens_of_one_step() -> None:
    for budget in (8, 16, 32):
        engine = Engine(small_limits(max_num_batched_tokens=budget))
        engine.run(generate("a", prompt_of(50)))
        assert engine.tokens("a") == alone(generate("a", prompt_of(50)), engine.limits)


def test_decoding_sequences_come_first_and_chunks_share_what_is_left() -> None:
    engine = Engine(small_limits(max_num_batched_tokens=10))
    engine.add(generate("a", prompt_of(4)))
    engine.step()
    engine.add(generate("b", prompt_of(23, 1)))
    assert lengths(engine.step()) == [1, 9]
    assert lengths(engine.step()) == [1, 9]
    assert lengths(engine.step()) == [1, 5]
    assert lengths(engine.step()) == [1, 1]


def test_a_chunk_beside_decoding_sequences_is_bounded() -> None:
    engine = Engine(small_limits(max_num_batched_tokens=32, min_mixed_prompt_tokens=6))
    engine.add(generate("short", prompt_of(4)))
    engine.step()
    engine.add(generate("long", prompt_of(100, 1)))
    assert lengths(engine.step()) == [1, 6]
    engine.scheduler.abort(CLIENT, "short")
    assert lengths(engine.step()) == [32]  # nobody waits for a token any more


def test_with_many_decoding_sequences_a_chunk_may_be_two_tokens_for_each() -> None:
    engine = Engine(small_limits(max_num_batched_tokens=64, min_mixed_prompt_tokens=6))
    for number in range(5):
        engine.add(generate(str(number), prompt_of(4, number)))
    engine.step()
    engine.add(generate("long", prompt_of(100, 9)))
    assert lengths(engine.step()) == [1] * 5 + [10]


def test_one_long_prompt_among_short_ones_holds_none_of_them_up() -> None:
    limits = small_limits(max_num_batched_tokens=512, max_num_seqs=32, num_blocks=4000, max_model_len=8000)
    engine = Engine(limits)
    for number in range(20):
        engine.add(generate(f"short{number}", prompt_of(8, number), max_tokens=30))
    engine.step()
    engine.add(generate("long", prompt_of(6000, 99), max_tokens=1))
    context = 0
    for _ in range(29):
        *short, chunk = lengths(engine.step())
        assert short == [1] * 20
        assert chunk == int(48 / (1 + context / 512))
        context += chunk


def test_chunks_shrink_when_their_attention_would_keep_others_waiting() -> None:
    engine = Engine(small_limits(max_num_batched_tokens=32, attention_parity=20))
    engine.add(generate("a", prompt_of(180)))
    assert [lengths(engine.step()) for _ in range(6)] == [[32], [32], [30], [22], [18], [16]]


def test_with_a_sliding_window_a_longer_context_costs_no_more() -> None:
    engine = Engine(small_limits(max_num_batched_tokens=32, attention_parity=20, sliding_window=40))
    engine.add(generate("a", prompt_of(180)))
    assert [lengths(engine.step()) for _ in range(6)] == [[32]] * 5 + [[20]]


def test_priority_then_arrival_decides_who_is_admitted() -> None:
    engine = Engine(small_limits(max_num_seqs=1, max_num_batched_tokens=8))
    for name, priority in (("late", 1), ("second", 0), ("third", 0), ("first", -1)):
        engine.add(generate(name, prompt_of(4), priority=priority, max_tokens=1))
    engine.run()
    assert list(engine.records) == ["first", "second", "third", "late"]


def test_one_that_does_not_fit_lets_a_later_one_pass() -> None:
    engine = Engine(small_limits(num_blocks=16, enable_prefix_caching=False))
    engine.add(generate("running", prompt_of(24), max_tokens=20))
    engine.step()
    engine.add(generate("large", prompt_of(40, 1), max_tokens=2))
    engine.add(generate("small", prompt_of(4, 2), max_tokens=2))
    engine.step()
    assert "small" in engine.records and "large" not in engine.records
    engine.run()
    assert len(engine.tokens("large")) == 2


def test_one_that_does_not_fit_is_not_starved_by_those_that_do() -> None:
    engine = Engine(small_limits(num_blocks=16, max_waiting=200, enable_prefix_caching=False))
    engine.add(generate("running", prompt_of(24), max_tokens=20))
    engine.step()
    engine.add(generate("large", prompt_of(48, 1), max_tokens=2))
    for number in range(100):
        engine.add(generate(f"small{number}", prompt_of(4, number), max_tokens=4 + number % 4))
    engine.run()
    order = list(engine.records)
    assert order.index("large") <= 1 + 32  # MAX_BYPASSES


def test_a_request_with_several_outputs_takes_as_many_seats() -> None:
    engine = Engine(small_limits(max_num_seqs=4))
    engine.add(generate("three", prompt_of(4), n=3, max_tokens=5))
    engine.add(generate("two", prompt_of(4, 1), n=2, max_tokens=5))
    engine.add(generate("one", prompt_of(4, 2), max_tokens=5))
    plan = engine.step()
    assert lengths(plan) == [4, 4]  # "two" does not fit, "one" does
    assert set(engine.records) == {"three", "one"}


def test_rows_of_a_step_stay_within_max_num_rows() -> None:
    engine = Engine(small_limits(max_num_seqs=4, max_num_rows=5))
    engine.run(
        generate("a", prompt_of(20), prompt_logprobs=1),
        generate("b", prompt_of(20, 1), prompt_logprobs=0),
        generate("c", prompt_of(6, 2), n=2),
    )  # FakeTeam checks each step
    assert len(engine.records["a"][0].prompt_logprobs or ()) == 20


def test_queue_time_is_the_time_until_the_first_step() -> None:
    engine = Engine(small_limits(max_num_seqs=1))
    engine.add(generate("a", prompt_of(4), max_tokens=3))
    engine.add(generate("b", prompt_of(4, 1), max_tokens=3))
    engine.run()
    assert engine.records["a"][0].queue_time_s == 1.0
    assert engine.records["b"][0].queue_time_s == 4.0
    assert engine.records["b"][1].queue_time_s == 0.0


def test_the_plan_in_flight_is_kept_until_it_is_answered() -> None:
    engine = Engine()
    engine.add(generate("a", prompt_of(4)))
    plan = engine.scheduler.plan(1.0)
    assert plan is not None and engine.scheduler.in_flight == (plan,)
    engine.scheduler.apply(engine.team.run(plan))
    assert engine.scheduler.in_flight == ()
    assert engine.scheduler.has_work
