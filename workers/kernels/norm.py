"""RMSNorm and LayerNorm of one row.

Sums run over 16 lanes, element i in lane i mod 16, and the lanes are added last: one order for every row.
"""

from __future__ import annotations

from numba import njit, types

from workers.kernels.simd import Simd, Value
from workers.kernels.vector import (
    F32x16,
    emits,
    fma,
    lane_numbers,
    load_first,
    select_f32,
    splat_f32,
    store_first,
    sum_f32,
)


@emits(F32x16, F32x16, types.float32, types.float32)
def inverse_deviation(simd: Simd, squares: Value, n: Value, eps: Value) -> Value:
    """1 / sqrt(sum of the lanes / n + eps), in every lane."""
    return simd.splat(1.0 / simd.sqrt(simd.sum(squares) / n + eps))


@njit(cache=True)
def _inverse_rms(x: int, n: int, eps: float):  # type: ignore[no-untyped-def]
    squares = splat_f32(0.0)
    for i in range(0, n, 16):
        v = load_first(x + 4 * i, n - i)
        squares = fma(v, v, squares)
    return inverse_deviation(squares, n, eps)


@njit(cache=True)
def rms_norm_row(x: int, n: int, weight: int, eps: float, out: int) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight; float32 [n] at each address; out may be x."""
    inverse = _inverse_rms(x, n, eps)
    for i in range(0, n, 16):
        v = load_first(x + 4 * i, n - i) * inverse * load_first(weight + 4 * i, n - i)
        store_first(out + 4 * i, v, n - i)


@njit(cache=True)
def layer_norm_row(x: int, n: int, weight: int, bias: int, eps: float, out: int) -> None:
    """out = (x - mean) / sqrt(variance + eps) * weight + bias; float32 [n]; bias 0: none; out may be x."""
    sums = splat_f32(0.0)
    for i in range(0, n, 16):
        sums = sums + load_first(x + 4 * i, n - i)
    mean = splat_f32(sum_f32(sums)) / n
    squares = splat_f32(0.0)
    for i in range(0, n, 16):
        v = select_f32(lane_numbers() < n - i, load_first(x + 4 * i, n - i) - mean, 0.0)
        squares = fma(v, v, squares)
    inverse = inverse_deviation(squares, n, eps)
    for i in range(0, n, 16):
        v = (load_first(x + 4 * i, n - i) - mean) * inverse * load_first(weight + 4 * i, n - i)
        if bias != 0:
            v = v + load_first(bias + 4 * i, n - i)
        store_first(out + 4 * i, v, n - i)
