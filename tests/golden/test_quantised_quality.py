"""What int8 activations cost in quality: the shipped mode against the f32 mode, teacher-forced over English prose.

The text, english.txt, was written for this test.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pagedserve.contract.messages import unpack_ids
from pagedserve.text.load import load_text
from tests.engine import Engine

TEXT = Path(__file__).parent / "english.txt"


def _score(engine: Engine, token_ids: list[int]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
    """For each token but the first: the id that the model thought most likely there, and the token's own logprob."""
    [[answer]] = engine.generate([token_ids], max_tokens=0, prompt_logprobs=1)
    assert answer.prompt_logprobs is not None
    scored = [entry for entry in answer.prompt_logprobs if entry is not None]
    most_likely = np.concatenate([unpack_ids(entry.top_token_ids) for entry in scored])
    return most_likely, np.array([entry.logprob for entry in scored])


@pytest.mark.timeout(600)
def test_int8_activations_keep_the_most_likely_token_and_the_perplexity(smollm2: Path) -> None:
    token_ids = load_text(smollm2).tokenizer.encode(TEXT.read_text())
    assert len(token_ids) > 1000
    options = {"num_blocks": len(token_ids) // 16 + 2, "max_num_batched_tokens": 256}
    exact_ids, exact = _score(Engine(smollm2, compute="f32", **options), token_ids)
    quantised_ids, quantised = _score(Engine(smollm2, **options), token_ids)
    agreement = (exact_ids == quantised_ids).mean()
    perplexity_ratio = np.exp(exact.mean() - quantised.mean())
    assert agreement >= 0.97
    assert perplexity_ratio == pytest.approx(1.0, abs=0.01)
