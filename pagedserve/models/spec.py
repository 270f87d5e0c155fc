"""ModelSpec: a decoder-only transformer as numbers and choices, whatever file it came from.

A family (models/families/*.py) fills it in from a file's metadata; workers/forward.py builds the program from it. There
is one forward pass: everything that differs between families is a field here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt


class TensorType(Enum):
    """How a tensor's numbers are stored, with GGUF's own block formats: (block size in weights, bytes a block)."""

    F32 = (1, 4)
    F16 = (1, 2)
    BF16 = (1, 2, "bf16")
    Q4_0 = (32, 18)  # f16 d, 16 bytes: low nibbles are weights 0-15, high nibbles 16-31; w = d (q - 8)
    Q4_1 = (32, 20)  # f16 d, f16 m, 16 bytes of nibbles as above; w = d q + m
    Q8_0 = (32, 34)  # f16 d, 32 int8; w = d q
    # The rest of GGUF's formats that the `gguf` package can dequantise; requantised to Q8_0 when they are packed.
    Q5_0 = (32, 22)
    Q5_1 = (32, 24)
    Q2_K = (256, 84)
    Q3_K = (256, 110)
    Q4_K = (256, 144)
    Q5_K = (256, 176)
    Q6_K = (256, 210)
    IQ4_NL = (32, 18, "iq4_nl")
    IQ4_XS = (256, 136)

    @property
    def block_size(self) -> int:
        """Weights in a block; a row is a whole number of blocks."""
        return int(self.value[0])

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return int(self.value[1])

    def num_bytes(self, num_weights: int) -> int:
        """Bytes of `num_weights` weights, a multiple of block_size."""
        return num_weights // self.block_size * self.block_bytes


@dataclass(frozen=True)
class RopeSpec:
    """One rotary table. `inv_freq` [rope_dim / 2] float64 includes any scaling of frequencies.

    pairing "adjacent": dimension 2i turns with 2i+1 (GGUF `llama`); "halves": i turns with i + rope_dim/2 (Hugging
    Face, GGUF `qwen2`, `qwen3`, `gemma3`). `attention_factor` multiplies cos and sin.
    """

    inv_freq: tuple[float, ...]
    pairing: str
    attention_factor: float = 1.0


@dataclass(frozen=True)
class LayerSpec:
    """What may differ from layer to layer: sliding_window 0 attends to everything; `rope` indexes ModelSpec.ropes."""

    sliding_window: int = 0  # a query at p sees keys p - sliding_window + 1 .. p
    rope: int = 0


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a model. Names of canonical tensors are listed at `Checkpoint`."""

    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # ids that may be sampled; the embedding may have more (padded) rows
    embedding_rows: int
    max_model_len: int
    norm: str = "rms"  # rms, layer
    norm_eps: float = 1e-5
    activation: str = "silu"  # silu, gelu_tanh
    gated: bool = True  # down(act(gate(x)) * up(x)), else down(act(up(x)))
    position: str = "rope"  # rope, learned
    ropes: tuple[RopeSpec, ...] = ()
    layers: tuple[LayerSpec, ...] = ()
    qk_norm: bool = False  # RMS norm of each head of q and k before the rotation
    post_norms: bool = False  # norms of attention's and ffn's output before the residual add (Gemma)
    tied: bool = True  # the head is the embedding
    embedding_scale: float = 1.0
    attention_scale: float = 0.0  # 0: head_dim ** -0.5

    @property
    def scale(self) -> float:
        """The factor of q k before the softmax."""
        return self.attention_scale or self.head_dim**-0.5

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of K and V of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes


@dataclass(frozen=True)
class RawTensor:
    """A tensor as its file stores it. `data` is flat uint8, row-major over `shape`; a view of the mapped file, except
    where a family has to transpose."""

    name: str
    shape: tuple[int, ...]  # [n_out, n_in] for a linear layer, outputs first whatever the file's order
    type: TensorType
    data: npt.NDArray[np.uint8] = field(repr=False)


@dataclass(frozen=True)
class GenerationDefaults:
    """What the model's makers set for generation; a request overrides each. None: they say nothing."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class Checkpoint(Protocol):
    """An opened model file or folder.

    Canonical tensor names: `embed`, `position_embed` (learned), `final_norm`, `head` (untied); for each layer i
    `layers.i.` + `attn_norm`, `q`, `k`, `v`, `o`, `q_norm`, `k_norm`, `attn_post_norm`, `ffn_norm`, `gate`, `up`,
    `down`, `ffn_post_norm`. Linear layers are [n_out, n_in] (a family splits a fused QKV, and transposes Conv1D);
    a bias, where there is one, is the name + `.bias` (`layers.0.q.bias`, `final_norm.bias`).
    """

    spec: ModelSpec
    generation: GenerationDefaults
    num_parameters: int
    weights_bytes: int  # as the file stores them

    def names(self) -> frozenset[str]:
        """The canonical names present."""
        ...

    def tensor(self, name: str) -> RawTensor:
        """One tensor by canonical name; ModelError names the file and the tensor when it is missing or misshapen."""
        ...
