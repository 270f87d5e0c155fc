"""The golden folders: tiny random models with Hugging Face's figures, opened as the figures' maker ran them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from pagedserve.models.open import open_checkpoint
from pagedserve.models.spec import Checkpoint, RopeSpec, TensorType

GOLDEN = Path(__file__).parent / "golden"
TINY_MODELS = ("gpt2-tiny", "llama-tiny", "mistral-tiny", "qwen2-tiny", "qwen3-tiny")


def golden_cases(folder: str) -> list[dict[str, Any]]:
    """The cases of a folder: input_ids, last_logits (first 64 of the last position), argmax_each, greedy."""
    cases: list[dict[str, Any]] = json.loads((GOLDEN / folder / "golden.json").read_text())["cases"]
    return cases


def golden_checkpoint(folder: str) -> Checkpoint:
    """The checkpoint of a folder, its rotary frequencies rounded to the type of its weights.

    transformers keeps the frequencies in float32; but whoever made these models cast them as a whole
    (`model.to(bfloat16)`), which rounds this buffer too. With exact frequencies the greedy tokens are the same, the
    logits differ by up to 0.03 at 100 tokens.
    """
    checkpoint = open_checkpoint(GOLDEN / folder)
    rounded = tuple(_rounded(rope, checkpoint.tensor("embed").type) for rope in checkpoint.spec.ropes)
    checkpoint.spec = dataclasses.replace(checkpoint.spec, ropes=rounded)
    return checkpoint


def _rounded(rope: RopeSpec, kind: TensorType) -> RopeSpec:
    exact = np.asarray(rope.inv_freq, np.float32)
    if kind is TensorType.BF16:  # to the nearest; no value here is a tie
        bits = (exact.view(np.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)
        exact = bits.view(np.float32)
    elif kind is TensorType.F16:
        exact = exact.astype(np.float16).astype(np.float32)
    return dataclasses.replace(rope, inv_freq=tuple(exact.tolist()))
