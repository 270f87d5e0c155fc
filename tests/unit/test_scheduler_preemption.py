"""Preemption and abort: who gives way, what is lost (time only), what is given back and when."""

from __future__ import annotations

import pytest

from pagedserve.contract.errors import ProtocolError, RequestError
from pagedserve.contract.messages import StepResult, pack_ids
from pagedserve.scheduler.invariants import InvariantError
from tests.builders import CLIENT, Engine, alone, generate, prompt_of, small_limits


def run_and_see_who_is_preempted(engine: Engine) -> list[str]:
    """Step until idle; the requests preempted, in order."""
    preempted: list[str] = []
    counts: dict[str, int] = {}
    while engine.step() is not None:
        for request in engine.scheduler._requests.values():
            for sequence in request.sequences:
                if sequence.num_preemptions > counts.get(request.request_id, 0):
                    counts[request.request_id] = sequence.num_preemptions
                    preempted.append(request.request_id)
    return preempted


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_sixteen_requests_on_a_pool_for_four_end_as_they_would_alone(enable_prefix_caching: bool) -> None:
    limits = small_limits(
        num_blocks=40,  # four of 40 tokens
        max_num_seqs=16,
        enable_prefix_caching=enable_prefix_caching,
    )
    engine = Engine(limits)
    messages = [
        generate(str(i), prompt_of(10 + i % 3, i), max_tokens=27, temperature=float(i % 2), seed=i) for i in range(16)
    ]
    for message in messages:
        engine.add(message)
    preempted = run_and_see_who_is_preempted(engine)
    assert preempted
    assert "0" not in preempted  # the oldest of the highest priority
    for message in messages:
        assert engine.tokens(message.request_id) == alone(message, limits), message.request_id


def test_no_request_is_preempted_more_than_log2_of_the_pool_times() -> None:
    """With each preemption a request waits for twice the spare room; in the end it runs only as the first."""
    engine = Engine(small_limits(num_blocks=32, max_num_seqs=16))
    for number in range(16):
        engine.add(generate(str(number), prompt_of(10, number), max_tokens=100))
    preempted = run_and_see_who_is_preempted(engine)
    assert max(preempted.count(name) for name in preempted) <= 1 + 5


def test_a_prompt_is_not_admitted_into_blocks_that_a_running_prompt_still_needs() -> None:
    """The first prompt's chunks shrink with its context, so that a step has some tokens left for the second."""
    engine = Engine(small_limits(num_blocks=20, max_num_batched_tokens=20, attention_parity=1))
    engine.run(*(generate(str(number), prompt_of(48, number), max_tokens=2) for number in range(2)))
    assert engine.scheduler.counters.num_preemptions == 0


def test_a_prompt_is_not_admitted_into_the_next_block_of_a_running_request() -> None:
    engine = Engine(small_limits(num_blocks=8))
    engine.add(generate("running", prompt_of(15), max_tokens=3))
    engine.add(generate("next", prompt_of(16, 1), max_tokens=3))
    engine.run()
    assert engine.scheduler.counters.num_preemptions == 0


def test_the_newest_of_the_lowest_priority_gives_way() -> None:
    engine = Engine(small_limits(num_blocks=12, enable_prefix_caching=False))
    engine.add(generate("low", prompt_of(8), priority=1, max_tokens=16))
    engine.add(generate("old", prompt_of(8, 1), priority=0, max_tokens=16))
    engine.add(generate("new", prompt_of(8, 2), priority=0, max_tokens=16))
    assert run_and_see_who_is_preempted(engine)[0] == "low"


@pytest.mark.parametrize(("enable_prefix_caching", "num_recomputed_tokens"), [(True, 0), (False, 24)])
def test_a_preempted_request_goes_on_from_its_cached_blocks(
    enable_prefix_caching: bool, num_recomputed_tokens: int
) -> None:
    """Both reach 24 tokens; "old" takes the last free block, "new" finds none."""
    engine = Engine(small_limits(num_blocks=13, enable_prefix_caching=enable_prefix_caching))
    engine.add(generate("old", prompt_of(12), max_tokens=16))
    engine.add(generate("new", prompt_of(12, 1), max_tokens=16))
    assert run_and_see_who_is_preempted(engine) == ["new"]
    assert engine.scheduler.counters.num_preemptions == 1
    assert engine.team.num_computed_tokens == 2 * (12 + 15) + num_recomputed_tokens
    assert engine.records["new"][0].num_cached_tokens == 0  # what it takes back was its own
    assert engine.scheduler.counters.num_cached_tokens == 0


def test_nothing_is_repeated_or_lost_over_a_preemption() -> None:
    engine = Engine(small_limits(num_blocks=13))
    engine.add(generate("old", prompt_of(12), max_tokens=16, logprobs=1))
    engine.add(generate("new", prompt_of(12, 1), max_tokens=16, logprobs=1, prompt_logprobs=1))
    assert run_and_see_who_is_preempted(engine) == ["new"]
    for name, seed in (("old", 0), ("new", 1)):
        assert engine.tokens(name) == alone(generate(name, prompt_of(12, seed), max_tokens=16), engine.limits)
        assert [len(record.logprobs) for record in engine.records[name]] == [1] * 16
    assert len(engine.records["new"][0].prompt_logprobs or ()) == 12
    assert engine.records["new"][1].prompt_logprobs is None


