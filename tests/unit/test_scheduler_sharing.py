"""Sharing: prefix cache hits, copy-on-write forks, the sliding window. Block and reference counts are exact."""

from __future__ import annotations

from typing import Any

import pytest

from pagedserve.contract.errors import RequestError
from pagedserve.contract.messages import Fork, unpack_ids
from pagedserve.scheduler.prefix_cache import block_hash
from pagedserve.scheduler.request import sequence_seed
from tests.builders import CLIENT, Engine, FakeModel, alone, continuation, generate, prompt_of, small_limits


def blocks(engine: Engine) -> tuple[int, int, int]:
    """Free, cached and referenced blocks."""
    state = engine.scheduler.snapshot()
    return state["num_free_blocks"], state["num_cached_blocks"], state["num_referenced_blocks"]


# ---- prefix cache


def test_a_second_request_takes_the_full_blocks_of_the_first_and_computes_the_rest() -> None:
    engine = Engine()
    engine.run(generate("a", prompt_of(18)))
    before = engine.team.num_computed_tokens
    engine.run(generate("b", prompt_of(18)))
    assert engine.records["b"][0].num_cached_tokens == 16
    assert engine.team.num_computed_tokens - before == 2 + 7  # the prompt's rest, and all output tokens but the last
    assert engine.tokens("b") == engine.tokens("a")
    state = engine.scheduler.snapshot()
    assert (state["num_cached_tokens"], state["num_queried_tokens"]) == (16, 36)


def test_the_last_token_is_always_computed() -> None:
    engine = Engine()
    engine.run(generate("a", prompt_of(16)), generate("b", prompt_of(16)))
    assert engine.records["b"][0].num_cached_tokens == 12


def test_a_chat_turn_reuses_the_whole_conversation_with_its_answers() -> None:
    engine = Engine()
    engine.run(generate("turn1", prompt_of(10), max_tokens=9))
    conversation = prompt_of(10) + engine.tokens("turn1") + prompt_of(3, 5)
    engine.run(generate("turn2", conversation))
    assert engine.records["turn2"][0].num_cached_tokens == 16  # 18 of 19 tokens are computed: four full blocks


def test_salts_do_not_share() -> None:
    engine = Engine()
    engine.run(generate("a", prompt_of(18), cache_salt="x"), generate("b", prompt_of(18), cache_salt="y"))
    assert engine.records["b"][0].num_cached_tokens == 0


def test_without_prefix_caching_nothing_is_kept_and_the_tokens_are_the_same() -> None:
    engine = Engine(small_limits(enable_prefix_caching=False))
    engine.run(generate("a", prompt_of(18)))
    assert blocks(engine) == (64, 0, 0)
    cached = Engine()
    cached.run(generate("a", prompt_of(18)))
    assert blocks(cached) == (58, 6, 0)  # 18 + 7 tokens were computed
    assert engine.tokens("a") == cached.tokens("a")


def test_requests_that_arrive_together_compute_a_common_prefix_once() -> None:
    engine = Engine(small_limits(max_num_batched_tokens=64))
    common = prompt_of(24)
    engine.run(*(generate(str(i), common + prompt_of(3, 10 + i), max_tokens=1) for i in range(6)))
    assert engine.team.num_computed_tokens == 24 + 6 * 3
    assert [engine.records[str(i)][0].num_cached_tokens for i in range(6)] == [0, 24, 24, 24, 24, 24]


def test_a_prefix_is_shared_block_by_block_while_the_first_is_still_in_its_prompt() -> None:
    engine = Engine(small_limits(max_num_batched_tokens=10))
    common = prompt_of(60)
    engine.run(generate("a", [*common, 1, 2], max_tokens=1), generate("b", [*common, 3, 4], max_tokens=1))
    assert engine.team.num_computed_tokens == 62 + 2
    assert engine.team.num_steps == 7


