"""Slow and obvious twins of the kernels, in NumPy. Tests hold every kernel to its twin; nothing else uses them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


# ---- linear layers, norms, activations, rope --------------------------------------------------------------------


def dequantize(data: Bytes, type_name: str, n_out: int, n_in: int) -> Floats:
    """The numbers of a GGUF tensor. float32 [n_out, n_in]."""
    if type_name == "F32":
        return data.view(np.float32).reshape(n_out, n_in)
    if type_name == "F16":
        return data.view(np.float16).astype(np.float32).reshape(n_out, n_in)
    if type_name == "BF16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(n_out, n_in)
    q, d, m = quants(data, type_name)
    return (q * d[:, None] + m[:, None]).reshape(n_out, n_in)


def quants(data: Bytes, type_name: str) -> tuple[npt.NDArray[np.int32], Floats, Floats]:
    """q [blocks, 32], d and m [blocks] of a quantised GGUF tensor, whose numbers are q * d + m; block by block."""
    block_bytes = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[type_name]
    num_blocks = len(data) // block_bytes
    q = np.empty((num_blocks, 32), dtype=np.int32)
    d, m = np.empty(num_blocks, dtype=np.float32), np.zeros(num_blocks, dtype=np.float32)
    for i, raw in enumerate(data.reshape(-1, block_bytes)):
        d[i] = raw[0:2].view(np.float16)[0]
        if type_name == "Q8_0":
            q[i] = raw[2:].view(np.int8)
            continue
        nibbles = raw[4 if type_name == "Q4_1" else 2 :]
        q[i] = np.concatenate([nibbles & 15, nibbles >> 4])
        if type_name == "Q4_1":
            m[i] = raw[2:4].view(np.float16)[0]
        else:
            q[i] -= 8
    return q, d, m


def quantize_rows(x: Floats) -> tuple[npt.NDArray[np.int8], Floats]:
    """int8 [rows, blocks, 2, 16] and scale [rows, blocks, 2] of activations [rows, n_in]."""
    halves = x.reshape(len(x), -1, 2, 16)
    of_half = np.abs(halves).max(axis=-1)
    of_block = of_half.max(axis=-1, keepdims=True)
    finer = sum((of_half <= of_block / np.float32(2**n)).astype(np.float32) for n in (1, 2, 3))
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(of_block >= 2.0**-100, np.float32(127) / of_block, np.float32(0))
    q = np.rint(halves * (inverse * 2**finer)[..., None]).astype(np.int8)
    return q, (of_block / np.float32(127) / 2**finer).astype(np.float32)


def linear(x: Floats, weights: Floats) -> npt.NDArray[np.float64]:
    """x [rows, n_in] times weights [n_out, n_in] in float64. [rows, n_out]."""
    return x.astype(np.float64) @ weights.astype(np.float64).T


def quantized_linear(x: Floats, data: Bytes, type_name: str, n_out: int) -> npt.NDArray[np.float64]:
    """x [rows, n_in] as int8 times a quantised GGUF tensor; sums of integers are exact, others in float64.

    In a block, the first half's sum is rounded to an integer in the second half's scale.
    """
    q, scale = quantize_rows(x)
    w, d, m = (v.reshape(n_out, q.shape[1], -1) for v in quants(data, type_name))
    dots = np.einsum("rbhi,obhi->robh", q.astype(np.int64), w.reshape(*w.shape[:2], 2, 16).astype(np.int64))
    ratio = np.divide(scale[..., 0], scale[..., 1], out=np.ones(scale.shape[:2], np.float32), where=scale[..., 1] > 0)
    dot = np.rint(dots[..., 0] * ratio[:, None]) + dots[..., 1]
    sums = (q.sum(axis=-1, dtype=np.float64) * scale).sum(axis=-1)
    terms = dot * d[..., 0] * scale[:, None, :, 1].astype(np.float64) + sums[:, None] * m[..., 0].astype(np.float64)
    return terms.sum(axis=-1)


def rms_norm(x: Floats, weight: Floats, eps: float) -> npt.NDArray[np.float64]:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float64."""
    x64 = x.astype(np.float64)
    return x64 / np.sqrt((x64**2).mean(axis=-1, keepdims=True) + eps) * weight


