"""The demo model: tiny, random, made in memory from a fixed seed; for tests and first looks. Needs no file.

Its text is bytes: token i < 256 is byte i, then come the control tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagedserve.contract.errors import ModelError
from pagedserve.models import rope
from pagedserve.models.family import LLAMA_NAMES, Family, expected_tensors
from pagedserve.models.spec import GenerationDefaults, LayerSpec, ModelSpec, RawTensor, RopeSpec, TensorType

DEMO = "demo"  # the path string that means this model, everywhere
CONTROL_TOKENS = {"<|im_start|>": 256, "<|im_end|>": 257, "<|endoftext|>": 258}

_SEED = 20250
_NUM_LAYERS = 4
_HEAD_DIM = 16

SPEC = ModelSpec(
    name=DEMO,
    architecture="llama",
    num_layers=_NUM_LAYERS,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=_HEAD_DIM,
    vocab_size=256 + len(CONTROL_TOKENS),
    embedding_rows=264,
    max_model_len=4096,
    ropes=(RopeSpec(rope.frequencies(10000.0, _HEAD_DIM), "halves"),),
    layers=(LayerSpec(),) * _NUM_LAYERS,
    tied=False,  # a tied random head would only repeat the last token
)

GENERATION = GenerationDefaults(eos_token_ids=(CONTROL_TOKENS["<|im_end|>"],))


class DemoCheckpoint:
    """The demo model's weights (see spec.Checkpoint): float32, the same bits in every process."""

    def __init__(self) -> None:
        self.spec = SPEC
        self.generation = GENERATION
        random = np.random.Generator(np.random.PCG64(_SEED))
        self._weights: dict[str, npt.NDArray[np.float32]] = {}
        for name, expected in expected_tensors(Family("llama"), SPEC, LLAMA_NAMES).items():
            if len(expected.shape) == 1:
                self._weights[name] = np.ones(expected.shape, np.float32)
            else:  # unit variance in, unit variance out: logits spread enough for greedy decoding not to tie
                scale = expected.shape[1] ** -0.5 if name != "embed" else 1.0
                self._weights[name] = (scale * random.standard_normal(expected.shape)).astype(np.float32)

        self.num_parameters = sum(weights.size for weights in self._weights.values())
        self.weights_bytes = sum(weights.nbytes for weights in self._weights.values())

    def names(self) -> frozenset[str]:
        """The canonical names present."""
        return frozenset(self._weights)

    def tensor(self, name: str) -> RawTensor:
        """One tensor by canonical name."""
        if name not in self._weights:
            raise ModelError(f"{DEMO}: this model has no tensor {name}")
        weights = self._weights[name]
        return RawTensor(name, weights.shape, TensorType.F32, weights.reshape(-1).view(np.uint8))