def test_identical_prompts_of_whole_blocks_do_not_wait_for_each_other_in_turn() -> None:
    engine = Engine(small_limits(max_num_batched_tokens=64))
    engine.run(*(generate(str(i), prompt_of(16), max_tokens=1) for i in range(6)))
    assert engine.team.num_steps == 2  # the first; then everybody's last block


def test_equal_output_is_kept_once() -> None:
    engine = Engine(small_limits(max_num_batched_tokens=64))
    engine.run(generate("a", prompt_of(16), max_tokens=17), generate("b", prompt_of(16), max_tokens=17))
    assert engine.tokens("a") == engine.tokens("b")
    assert blocks(engine) == (56, 8, 0)  # 16 + 16 tokens, once


def test_a_hash_collision_is_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedserve.scheduler.pool.block_hash", lambda parent, token_ids: b"the same for all")
    engine = Engine()
    engine.scheduler.check = lambda: None  # type: ignore[method-assign]  # it would find that the hashes are wrong
    engine.run(generate("a", prompt_of(18)))
    engine.run(generate("b", prompt_of(18, 1)))
    assert engine.records["b"][0].num_cached_tokens == 0
    assert engine.tokens("b") == alone(generate("b", prompt_of(18, 1)), engine.limits)


def test_tails_of_prefixes_are_evicted_before_their_heads() -> None:
    engine = Engine(small_limits(num_blocks=8))
    engine.run(generate("a", prompt_of(25), max_tokens=1))  # six full blocks stay
    engine.run(generate("b", prompt_of(13, 1), max_tokens=1))  # needs four: two free ones and a's last two
    engine.run(generate("c", prompt_of(25), max_tokens=1))
    assert engine.records["c"][0].num_cached_tokens == 16


def test_each_block_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []

    def counting(parent: bytes, token_ids: bytes) -> bytes:
        hashed.append(token_ids)
        return block_hash(parent, token_ids)

    engine = Engine(small_limits(max_num_batched_tokens=8))
    engine.scheduler.check = lambda: None  # type: ignore[method-assign]
    monkeypatch.setattr("pagedserve.scheduler.pool.block_hash", counting)
    engine.run(generate("a", prompt_of(40), max_tokens=21))
    assert len(hashed) == 15  # 60 computed tokens


# ---- forks


def test_n_outputs_cost_the_prompt_once() -> None:
    """Eight outputs of a 100-token prompt in blocks of 16: six blocks shared by all, one partial block each."""
    limits = small_limits(block_size=16, num_blocks=100, max_num_batched_tokens=128, max_model_len=400)
    engine = Engine(limits)
    engine.add(generate("a", prompt_of(100), n=8, max_tokens=20))
    engine.step()
    assert engine.team.num_computed_tokens == 100
    assert blocks(engine) == (93, 0, 7)  # all eight share all seven
    assert sorted(engine.scheduler._pool.allocator.ref_counts)[-7:] == [8] * 7
    engine.step()
    assert engine.team.num_copies == 7  # the last one keeps the original
    assert blocks(engine) == (100 - 6 - 8, 0, 6 + 8)
    assert sorted(engine.scheduler._pool.allocator.ref_counts)[-14:] == [1] * 8 + [8] * 6
    engine.run()
    assert engine.team.num_copies == 7
    for index in range(8):
        assert engine.tokens("a", index) == engine.tokens("a", 0)  # temperature 0


def test_outputs_are_those_of_single_requests_with_the_mixed_seeds() -> None:
    engine = Engine()
    engine.run(generate("a", prompt_of(18), n=3, temperature=1.0, seed=11))
    for index in range(3):
        message = generate("b", prompt_of(18), temperature=1.0, seed=sequence_seed(11, index))
        assert engine.tokens("a", index) == alone(message, engine.limits)
    assert sequence_seed(11, 0) == 11
    assert len({tuple(engine.tokens("a", index)) for index in range(3)}) == 3


