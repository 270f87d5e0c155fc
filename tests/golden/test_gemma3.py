"""Gemma 3 through the real kernels in the f32 mode, against the twin: a tiny random one, with its windows and ropes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pagedserve.models.open import open_checkpoint
from tests.engine import Engine
from tests.gguf_models import write_tiny_gemma3
from tests.twin_model import TwinModel

PROMPT = [int(i) for i in np.random.default_rng(5).integers(0, 96, 40)]


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q5_0"])
def test_f32_mode_agrees_with_the_twin(tmp_path: Path, kind: str) -> None:
    checkpoint = open_checkpoint(write_tiny_gemma3(tmp_path / "model.gguf", lambda name: kind))
    engine, twin = Engine(checkpoint, compute="f32", num_blocks=16), TwinModel(checkpoint)
    [answer] = engine.generate([PROMPT], max_tokens=8)[0]
    logits = twin.logits(PROMPT + answer.token_ids[:-1])
    assert logits.argmax(axis=-1)[-8:].tolist() == answer.token_ids
    np.testing.assert_allclose(engine.logits()[0, :96], logits[-1], atol=2e-5)
