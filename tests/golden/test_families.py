"""Every family through the real kernels in the f32 mode, against Hugging Face's own figures."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine import Engine
from tests.golden_data import TINY_MODELS, golden_cases, golden_checkpoint


@pytest.fixture(scope="module", params=TINY_MODELS)
def family(request: pytest.FixtureRequest) -> tuple[str, Engine]:
    return request.param, Engine(golden_checkpoint(request.param), compute="f32", num_blocks=64)


def test_f32_logits_are_those_of_transformers(family: tuple[str, Engine]) -> None:
    folder, engine = family
    for case in golden_cases(folder):
        engine.generate([case["input_ids"]], max_tokens=1)
        # Five decimals in the file; sums of up to 160 float32 products in another order than torch's.
        np.testing.assert_allclose(engine.logits()[0, :64], case["last_logits"], atol=3e-5, rtol=0)


def test_f32_greedy_tokens_are_those_of_transformers(family: tuple[str, Engine]) -> None:
    folder, engine = family
    cases = golden_cases(folder)
    answers = engine.generate([case["input_ids"] for case in cases], max_tokens=24)
    assert [answer[0].token_ids for answer in answers] == [case["greedy"] for case in cases]


def test_f32_prompt_logprobs_rank_the_same_token_first_at_each_position(family: tuple[str, Engine]) -> None:
    folder, engine = family
    for case in golden_cases(folder):
        [answer] = engine.generate([case["input_ids"]], max_tokens=1, prompt_logprobs=1)[0]
        assert answer.prompt_logprobs is not None
        best = [int.from_bytes(entry.top_token_ids, "little") for entry in answer.prompt_logprobs[1:]]
        known = case["argmax_each"][: len(case["input_ids"]) - 1]
        first = len(case["input_ids"]) - len(case["argmax_each"])
        assert best[first:] == case["argmax_each"][:-1] if first >= 0 else best == known
