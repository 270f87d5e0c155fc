"""The twin against Hugging Face's own figures, for every family: logits, argmax at each position, greedy tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagedserve.models.open import open_checkpoint
from tests.golden_data import GOLDEN, TINY_MODELS, golden_cases, golden_checkpoint
from tests.twin_model import TwinModel


@pytest.mark.parametrize("folder", TINY_MODELS)
def test_twin_gives_the_logits_of_transformers(folder: str) -> None:
    twin = TwinModel(golden_checkpoint(folder))
    for case in golden_cases(folder):
        logits = twin.logits(case["input_ids"])
        # The file has five decimals, from float32 arithmetic.
        np.testing.assert_allclose(logits[-1, :64], case["last_logits"], atol=1e-5, rtol=0)
        assert logits.argmax(axis=-1)[-len(case["argmax_each"]) :].tolist() == case["argmax_each"]


def assert_greedy(twin: TwinModel, case: dict[str, Any]) -> None:
    """One pass over prompt and answer: each token of the answer must be the argmax before it."""
    logits = twin.logits(case["input_ids"] + case["greedy"][:-1])
    assert logits.argmax(axis=-1)[-len(case["greedy"]) :].tolist() == case["greedy"]


@pytest.mark.parametrize("folder", TINY_MODELS)
def test_twin_continues_greedily_as_transformers_does(folder: str) -> None:
    twin = TwinModel(golden_checkpoint(folder), np.float32)
    for case in golden_cases(folder):
        assert_greedy(twin, case)


@pytest.mark.parametrize("folder", TINY_MODELS)
def test_exact_rotary_frequencies_give_the_same_greedy_tokens(folder: str) -> None:
    twin = TwinModel(open_checkpoint(GOLDEN / folder), np.float32)
    for case in golden_cases(folder):
        assert_greedy(twin, case)
