"""The real model: the f32 mode against the NumPy twin, raw and chat."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pagedserve.models.open import open_checkpoint
from pagedserve.text.load import load_text
from tests.engine import Engine
from tests.twin_model import TwinModel

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "The three laws of motion are:\n1.",
    "Roses are red, violets are blue,",
)
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the moon.",
    "What is 2 + 2?",
    "Name three colours.",
    "Why is the sky blue?",
)
LENGTH = 48


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Engine:
    return Engine(smollm2, compute="f32", num_blocks=256)


@pytest.fixture(scope="module")
def twin(smollm2: Path) -> TwinModel:
    return TwinModel(open_checkpoint(smollm2), np.float32)


def test_greedy_ids_of_the_f32_mode_are_those_of_the_twin(smollm2: Path, engine: Engine, twin: TwinModel) -> None:
    text = load_text(smollm2)
    prompts = [text.tokenizer.encode(prompt) for prompt in PROMPTS]
    prompts += [text.chat_prompt([{"role": "user", "content": question}]) for question in QUESTIONS]
    answers = engine.generate(prompts, max_tokens=LENGTH)
    for prompt, [answer] in zip(prompts, answers, strict=True):
        assert len(answer.token_ids) == LENGTH
        logits = twin.logits(prompt + answer.token_ids[:-1])[len(prompt) - 1 :]
        assert logits.argmax(axis=-1).tolist() == answer.token_ids


def test_the_capital_of_france_is_paris(smollm2: Path) -> None:
    text = load_text(smollm2)
    engine = Engine(smollm2, num_blocks=64)
    [answer] = engine.generate([text.tokenizer.encode("The capital of France is")], max_tokens=4)[0]
    assert text.tokenizer.decode(answer.token_ids).startswith(" Paris")
