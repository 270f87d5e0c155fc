"""SiLU and GELU (tanh form) of one row, as the gate of a second row or (GELU) alone."""

from __future__ import annotations

from numba import njit

from workers.kernels.simd import Simd, Value
from workers.kernels.vector import F32x16, emits, load_first, store_first

_GELU_SCALE = 2.0 * 0.7978845608028654  # 2 sqrt(2 / pi)


@emits(F32x16, F32x16)
def silu(simd: Simd, v: Value) -> Value:
    """v / (1 + e^-v)."""
    return v / (simd.exp(0.0 - v) + 1.0)


@emits(F32x16, F32x16)
def gelu_tanh(simd: Simd, v: Value) -> Value:
    """v / 2 (1 + tanh(sqrt(2 / pi) (v + 0.044715 v^3))), with (1 + tanh u) / 2 = 1 / (1 + e^-2u)."""
    inner = simd.fma(v * v * 0.044715, v, v)
    return v / (simd.exp(inner * -_GELU_SCALE) + 1.0)


@njit(cache=True)
def silu_mul_row(gate: int, up: int, n: int, out: int) -> None:
    """out = silu(gate) * up; float32 [n] at each address; out may be gate or up."""
    for i in range(0, n, 16):
        v = silu(load_first(gate + 4 * i, n - i)) * load_first(up + 4 * i, n - i)
        store_first(out + 4 * i, v, n - i)


@njit(cache=True)
def gelu_tanh_mul_row(gate: int, up: int, n: int, out: int) -> None:
    """out = gelu(gate) * up; float32 [n] at each address; out may be gate or up."""
    for i in range(0, n, 16):
        v = gelu_tanh(load_first(gate + 4 * i, n - i)) * load_first(up + 4 * i, n - i)
        store_first(out + 4 * i, v, n - i)


@njit(cache=True)
def gelu_tanh_row(x: int, n: int, out: int) -> None:
    """out = gelu(x); float32 [n] at each address; out may be x."""
    for i in range(0, n, 16):
        store_first(out + 4 * i, gelu_tanh(load_first(x + 4 * i, n - i)), n - i)