def layer_norm(x: Floats, weight: Floats, bias: Any, eps: float) -> npt.NDArray[np.float64]:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis, in float64."""
    x64 = x.astype(np.float64)
    centered = x64 - x64.mean(axis=-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(axis=-1, keepdims=True) + eps) * weight + bias


def silu(x: Floats) -> npt.NDArray[np.float64]:
    """x * sigmoid(x)."""
    x64 = x.astype(np.float64)
    return x64 / (1 + np.exp(-x64))


def gelu_tanh(x: Floats) -> npt.NDArray[np.float64]:
    """GELU in its tanh form."""
    x64 = x.astype(np.float64)
    return 0.5 * x64 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x64 + 0.044715 * x64**3)))


def rope(head: Floats, cos: Floats, sin: Floats, pairing: str) -> Floats:
    """The rotated copy of one head [head_dim]; cos and sin [rope_dim / 2]; pairing "adjacent" or "halves"."""
    half = len(cos)
    turned = head.copy()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if pairing == "adjacent" else (i, i + half)
        turned[a] = head[a] * cos[i] - head[b] * sin[i]
        turned[b] = head[a] * sin[i] + head[b] * cos[i]
    return turned


# ---- attention, sampling ----------------------------------------------------------------------------------------


def attention(
    q: Floats, k: Floats, v: Floats, first_position: int, window: int, scale: float
) -> npt.NDArray[np.float64]:
    """Dense causal attention in float64. q [rows, heads, d], k and v [tokens, kv_heads, d]; out as q."""
    group = q.shape[1] // k.shape[1]
    out = np.empty(q.shape)
    for row, head in np.ndindex(q.shape[:2]):
        end = first_position + row + 1
        visible = slice(max(0, end - window) if window else 0, end)
        scores = k[visible, head // group].astype(np.float64) @ q[row, head] * scale
        weights = np.exp(scores - scores.max())
        out[row, head] = weights @ v[visible, head // group].astype(np.float64) / weights.sum()
    return out


def penalized(
    logits: Floats, prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float
) -> Floats:
    """Repetition penalty on all tokens seen (Hugging Face's), presence and frequency on the output's (OpenAI's)."""
    x = logits.copy()
    for token in set(prompt + output):
        x[token] = x[token] / np.float32(repetition) if x[token] > 0 else x[token] * np.float32(repetition)
    for token in set(output):
        x[token] = x[token] - np.float32(frequency) * np.float32(output.count(token)) - np.float32(presence)
    return x


def random_bits(seed: int, position: int) -> int:
    """64 bits of SplitMix64, started at a hash of the seed."""
    mask, gamma = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    return mix((mix((seed + gamma) & mask) + gamma * (position + 1)) & mask)


def draw(weights: list[int], top_k: int, top_p: float, min_p: float, bits: int) -> int:
    """The token that 64 random bits choose from integer weights: sort, cut three times, walk by id."""
    order = [i for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)) if weights[i] > 0]
    if top_k:
        order = order[:top_k]
    if top_p < 1:
        target = max(1, int(np.ceil(np.float64(np.float32(top_p)) * sum(weights[i] for i in order))))
        reached = np.cumsum([weights[i] for i in order])
        order = order[: int(np.searchsorted(reached, target)) + 1]
    order = [i for i in order if weights[i] >= np.float64(np.float32(min_p)) * 2**30]
    rest = bits * sum(weights[i] for i in order) >> 64
    for token in sorted(order):
        rest -= weights[token]
        if rest < 0:
            return token
    raise AssertionError("the draw is below the sum")


def log_softmax(logits: Floats) -> npt.NDArray[np.float64]:
    """log of the softmax, in float64."""
    x = logits.astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())
