"""Rotary position embedding of one head in place, for both ways of pairing dimensions."""

from __future__ import annotations

from numba import njit

from workers.kernels.vector import (
    even_lanes,
    interleave_high,
    interleave_low,
    load_f32,
    load_first,
    odd_lanes,
    read_f32,
    store_f32,
    store_first,
    write_f32,
)

PAIR_ADJACENT, PAIR_HALVES = 0, 1


@njit(cache=True)
def rope_head(x: int, cos: int, sin: int, rope_dim: int, pairing: int) -> None:
    """Turn each pair (a, b) of x to (a cos - b sin, a sin + b cos); later dimensions stay as they are.

    x is float32 [head_dim], cos and sin float32 [rope_dim / 2], of the row's position. PAIR_ADJACENT: dimensions 2i and
    2i + 1 are a pair; PAIR_HALVES: i and i + rope_dim / 2.
    """
    half = rope_dim // 2
    if pairing == PAIR_HALVES:
        for i in range(0, half, 16):
            at_a, at_b = x + 4 * i, x + 4 * (half + i)
            a, b = load_first(at_a, half - i), load_first(at_b, half - i)
            c, s = load_first(cos + 4 * i, half - i), load_first(sin + 4 * i, half - i)
            store_first(at_a, a * c - b * s, half - i)
            store_first(at_b, a * s + b * c, half - i)
        return
    whole = half & -16
    for i in range(0, whole, 16):
        low, high = load_f32(x + 8 * i), load_f32(x + 8 * i + 64)
        a, b = even_lanes(low, high), odd_lanes(low, high)
        c, s = load_f32(cos + 4 * i), load_f32(sin + 4 * i)
        first, second = a * c - b * s, a * s + b * c
        store_f32(x + 8 * i, interleave_low(first, second))
        store_f32(x + 8 * i + 64, interleave_high(first, second))
    for i in range(whole, half):
        left, right = read_f32(x + 8 * i), read_f32(x + 8 * i + 4)
        cosine, sine = read_f32(cos + 4 * i), read_f32(sin + 4 * i)
        write_f32(x + 8 * i, left * cosine - right * sine)
        write_f32(x + 8 * i + 4, left * sine + right * cosine)
