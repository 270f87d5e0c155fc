"""Sampling: the rows of a plan, what ends an output, and the logprobs that come back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagedserve.contract.messages import SAMPLE_ROW, StepPlan, TokenLogprobs, unpack_ids
from tests.builders import Engine, FakeModel, alone, continuation, generate, next_logprobs, prompt_of, small_limits


def rows_of(plan: StepPlan | None) -> Any:
    assert plan is not None
    return np.frombuffer(plan.rows, dtype=SAMPLE_ROW)


def test_a_row_has_the_parameters_of_its_request() -> None:
    engine = Engine()
    sampling: dict[str, Any] = {"temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.25, "seed": 2**64 - 1}
    engine.add(generate("a", prompt_of(9), logprobs=3, **sampling))
    row = rows_of(engine.step())[0]
    assert {name: row[name] for name in sampling} == sampling
    assert (row["token_index"], row["target"], row["num_logprobs"], row["position"]) == (8, -1, 3, 9)
    assert (row["history_start"], row["history_end"], row["bias_start"], row["bias_end"]) == (0, 0, 0, 0)
    assert rows_of(engine.step())["position"].tolist() == [10]


def test_a_negative_seed_is_its_64_bits_and_none_is_made_from_the_name() -> None:
    engine = Engine()
    engine.add(generate("a", [1], seed=-1))
    engine.add(generate("b", [1]))
    engine.add(generate("c", [1]))
    seeds = rows_of(engine.step())["seed"].tolist()
    assert seeds[0] == 2**64 - 1
    assert len(set(seeds)) == 3


@pytest.mark.parametrize(
    ("sampling", "history", "history_prompt"),
    [
        ({"repetition_penalty": 1.5}, "all", 6),
        ({"presence_penalty": 1.0}, "output", 0),
        ({"frequency_penalty": 1.0}, "output", 0),
        ({"repetition_penalty": 1.5, "frequency_penalty": 1.0}, "all", 6),
    ],
)
def test_penalties_see_what_they_are_about(sampling: dict[str, Any], history: str, history_prompt: int) -> None:
    engine = Engine()
    engine.add(generate("other", prompt_of(3), repetition_penalty=2.0))
    engine.add(generate("a", prompt_of(6, 1), **sampling))
    engine.step()
    engine.step()
    output = engine.tokens("a")
    plan = engine.step()
    row = rows_of(plan)[1]
    seen = unpack_ids(plan.history)[row["history_start"] : row["history_end"]].tolist() if plan else []
    assert seen == (prompt_of(6, 1) if history == "all" else []) + output
    assert row["history_prompt"] == history_prompt


def test_logit_bias_and_the_ban_before_min_tokens_are_columns_of_their_own() -> None:
    engine = Engine(small_limits(eos_token_ids=(7, 8)))
    engine.add(generate("a", prompt_of(6), logit_bias={3: 2.5, 4: -1.0}, min_tokens=1, stop_token_ids=(9,)))
    plan = engine.step()
    assert plan is not None
    assert unpack_ids(plan.bias_token_ids).tolist() == [3, 4, 7, 8, 9]
    assert np.frombuffer(plan.bias_values, "<f4").tolist() == [2.5, -1.0, -np.inf, -np.inf, -np.inf]
    plan = engine.step()
    assert plan is not None
    assert unpack_ids(plan.bias_token_ids).tolist() == [3, 4]


def eos_at(position: int) -> tuple[int, list[int]]:
    """A token id that greedy decoding of prompt_of(10) gives first at output `position`, and the free output."""
    output = alone(generate("a", prompt_of(10), max_tokens=20), small_limits())
    assert output[position] not in output[:position]
    return output[position], output


def test_an_end_of_sequence_token_ends_the_output_and_is_kept_in_it() -> None:
    eos, free = eos_at(4)
    engine = Engine(small_limits(eos_token_ids=(eos,)))
    engine.run(generate("a", prompt_of(10), max_tokens=20))
    assert engine.tokens("a") == free[:5]
    last = engine.last("a")
    assert (last.finish_reason, last.stop_token_id, last.finished) == ("stop", eos, True)


def test_ignore_eos_goes_on_to_max_tokens() -> None:
    eos, free = eos_at(4)
    engine = Engine(small_limits(eos_token_ids=(eos,)))
    engine.run(generate("a", prompt_of(10), max_tokens=20, ignore_eos=True))
    assert engine.tokens("a") == free
    assert (engine.last("a").finish_reason, engine.last("a").stop_token_id) == ("length", None)


def test_stop_token_ids_end_the_output_even_with_ignore_eos() -> None:
    eos, free = eos_at(4)
    engine = Engine()
    engine.run(generate("a", prompt_of(10), max_tokens=20, ignore_eos=True, stop_token_ids=(eos,)))
    assert engine.tokens("a") == free[:5]


def test_before_min_tokens_no_stop_token_is_sampled() -> None:
    eos, free = eos_at(4)
    engine = Engine(small_limits(eos_token_ids=(eos,)))
    message = generate("a", prompt_of(10), max_tokens=20, min_tokens=8)
    engine.run(message)
    tokens = engine.tokens("a")
    assert eos not in tokens[:8] and len(tokens) >= 8 and tokens[:4] == free[:4]
    assert tokens == continuation(prompt_of(10), 10, message.sampling, 0, engine.limits, FakeModel())


def test_without_max_tokens_the_output_ends_where_the_context_is_full() -> None:
    engine = Engine(small_limits(max_model_len=30))
    engine.run(generate("a", prompt_of(10), max_tokens=None))
    assert len(engine.tokens("a")) == 20
    assert engine.last("a").finish_reason == "length"


def test_without_max_tokens_the_output_ends_where_a_small_pool_is_full() -> None:
    engine = Engine(small_limits(num_blocks=5))
    engine.run(generate("a", prompt_of(10), max_tokens=None))
    assert len(engine.tokens("a")) == 11  # 20 tokens stored; the last one needs no place
    assert engine.last("a").finish_reason == "length"


def test_max_tokens_zero_only_scores_the_prompt() -> None:
    engine = Engine(small_limits(max_num_batched_tokens=8))
    engine.run(generate("a", prompt_of(20), max_tokens=0, prompt_logprobs=2), generate("b", [1], max_tokens=0, n=2))
    (record,) = engine.records["a"]
    assert (record.token_ids, record.finish_reason, record.finished) == (b"", "length", True)
    assert len(record.prompt_logprobs or ()) == 20
    assert [(record.index, record.finished) for record in engine.records["b"]] == [(0, False), (1, True)]
    assert engine.scheduler.snapshot()["num_finished"] == {"length": 3}


def expected_logprobs(known: list[int], token_id: int, top: int) -> TokenLogprobs:
    logprobs = next_logprobs(known, FakeModel())
    best = np.argsort(-logprobs, kind="stable")[:top]
    return TokenLogprobs(
        logprob=float(logprobs[token_id]),
        rank=1 + int((logprobs > logprobs[token_id]).sum()),
        top_token_ids=best.astype("<i4").tobytes(),
        top_logprobs=logprobs[best].astype("<f4").tobytes(),
    )


def test_logprobs_are_those_of_a_full_pass_and_come_with_their_tokens() -> None:
    engine = Engine()
    engine.run(
        generate("none", prompt_of(10, 1)),
        generate("a", prompt_of(10), logprobs=2, temperature=1.0, seed=4, repetition_penalty=1.3),
        generate("chosen", prompt_of(10, 2), logprobs=0),
    )
    known = prompt_of(10)
    total = 0.0
    for record in engine.records["a"]:
        (token_id,) = unpack_ids(record.token_ids).tolist()
        assert record.logprobs == (expected_logprobs(known, token_id, 2),)
        total += record.logprobs[0].logprob
        known.append(token_id)
    assert engine.last("a").cumulative_logprob == total
    assert [record.cumulative_logprob for record in engine.records["a"][:-1]] == [None] * 7
    assert engine.records["none"][0].logprobs == ()
    assert engine.last("none").cumulative_logprob is None
    assert engine.records["chosen"][0].logprobs[0].top_token_ids == b""


@pytest.mark.parametrize("budget", [8, 32])
def test_prompt_logprobs_are_complete_although_the_prompt_is_cached(budget: int) -> None:
    engine = Engine(small_limits(max_num_batched_tokens=budget))
    prompt = prompt_of(18)
    engine.run(generate("before", prompt))
    engine.run(generate("a", prompt, prompt_logprobs=1))
    first = engine.records["a"][0]
    assert first.num_cached_tokens == 0
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    for position in range(1, 18):
        assert first.prompt_logprobs[position] == expected_logprobs(prompt[:position], prompt[position], 1)
    assert engine.records["a"][1].prompt_logprobs is None
    assert engine.tokens("a") == engine.tokens("before")
