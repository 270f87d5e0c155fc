"""The promise of exactness: a request's token ids and the bits of its logprobs, whatever else happens around it.

Each test compares with the request alone on a fresh engine. Two requests are greedy, two draw with a seed.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pagedserve.contract.sampling import SamplingParams, sampling_params
from tests.engine import Answer, Engine
from tests.golden_data import GOLDEN

MODELS = ("demo", "gpt2-tiny", "mistral-tiny", "smollm2")
OUTPUT = 24

WITHOUT_LOGPROBS = [  # a request with them has one round a step
    sampling_params({"max_tokens": 40, "ignore_eos": True, "seed": 1, **options})
    for options in (
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1, "presence_penalty": 0.3},
        {"temperature": 1.0, "top_k": 20, "frequency_penalty": 0.7, "logit_bias": {3: 2.0, 5: -100.0}},
        {"temperature": 0.0, "repetition_penalty": 1.3},
    )
]

Bits = list[tuple[list[int], list[Any]]]


def params(index: int, max_tokens: int = OUTPUT) -> SamplingParams:
    drawn = {"temperature": 0.9, "top_p": 0.95, "seed": index, "repetition_penalty": 1.1, "presence_penalty": 0.3}
    greedy = {"temperature": 0.0}
    return sampling_params(
        {"max_tokens": max_tokens, "ignore_eos": True, "logprobs": 3, **(drawn if index % 2 else greedy)}
    )


def bits(answers: list[list[Answer]]) -> Bits:
    return [(answer.token_ids, answer.logprobs) for [answer] in answers]


class Case:
    """One model, four requests of 5 to 150 tokens, and what they answer when each is alone."""

    def __init__(self, path: Path | str) -> None:
        self.path = path
        engine = self.engine()
        rng = random.Random(7)
        lengths = (5, 33, 80, 150)
        self.prompts = [[rng.randrange(engine.spec.vocab_size) for _ in range(length)] for length in lengths]
        self.params = [params(index) for index in range(len(lengths))]
        self.alone = [
            bits(self.engine().generate([prompt], [p]))[0] for prompt, p in zip(self.prompts, self.params, strict=True)
        ]

    def engine(self, **options: Any) -> Engine:
        return Engine(self.path, **{"num_blocks": 128, **options})

    def together(self, engine: Engine) -> Bits:
        return bits(engine.generate(self.prompts, self.params))


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> Case:
    if request.param == "smollm2":
        return Case(request.getfixturevalue("smollm2"))
    return Case(GOLDEN / request.param if request.param.endswith("-tiny") else request.param)


def test_a_request_in_a_batch_of_32_answers_as_alone(case: Case) -> None:
    engine = case.engine(num_blocks=512)
    rng = random.Random(1)
    others = [[rng.randrange(engine.spec.vocab_size) for _ in range(rng.randrange(1, 100))] for _ in range(28)]
    unseeded = sampling_params({"temperature": 1.3, "max_tokens": 30, "ignore_eos": True})
    answers = engine.generate(case.prompts + others, case.params + [unseeded] * 28)
    assert bits(answers[:4]) == case.alone


@pytest.mark.parametrize("chunk", [16, 64, 512])
def test_the_chunks_of_a_prefill_do_not_show(case: Case, chunk: int) -> None:
    assert case.together(case.engine(max_num_batched_tokens=chunk, max_num_seqs=8)) == case.alone


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_the_size_of_a_block_does_not_show(case: Case, block_size: int) -> None:
    assert case.together(case.engine(block_size=block_size)) == case.alone


def test_a_warm_prefix_cache_does_not_show(case: Case) -> None:
    engine = case.engine()
    cold = engine.generate(case.prompts, case.params)
    warm = engine.generate(case.prompts, case.params)
    assert [answer.num_cached_tokens for [answer] in warm] == [0, 32, 64, 144]
    assert bits(cold) == bits(warm) == case.alone


def test_the_prefix_cache_switched_off_does_not_show(case: Case) -> None:
    engine = case.engine(enable_prefix_caching=False)
    case.together(engine)
    assert case.together(engine) == case.alone


def test_16_requests_on_a_pool_for_4_are_preempted_and_all_end_as_they_would_alone(case: Case) -> None:
    rng = random.Random(3)
    size = case.engine().spec.vocab_size
    prompts = [[rng.randrange(size) for _ in range(8)] for _ in range(16)]
    settings = [params(index, max_tokens=64) for index in range(16)]
    engine = case.engine(num_blocks=4 * 5)
    assert bits(engine.generate(prompts, settings)) == bits(case.engine(num_blocks=512).generate(prompts, settings))
    assert engine.scheduler.counters.num_preemptions > 0


def test_logits_of_every_prompt_token_do_not_show(case: Case) -> None:
    """Without them, the last layer is computed for the last token of a prompt only."""
    asking = [msgspec.structs.replace(p, prompt_logprobs=1).validate() for p in case.params]
    answers = case.engine().generate(case.prompts, asking)
    assert all(len(answer.prompt_logprobs or ()) == len(p) for [answer], p in zip(answers, case.prompts, strict=True))
    assert bits(answers) == case.alone


def test_speculation_does_not_show(case: Case) -> None:
    assert case.together(case.engine(num_speculative_tokens=4)) == case.alone


def test_steps_planned_before_the_result_of_the_one_before_do_not_show(case: Case) -> None:
    engine, one_by_one = case.engine(), case.engine(run_ahead=False)
    assert case.together(engine) == case.together(one_by_one) == case.alone
    assert engine.num_steps_ahead > 10 and one_by_one.num_steps_ahead == 0


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("max_rounds", [2, 4])
def test_several_rounds_in_a_step_do_not_show(case: Case, max_rounds: int, run_ahead: bool) -> None:
    one_by_one = case.engine(max_rounds=1)
    expected = bits(one_by_one.generate(case.prompts, WITHOUT_LOGPROBS))
    engine = case.engine(max_rounds=max_rounds, run_ahead=run_ahead)
    assert bits(engine.generate(case.prompts, WITHOUT_LOGPROBS)) == expected
    assert one_by_one.num_later_rounds == 0 and engine.num_later_rounds >= 15


@pytest.mark.parametrize("run_ahead", [False, True])
def test_the_rounds_after_a_stop_token_do_not_show(case: Case, run_ahead: bool) -> None:
    going_on = bits(case.engine(max_rounds=1).generate(case.prompts, WITHOUT_LOGPROBS))
    stopping = [
        msgspec.structs.replace(each, stop_token_ids=(tokens[place],), min_tokens=min_tokens)
        for each, (tokens, _), place, min_tokens in zip(
            WITHOUT_LOGPROBS, going_on, (9, 10, 11, 12), (0, 0, 7, 30), strict=True
        )
    ]
    expected = bits(case.engine(max_rounds=1).generate(case.prompts, stopping))
    assert [len(tokens) <= 12 for tokens, _ in expected[:2]] == [True, True]
    assert bits(case.engine(run_ahead=run_ahead).generate(case.prompts, stopping)) == expected


def test_forks_of_a_prompt_answer_as_requests_of_their_own(case: Case) -> None:
    engine = case.engine()
    prompt = case.prompts[2]
    one = sampling_params({"temperature": 1.0, "seed": 5, "max_tokens": OUTPUT, "ignore_eos": True, "logprobs": 3})
    [answers] = engine.generate([prompt], [msgspec.structs.replace(one, n=4)])
    again = case.engine(enable_prefix_caching=False, max_num_batched_tokens=16, max_num_seqs=4)
    [repeated] = again.generate([prompt], [msgspec.structs.replace(one, n=4)])
    [[alone]] = case.engine().generate([prompt], [one])
    assert [(a.token_ids, a.logprobs) for a in answers] == [(a.token_ids, a.logprobs) for a in repeated]
    assert (answers[0].token_ids, answers[0].logprobs) == (alone.token_ids, alone.logprobs)
    assert len({tuple(answer.token_ids) for answer in answers}) == 4


def test_a_plan_that_is_run_twice_writes_the_same_bytes_and_results(case: Case) -> None:
    engine = case.engine()
    scheduler = engine.scheduler
    for index, prompt in enumerate(case.prompts):
        engine.add(f"r{index}", prompt, case.params[index])
    for _ in range(12):
        while scheduler.plan(0.0) is not None and len(scheduler.in_flight) < 2:
            pass
        result, pool = engine.compute(scheduler.in_flight[0]), engine.pool_bytes()
        assert engine.compute(scheduler.in_flight[0]) == result
        assert engine.pool_bytes() == pool
        scheduler.apply(result)