def test_an_aborted_request_frees_its_blocks_and_says_so_once() -> None:
    engine = Engine(small_limits(enable_prefix_caching=False))
    engine.add(generate("a", prompt_of(10)))
    engine.add(generate("b", prompt_of(10, 1)))
    engine.step()
    records = engine.scheduler.abort(CLIENT, "a")
    assert [(r.finish_reason, r.finished, r.token_ids) for _, r in records] == [("abort", True, b"")]
    assert engine.scheduler.abort(CLIENT, "a") == []
    assert engine.scheduler.snapshot()["num_referenced_blocks"] == 3
    engine.run()
    assert engine.tokens("b") == alone(generate("b", prompt_of(10, 1)), engine.limits)


def test_blocks_of_a_request_aborted_in_a_step_are_kept_until_the_step_is_answered() -> None:
    engine = Engine(small_limits(enable_prefix_caching=False))
    engine.add(generate("a", prompt_of(10)))
    plan = engine.scheduler.plan(1.0)
    assert plan is not None
    engine.scheduler.abort(CLIENT, "a", "stop")
    engine.scheduler.check()
    assert engine.scheduler.snapshot()["num_referenced_blocks"] == 3
    assert engine.scheduler.apply(engine.team.run(plan)) == []
    engine.scheduler.check()
    assert engine.scheduler.snapshot()["num_free_blocks"] == 64
    assert engine.scheduler.snapshot()["num_finished"] == {"stop": 1}


def test_what_an_aborted_request_computed_is_cached_for_others() -> None:
    engine = Engine()
    engine.add(generate("a", prompt_of(18)))
    plan = engine.scheduler.plan(1.0)
    assert plan is not None
    engine.scheduler.abort(CLIENT, "a")
    engine.scheduler.apply(engine.team.run(plan))
    engine.run(generate("b", prompt_of(18)))
    assert engine.records["b"][0].num_cached_tokens == 16


def test_an_id_may_be_used_again_while_the_step_of_its_aborted_owner_runs() -> None:
    engine = Engine()
    engine.add(generate("a", prompt_of(10)))
    plan = engine.scheduler.plan(1.0)
    assert plan is not None
    engine.scheduler.abort(CLIENT, "a")
    engine.add(generate("a", prompt_of(7, 1)))
    engine.receive(engine.scheduler.apply(engine.team.run(plan)))
    engine.run()
    assert engine.tokens("a") == alone(generate("a", prompt_of(7, 1)), engine.limits)


def test_aborting_many_outputs_ends_each_that_has_not_ended() -> None:
    engine = Engine()
    engine.add(generate("waiting", prompt_of(4), n=3))
    records = engine.scheduler.abort(CLIENT, "waiting")
    assert [(record.index, record.finished) for _, record in records] == [(0, False), (1, False), (2, True)]


def test_a_client_that_is_gone_leaves_nothing_behind_and_disturbs_nobody() -> None:
    engine = Engine(small_limits(enable_prefix_caching=False))
    for name in ("x", "y"):
        engine.scheduler.add(b"gone", generate(name, prompt_of(10)), 0.0)
    engine.add(generate("a", prompt_of(10, 1)))
    engine.step()
    engine.scheduler.abort_client(b"gone")
    engine.scheduler.check()
    engine.run()
    assert engine.tokens("a") == alone(generate("a", prompt_of(10, 1)), engine.limits)


def test_a_finish_reason_of_an_abort_is_abort_or_stop() -> None:
    with pytest.raises(RequestError, match="finish_reason must be abort or stop, got 'length'"):
        Engine().scheduler.abort(CLIENT, "a", "length")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"step_id": 7}, "result of step 7"),
        ({"ok": False}, "ok: False"),
        ({"sampled_token_ids": b""}, "expected 1 ids, got 0"),
        ({"sampled_token_ids": pack_ids([32])}, r"within \[0, 31\]"),
    ],
)
def test_a_result_that_does_not_fit_changes_nothing(changes: dict[str, object], reason: str) -> None:
    engine = Engine()
    engine.add(generate("a", prompt_of(10)))
    plan = engine.scheduler.plan(1.0)
    assert plan is not None
    good = engine.team.run(plan)
    fields = {name: getattr(good, name) for name in StepResult.__struct_fields__}
    with pytest.raises(ProtocolError, match=reason):
        engine.scheduler.apply(StepResult(**{**fields, **changes}))
    engine.scheduler.check()
    engine.receive(engine.scheduler.apply(good))
    assert len(engine.tokens("a")) == 1


def test_only_two_steps_are_in_flight() -> None:
    engine = Engine()
    engine.add(generate("a", prompt_of(10)))
    engine.scheduler.plan(1.0)
    engine.scheduler.plan(1.0)
    assert not engine.scheduler.has_work
    with pytest.raises(InvariantError, match="while two others are in flight"):
        engine.scheduler.plan(1.0)
