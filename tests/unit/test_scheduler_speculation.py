"""Speculation by prompt lookup: drafts, their verification, and that nobody can tell from the tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagedserve.contract.messages import SAMPLE_ROW, unpack_ids
from pagedserve.scheduler.speculation import num_accepted, propose
from tests.builders import Engine, FakeModel, generate, prompt_of, small_limits


def drafts(token_ids: list[int], num_drafts: int) -> list[int]:
    found: list[int] = propose(np.array(token_ids, dtype=np.int32), num_drafts).tolist()
    return found


def test_drafts_are_what_followed_the_last_tokens_before() -> None:
    assert drafts([1, 2, 3, 4, 5, 9, 1, 2], 3) == [3, 4, 5]


def test_the_latest_of_equally_long_matches_counts() -> None:
    assert drafts([1, 2, 3, 0, 1, 2, 4, 0, 1, 2], 1) == [4]


def test_a_longer_match_counts_before_a_later_one() -> None:
    assert drafts([7, 1, 2, 3, 0, 1, 2, 4, 7, 1, 2], 1) == [3]


def test_drafts_go_round_a_loop() -> None:
    assert drafts([5, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("token_ids", [[1], [1, 2], [1, 2, 3, 4], [1, 2, 9, 2]])
def test_less_than_two_equal_tokens_give_no_draft(token_ids: list[int]) -> None:
    assert drafts(token_ids, 4) == []


def test_a_prompt_of_one_repeated_token_is_a_loop() -> None:
    assert drafts([4, 4, 4], 2) == [4, 4]


def test_drafts_are_accepted_up_to_the_first_that_was_not_sampled() -> None:
    assert num_accepted(np.array([1, 2, 3], dtype=np.int32), [1, 2, 9, 4]) == 2


REPEATING = FakeModel(memory=2)  # each token depends on the last two: greedy output soon runs in a loop


def run(sampling: dict[str, Any], num_drafts: int, prompt: list[int], **limits: Any) -> Engine:
    engine = Engine(small_limits(num_speculative_tokens=num_drafts, **limits), REPEATING)
    engine.run(generate("a", prompt, **sampling))
    return engine


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 60},
        {"max_tokens": 60, "temperature": 0.7, "seed": 5},
        {"max_tokens": 60, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
        {"max_tokens": 60, "logprobs": 3},
        {"max_tokens": 60, "min_tokens": 40},
        {"max_tokens": 60, "logit_bias": {4: 1.0}},
        {"max_tokens": 60, "n": 2, "temperature": 0.5, "seed": 1},
    ],
)
@pytest.mark.parametrize("num_drafts", [1, 3, 5])
def test_output_and_logprobs_are_those_without_speculation(sampling: dict[str, Any], num_drafts: int) -> None:
    prompt = prompt_of(6) * 3
    plain = run(sampling, 0, prompt, eos_token_ids=(30,))
    speculating = run(sampling, num_drafts, prompt, eos_token_ids=(30,))
    for index in range(sampling.get("n", 1)):
        assert speculating.tokens("a", index) == plain.tokens("a", index)
    logprobs = [
        [entry for record in engine.records["a"] for entry in record.logprobs] for engine in (plain, speculating)
    ]
    assert logprobs[0] == logprobs[1]
    assert speculating.last("a").finish_reason == plain.last("a").finish_reason


def test_each_draft_has_a_row_that_samples_as_if_the_drafts_before_it_were_known() -> None:
    engine = Engine(small_limits(num_speculative_tokens=3, eos_token_ids=(30,)), REPEATING)
    loop = [1, 2, 3, 4] * 3
    engine.add(generate("a", loop, repetition_penalty=1.5, min_tokens=3, max_tokens=20, seed=9))
    engine.step()
    sampled = engine.tokens("a")
    engine.scheduler._requests[b"client", "a"].sequences[0].tokens.values[12] = 1  # go on with the loop
    plan = engine.scheduler.plan(engine.now)
    assert plan is not None and len(sampled) == 1
    rows = np.frombuffer(plan.rows, dtype=SAMPLE_ROW)
    assert unpack_ids(plan.token_ids).tolist() == [1, 2, 3, 4]
    assert rows["token_index"].tolist() == [0, 1, 2, 3]
    assert rows["position"].tolist() == [13, 14, 15, 16]
    assert rows["seed"].tolist() == [9] * 4
    history = unpack_ids(plan.history).tolist()
    for row, drafts in zip(rows, ([], [2], [2, 3], [2, 3, 4]), strict=True):
        assert history[row["history_start"] : row["history_end"]] == [*loop, 1, *drafts]
        assert row["history_prompt"] == 12
    banned = [row["bias_end"] - row["bias_start"] for row in rows]
    assert banned == [1, 1, 0, 0]  # output tokens 1 and 2 are before min_tokens, 3 and 4 are not


def test_an_accepted_draft_that_ends_the_output_is_the_last_token() -> None:
    free = run({"max_tokens": 60}, 0, prompt_of(8)).tokens("a")
    prompt = prompt_of(8) + free[:50]  # the loop that greedy decoding goes on with
    stop = free[52]
    plain = run({"max_tokens": 40, "stop_token_ids": (stop,)}, 0, prompt)
    speculating = run({"max_tokens": 40, "stop_token_ids": (stop,)}, 8, prompt)
    assert speculating.tokens("a") == plain.tokens("a") == free[50:53]
    assert speculating.team.num_steps == 2
    assert speculating.last("a").stop_token_id == stop
    assert speculating.scheduler.counters.num_generation_tokens == 3


def test_a_text_that_repeats_itself_saves_more_than_half_the_steps() -> None:
    plain = run({"max_tokens": 100}, 0, prompt_of(8))
    speculating = run({"max_tokens": 100}, 4, prompt_of(8))
    assert plain.team.num_steps == 100
    assert speculating.team.num_steps < 50
    assert speculating.tokens("a") == plain.tokens("a")


def test_acceptance_is_reported_by_record_and_in_total() -> None:
    engine = run({"max_tokens": 100}, 4, prompt_of(8))
    records = engine.records["a"]
    assert sum(record.num_draft_tokens for record in records) == engine.scheduler.counters.num_draft_tokens > 0
    assert sum(record.num_accepted_tokens for record in records) == engine.scheduler.counters.num_accepted_tokens
    for record in records:
        assert len(unpack_ids(record.token_ids)) == 1 + record.num_accepted_tokens


def test_a_request_may_turn_speculation_on_or_off_for_itself() -> None:
    assert run({"max_tokens": 60, "num_speculative_tokens": 0}, 4, prompt_of(8)).team.num_steps == 60
    assert run({"max_tokens": 60, "num_speculative_tokens": 4}, 0, prompt_of(8)).team.num_steps < 40


def test_drafts_end_with_max_tokens_and_preempt_nobody() -> None:
    engine = Engine(small_limits(num_speculative_tokens=8, num_blocks=8), REPEATING)
    engine.run(generate("a", prompt_of(8), max_tokens=25))
    assert len(engine.tokens("a")) == 25
    assert engine.scheduler.counters.num_preemptions == 0


def test_blocks_of_rejected_drafts_are_given_back() -> None:
    engine = Engine(small_limits(num_speculative_tokens=8, enable_prefix_caching=False))
    engine.add(generate("a", [1, 2, 3, 4, 1, 2, 3, 4], max_tokens=30, num_speculative_tokens=16))
    while engine.step() is not None:
        num_tokens = 8 + len(engine.tokens("a"))
        assert engine.scheduler.snapshot()["num_referenced_blocks"] <= engine.limits.num_blocks_for(num_tokens)
    assert engine.scheduler.counters.num_draft_tokens > engine.scheduler.counters.num_accepted_tokens