def test_best_of_gives_the_n_outputs_with_the_best_mean_logprob_at_the_end() -> None:
    """Some of the five outputs end early, so that the best sums are not the best means."""
    engine = Engine(small_limits(eos_token_ids=(1, 2, 3)))
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 12}
    engine.run(generate("best", prompt_of(10), n=2, best_of=5, **sampling))
    engine.run(generate("all", prompt_of(10), n=5, logprobs=0, **sampling))
    sums = [0.0] * 5
    for record in engine.records["all"]:
        sums[record.index] += sum(entry.logprob for entry in record.logprobs)
    means = [sums[index] / len(engine.tokens("all", index)) for index in range(5)]
    ranking = sorted(range(5), key=lambda index: -means[index])
    assert ranking != sorted(range(5), key=lambda index: -sums[index])
    assert [record.index for record in engine.records["best"]] == [0, 1]
    for index in range(2):
        assert engine.tokens("best", index) == engine.tokens("all", ranking[index])
        assert engine.records["best"][index].cumulative_logprob == sums[ranking[index]]
        assert engine.records["best"][index].logprobs == ()
    assert [record.finished for record in engine.records["best"]] == [False, True]


def test_a_fork_shares_everything_and_copies_on_the_first_write_only() -> None:
    engine = Engine()
    engine.add(generate("a", prompt_of(10), temperature=1.0, seed=1, max_tokens=12))
    for _ in range(3):
        engine.step()
    assert blocks(engine) == (61, 0, 3)  # 12 tokens computed
    engine.step()
    engine.step()
    assert blocks(engine) == (60, 0, 4)
    engine.scheduler.fork(CLIENT, Fork(request_id="a", new_request_id="b", seed=2), engine.now)
    engine.scheduler.check()
    assert blocks(engine) == (60, 0, 4)  # nothing allocated, nothing copied
    assert sorted(engine.scheduler._pool.allocator.ref_counts)[-4:] == [2, 2, 2, 2]
    known = prompt_of(10) + engine.tokens("a")
    engine.run()
    assert engine.team.num_copies == 1
    message = generate("b", prompt_of(10), temperature=1.0, seed=2, max_tokens=12)
    expected = continuation(known, 10, message.sampling, 2, engine.limits, FakeModel())
    assert engine.tokens("b") == expected != engine.tokens("a")[5:]
    assert engine.tokens("a") == alone(
        generate("a", prompt_of(10), temperature=1.0, seed=1, max_tokens=12), engine.limits
    )


def test_a_fork_during_a_step_does_not_see_what_the_step_writes() -> None:
    engine = Engine()
    engine.add(generate("a", prompt_of(10), temperature=1.0, seed=1, max_tokens=12))
    engine.step()
    plan = engine.scheduler.plan(engine.now)
    assert plan is not None
    engine.scheduler.fork(CLIENT, Fork(request_id="a", new_request_id="b", seed=2), engine.now)
    engine.receive(engine.scheduler.apply(engine.team.run(plan)))
    engine.run()
    known = prompt_of(10) + engine.tokens("a")[:1]
    sampling = generate("b", [], temperature=1.0, max_tokens=12).sampling
    assert engine.tokens("b") == continuation(known, 10, sampling, 2, engine.limits, FakeModel())


def test_a_block_that_the_original_has_published_is_not_found_once_its_fork_writes_to_it() -> None:
    """The fork is made while the original computes the last token of a block, and outlives it."""
    engine = Engine()
    engine.add(generate("a", prompt_of(11), max_tokens=12))
    engine.step()
    plan = engine.scheduler.plan(engine.now)
    assert plan is not None
    engine.scheduler.fork(CLIENT, Fork(request_id="a", new_request_id="b"), engine.now)
    engine.receive(engine.scheduler.apply(engine.team.run(plan)))
    engine.scheduler.abort(CLIENT, "a")
    engine.step()  # checks that no block that can be found is written to
    assert engine.team.num_copies == 0
    engine.run()
    assert engine.tokens("b") == alone(generate("a", prompt_of(11), max_tokens=12), engine.limits)[1:]


