"""Slow and obvious twins of the kernels, in NumPy. Tests hold every kernel to its twin; nothing else uses them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


# ---- linear layers, norms, activations, rope --------------------------------------------------------------------


def dequantize(data: Bytes, type_name: str, n_out: int, n_in: int) -> Floats:
    """The numbers of a GGUF tensor, block by block. float32 [n_out, n_in]."""
    if type_name == "F32":
        return data.view(np.float32).reshape(n_out, n_in)
    if type_name == "F16":
        return data.view(np.float16).astype(np.float32).reshape(n_out, n_in)
    if type_name == "BF16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(n_out, n_in)
    block_bytes = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[type_name]
    weights = np.empty((n_out * n_in // 32, 32), dtype=np.float32)
    for block, raw in zip(weights, data.reshape(-1, block_bytes), strict=True):
        d = np.float32(raw[0:2].view(np.float16)[0])
        if type_name == "Q8_0":
            block[:] = raw[2:].view(np.int8) * d
        elif type_name == "Q4_0":
            block[:16] = ((raw[2:] & 15).astype(np.int8) - 8) * d
            block[16:] = ((raw[2:] >> 4).astype(np.int8) - 8) * d
        else:
            m = np.float32(raw[2:4].view(np.float16)[0])
            block[:16] = (raw[4:] & 15) * d + m
            block[16:] = (raw[4:] >> 4) * d + m
    return weights.reshape(n_out, n_in)


def quantize_rows(x: Floats) -> tuple[npt.NDArray[np.int8], Floats]:
    """int8 [rows, blocks, 32] and scale [rows, blocks] of activations [rows, n_in]."""
    blocks = x.reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(axis=-1)
    scale = largest / np.float32(127)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0))
    return np.rint(blocks * inverse[..., None]).astype(np.int8), scale


def linear(x: Floats, weights: Floats, *, quantized: bool) -> npt.NDArray[np.float64]:
    """x [rows, n_in] times weights [n_out, n_in] in float64; `quantized`: of x as int8 blocks. [rows, n_out]."""
    if quantized:
        q, scale = quantize_rows(x)
        x64 = (q.astype(np.float64) * scale[..., None]).reshape(x.shape)
    else:
        x64 = x.astype(np.float64)
    return x64 @ weights.astype(np.float64).T


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
