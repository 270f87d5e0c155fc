"""The slow obvious twin of the forward pass: NumPy, no KV cache, any ModelSpec. The oracle of every model test.

Written from the papers and from ModelSpec's field texts, sharing no code with workers/; float64 unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from pagedserve.models.spec import Checkpoint, RawTensor, RopeSpec, TensorType

Floats = npt.NDArray[Any]  # float32 or float64
FloatType = type[np.float32] | type[np.float64]


def dequantize(raw: RawTensor, dtype: FloatType = np.float64) -> Floats:
    """A stored tensor as floats, by the `gguf` package."""
    if raw.type is TensorType.F32:
        values = raw.data.view(np.float32)
    elif raw.type is TensorType.F16:
        values = raw.data.view(np.float16)
    else:
        row_bytes = raw.type.num_bytes(raw.shape[-1])
        values = gguf.quants.dequantize(raw.data.reshape(-1, row_bytes), gguf.GGMLQuantizationType[raw.type.name])
    return values.reshape(raw.shape).astype(dtype)


class TwinModel:
    """A whole model dequantised into memory."""

    def __init__(self, checkpoint: Checkpoint, dtype: FloatType = np.float64) -> None:
        self.spec = checkpoint.spec
        self.dtype = dtype
        self._weights = {name: dequantize(checkpoint.tensor(name), dtype) for name in checkpoint.names()}

    def logits(self, token_ids: Sequence[int]) -> Floats:
        """Logits of every position, [num_tokens, vocab_size]; ids beyond the vocabulary (padded rows) are cut off."""
        spec = self.spec
        positions = np.arange(len(token_ids))
        x = self._weights["embed"][np.asarray(token_ids)] * self.dtype(spec.embedding_scale)
        if spec.position == "learned":
            x = x + self._weights["position_embed"][positions]
        for layer in range(spec.num_layers):
            prefix = f"layers.{layer}."
            attended = self._attention(layer, self._norm(x, prefix + "attn_norm"), positions)
            x = x + (self._norm(attended, prefix + "attn_post_norm") if spec.post_norms else attended)
            fed = self._feed_forward(prefix, self._norm(x, prefix + "ffn_norm"))
            x = x + (self._norm(fed, prefix + "ffn_post_norm") if spec.post_norms else fed)
        head = self._weights["embed" if spec.tied else "head"]
        return (self._norm(x, "final_norm") @ head.T)[:, : spec.vocab_size]

    def greedy(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """The continuation by the largest logit, the lowest id among equals."""
        ids = list(token_ids)
        for _ in range(num_tokens):
            ids.append(int(np.argmax(self.logits(ids)[-1])))
        return ids[len(token_ids) :]

    def _linear(self, x: Floats, name: str) -> Floats:
        y = x @ self._weights[name].T
        return y + self._weights[name + ".bias"] if name + ".bias" in self._weights else y

    def _norm(self, x: Floats, name: str) -> Floats:
        if self.spec.norm == "layer":
            x = x - x.mean(axis=-1, keepdims=True)
        y = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.dtype(self.spec.norm_eps))
        y = y * self._weights[name]
        return y + self._weights[name + ".bias"] if name + ".bias" in self._weights else y

    def _attention(self, layer: int, x: Floats, positions: npt.NDArray[np.int64]) -> Floats:
        spec, prefix = self.spec, f"layers.{layer}."
        q = self._linear(x, prefix + "q").reshape(len(x), spec.num_heads, spec.head_dim)
        k = self._linear(x, prefix + "k").reshape(len(x), spec.num_kv_heads, spec.head_dim)
        v = self._linear(x, prefix + "v").reshape(len(x), spec.num_kv_heads, spec.head_dim)
        if spec.qk_norm:
            q, k = self._norm(q, prefix + "q_norm"), self._norm(k, prefix + "k_norm")
        if spec.position == "rope":
            rope = spec.ropes[spec.layers[layer].rope]
            q, k = self._rotate(q, rope, positions), self._rotate(k, rope, positions)
        group = spec.num_heads // spec.num_kv_heads
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) * self.dtype(spec.scale)
        distance = positions[:, None] - positions[None, :]
        seen = distance >= 0
        if window := spec.layers[layer].sliding_window:
            seen &= distance < window
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1)
        return self._linear(attended, prefix + "o")

    def _rotate(self, x: Floats, rope: RopeSpec, positions: npt.NDArray[np.int64]) -> Floats:
        angles = positions[:, None] * np.asarray(rope.inv_freq)[None, :]
        cos = (np.cos(angles) * rope.attention_factor)[:, None, :].astype(self.dtype)
        sin = (np.sin(angles) * rope.attention_factor)[:, None, :].astype(self.dtype)
        turned = x.copy()
        half = len(rope.inv_freq)
        first, second = (
            (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
            if rope.pairing == "adjacent"
            else (slice(0, half), slice(half, 2 * half))
        )
        a, b = x[..., first], x[..., second]
        turned[..., first], turned[..., second] = a * cos - b * sin, b * cos + a * sin
        return turned

    def _feed_forward(self, prefix: str, x: Floats) -> Floats:
        up = self._linear(x, prefix + "up")
        if not self.spec.gated:
            return self._linear(self._activate(up), prefix + "down")
        return self._linear(self._activate(self._linear(x, prefix + "gate")) * up, prefix + "down")

    def _activate(self, x: Floats) -> Floats:
        if self.spec.activation == "silu":
            return x / (1 + np.exp(-x))
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