def test_a_block_is_not_given_away_in_the_step_that_copies_from_it() -> None:
    """P copies from the block that it shares with its fork; the fork is preempted when Q needs a copy too."""
    engine = Engine(small_limits(num_blocks=5, enable_prefix_caching=False))
    engine.add(generate("p", prompt_of(5), max_tokens=6))
    engine.add(generate("q", prompt_of(5, 1), max_tokens=6))
    engine.step()
    for original in ("q", "p"):
        fork = Fork(request_id=original, new_request_id=f"fork of {original}")
        engine.scheduler.fork(CLIENT, fork, engine.now)
    engine.step()  # FakeTeam checks that no block is copied from and to
    assert engine.team.num_copies == 1
    assert engine.scheduler.counters.num_preemptions == 2
    engine.run()
    for seed, original in enumerate(("p", "q")):
        expected = alone(generate("x", prompt_of(5, seed), max_tokens=6), engine.limits)
        assert engine.tokens(original) == expected
        assert engine.tokens(f"fork of {original}") == expected[1:]


def test_a_fork_without_a_free_seat_waits_in_the_queue() -> None:
    engine = Engine(small_limits(max_num_seqs=1))
    engine.add(generate("a", prompt_of(10), max_tokens=5))
    engine.step()
    engine.scheduler.fork(CLIENT, Fork(request_id="a", new_request_id="b"), engine.now)
    assert engine.scheduler.snapshot()["num_waiting"] == 1
    engine.run()
    assert engine.tokens("b") == engine.tokens("a")[1:]


def test_forks_of_nothing_or_of_many_are_refused() -> None:
    engine = Engine()
    engine.add(generate("many", prompt_of(4), n=2))
    with pytest.raises(RequestError, match="no live request 'x'") as not_found:
        engine.scheduler.fork(CLIENT, Fork(request_id="x", new_request_id="y"), 0.0)
    assert not_found.value.code == "not_found"
    with pytest.raises(RequestError, match="2 outputs"):
        engine.scheduler.fork(CLIENT, Fork(request_id="many", new_request_id="y"), 0.0)


# ---- sliding window


def test_blocks_outside_the_window_are_given_back_and_not_in_the_table() -> None:
    engine = Engine(small_limits(sliding_window=6, enable_prefix_caching=False))
    engine.add(generate("a", prompt_of(30), max_tokens=5))
    engine.step()
    assert blocks(engine)[2] == 2  # the query at 30 sees 25..30: blocks 6 and 7
    plan = engine.step()
    assert plan is not None
    assert unpack_ids(plan.block_tables).tolist()[:6] == [-1] * 6
    engine.run()
    expected = continuation(
        prompt_of(30), 30, generate("a", [], max_tokens=5).sampling, 0, engine.limits, FakeModel(sliding_window=6)
    )
    assert engine.tokens("a") == expected


def test_with_a_window_a_prompt_larger_than_the_pool_is_served() -> None:
    limits = small_limits(sliding_window=6, num_blocks=6, max_num_batched_tokens=8)
    engine = Engine(limits)
    engine.run(generate("a", prompt_of(100), max_tokens=20))
    model = FakeModel(sliding_window=6)
    sampling = generate("a", [], max_tokens=20).sampling
    assert engine.tokens("a") == continuation(prompt_of(100), 100, sampling, 0, limits, model)


def test_with_a_window_only_the_blocks_in_it_must_be_cached() -> None:
    engine = Engine(small_limits(sliding_window=6, num_blocks=12))
    engine.run(generate("a", prompt_of(30), max_tokens=1))
    engine.run(generate("b", prompt_of(20, 1), max_tokens=1))  # evicts what left a's window first
    engine.run(generate("c", prompt_of(30), max_tokens=3))
    assert engine.records["c"][0].num_cached_tokens == 28
    model = FakeModel(sliding_window=6)
    sampling = generate("c", [], max_tokens=3).sampling
    assert engine.tokens("c") == continuation(prompt_of(30), 30, sampling, 0, engine.limits, model)
