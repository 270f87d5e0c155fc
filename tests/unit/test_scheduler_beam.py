"""Beam search: the same outputs as a naive twin that keeps lists of tokens, on any pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pagedserve.contract.messages import unpack_ids
from tests.builders import Engine, FakeModel, generate, next_logprobs, prompt_of, small_limits

EOS = (3, 17)


@dataclass(frozen=True)
class Output:
    """A finished output of the twin."""

    score: float
    tokens: list[int]
    cumulative: float
    reason: str


def twin(
    prompt: list[int], width: int, max_tokens: int, length_penalty: float, early_stopping: bool, min_tokens: int = 0
) -> list[Output]:
    """Beam search as transformers' BeamSearchScorer does it, on plain lists."""
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[Output] = []

    def finish(cumulative: float, tokens: list[int], reason: str) -> None:
        done.append(Output(cumulative / len(tokens) ** length_penalty, tokens, cumulative, reason))
        done.sort(key=lambda output: -output.score)
        del done[width:]

    for length in range(1, max_tokens + 1):
        candidates = []
        for place, (cumulative, tokens) in enumerate(beams):
            logprobs = next_logprobs(prompt + tokens, FakeModel())
            for rank, token_id in enumerate(np.argsort(-logprobs, kind="stable")[: 2 * width].tolist()):
                if not (token_id in EOS and length <= min_tokens):
                    candidates.append((cumulative + float(logprobs[token_id]), place, rank, [*tokens, token_id]))
        candidates.sort(key=lambda c: (-c[0], c[1], c[2]))
        beams = []
        for place, (cumulative, _, _, tokens) in enumerate(candidates[: 2 * width]):
            if tokens[-1] in EOS:
                if place < width:
                    finish(cumulative, tokens, "stop")
            elif len(beams) < width:
                beams.append((cumulative, tokens))
        if len(done) == width and (early_stopping or done[-1].score >= beams[0][0] / length**length_penalty):
            return done
    for cumulative, tokens in beams:
        finish(cumulative, tokens, "length")
    return done


@pytest.mark.parametrize("num_blocks", [64, 12])
@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("width", [2, 4])
def test_beam_search_equals_its_twin(width: int, length_penalty: float, early_stopping: bool, num_blocks: int) -> None:
    engine = Engine(small_limits(eos_token_ids=EOS, num_blocks=num_blocks))
    prompt = prompt_of(11, width)
    sampling: dict[str, Any] = {"length_penalty": length_penalty, "early_stopping": early_stopping, "max_tokens": 12}
    engine.run(generate("a", prompt, beam_width=width, n=width, **sampling))
    expected = twin(prompt, width, 12, length_penalty, early_stopping)
    records = engine.records["a"]
    assert [unpack_ids(record.token_ids).tolist() for record in records] == [output.tokens for output in expected]
    assert [record.cumulative_logprob for record in records] == [output.cumulative for output in expected]
    assert [record.finish_reason for record in records] == [output.reason for output in expected]
    assert [record.finished for record in records] == [False] * (width - 1) + [True]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
def test_short_searches_equal_their_twins(max_tokens: int) -> None:
    """Among these are searches that are over in the very step that fills max_tokens."""
    engine = Engine(small_limits(eos_token_ids=EOS))
    for seed in range(20):
        prompt = prompt_of(7, seed)
        message = generate(str(seed), prompt, beam_width=2, n=2, max_tokens=max_tokens, early_stopping=True)
        engine.run(message)
        expected = twin(prompt, 2, max_tokens, 1.0, True)
        assert [engine.tokens(str(seed), index) for index in range(2)] == [output.tokens for output in expected]


def test_the_searches_of_these_tests_end_in_every_way() -> None:
    reasons = {
        output.reason
        for width in (2, 4)
        for penalty in (0.0, 1.0, 2.0)
        for output in twin(prompt_of(11, width), width, 12, penalty, False)
    }
    assert reasons == {"stop", "length"}


def test_no_beam_ends_before_min_tokens() -> None:
    engine = Engine(small_limits(eos_token_ids=EOS))
    prompt = prompt_of(11, 2)
    engine.run(generate("a", prompt, beam_width=2, n=2, max_tokens=12, min_tokens=6))
    expected = twin(prompt, 2, 12, 1.0, False, min_tokens=6)
    assert [engine.tokens("a", index) for index in range(2)] == [output.tokens for output in expected]


def test_logprobs_of_beams_are_those_asked_for() -> None:
    engine = Engine()
    engine.run(generate("a", prompt_of(9), beam_width=3, logprobs=2, max_tokens=5))
    (record,) = engine.records["a"]
    known = prompt_of(9)
    for token_id, entry in zip(unpack_ids(record.token_ids).tolist(), record.logprobs, strict=True):
        logprobs = next_logprobs(known, FakeModel())
        assert entry.logprob == logprobs[token_id]
        assert entry.rank == 1 + int((logprobs > logprobs[token_id]).sum())
        assert len(entry.top_token_ids) == 8
        known.append(token_id)


def test_beams_share_the_prompt_and_every_later_full_block_of_a_common_line() -> None:
    engine = Engine(small_limits(block_size=4, enable_prefix_caching=False))
    engine.add(generate("a", prompt_of(20), beam_width=4, max_tokens=3))
    engine.step()
    engine.step()
    assert engine.scheduler.snapshot()["num_referenced_blocks"] <= 5 + 4
    engine.run()
    assert engine.scheduler.snapshot()["num_free_blocks"] == 64


def test_beams_in_a_pool_too_small_for_all_of_them_take_turns() -> None:
    """Two searches whose beams cannot all be in the pool at once still end, with their twins' outputs."""
    limits = small_limits(eos_token_ids=EOS, num_blocks=7, enable_prefix_caching=False)
    engine = Engine(limits)
    engine.run(*(generate(str(i), prompt_of(9, i), beam_width=4, n=4, max_tokens=12) for i in range(2)))
    assert engine.scheduler.counters.num_preemptions > 0
    for i in range(2):
        expected = twin(prompt_of(9, i), 4, 12, 1.0, False)
        assert [engine.tokens(str(i), index) for index in range(4)] == [output.tokens for output in expected]
