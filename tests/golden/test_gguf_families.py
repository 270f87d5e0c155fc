"""Each family from GGUF too: the golden models, rewritten with its names and rotary pairing, give the same figures."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from pagedserve.models.open import open_checkpoint
from tests.gguf_models import gguf_settings, gguf_weights, write_gguf
from tests.golden_data import TINY_MODELS, golden_cases, golden_checkpoint
from tests.twin_model import TwinModel

PAIRINGS = {"llama-tiny": "adjacent", "mistral-tiny": "adjacent", "qwen2-tiny": "halves", "qwen3-tiny": "halves"}


@pytest.mark.parametrize("folder", TINY_MODELS)
def test_the_same_model_in_gguf_gives_the_logits_of_transformers(folder: str, tmp_path: Path) -> None:
    original = golden_checkpoint(folder)
    path = write_gguf(tmp_path / "model.gguf", gguf_settings(original), gguf_weights(original))
    checkpoint = open_checkpoint(path)
    if folder in PAIRINGS:
        assert checkpoint.spec.ropes[0].pairing == PAIRINGS[folder]
        assert original.spec.ropes[0].pairing == "halves"
    if folder.startswith("qwen"):  # GGUF has no place for the rounded frequencies of these two
        ropes = (dataclasses.replace(checkpoint.spec.ropes[0], inv_freq=original.spec.ropes[0].inv_freq),)
        checkpoint.spec = dataclasses.replace(checkpoint.spec, ropes=ropes)
    twin = TwinModel(checkpoint)
    for case in golden_cases(folder):
        np.testing.assert_allclose(twin.logits(case["input_ids"])[-1, :64], case["last_logits"], atol=1e-5, rtol=0)
