"""The state of an online softmax: begin it, bring it up to date with a chunk's scores, merge two, write what it gives.

A state of one query vector is 16 lanes that all hold the maximum, 16 lanes whose sum is the denominator, then head_dim
sums of weighted values; all float32. Scores are in powers of 2.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from workers.kernels.attention_inner import CHUNK
from workers.kernels.vector import (
    exp2_f32,
    fma,
    lane_numbers,
    load_f32,
    mask_bits,
    max_f32,
    maximum_f32,
    select_f32,
    splat_f32,
    store_f32,
    sum_f32,
)

VALUES = 128  # where the sums begin
_MAXIMUM, _DENOMINATOR = 0, 64
_LOWEST = float(np.finfo(np.float32).min)  # the maximum of no scores: finite, so that differences stay numbers


@njit(cache=True)
def state_bytes(head_dim: int) -> int:
    """Bytes of one state."""
    return VALUES + 4 * head_dim


@njit(cache=True)
def softmax(scores: int, low: int, high: int, state: int, head_dim: int) -> None:
    """Turn a query vector's 64 scores into weights (of those within low … high), and bring its state up to date."""
    s0, s1, s2, s3 = load_f32(scores), load_f32(scores + 64), load_f32(scores + 128), load_f32(scores + 192)
    if low > 0 or high < CHUNK:
        lowest, lanes = splat_f32(_LOWEST), lane_numbers()
        s0 = select_f32((lanes >= low) & (lanes < high), s0, lowest)
        s1 = select_f32((lanes >= low - 16) & (lanes < high - 16), s1, lowest)
        s2 = select_f32((lanes >= low - 32) & (lanes < high - 32), s2, lowest)
        s3 = select_f32((lanes >= low - 48) & (lanes < high - 48), s3, lowest)
    before = load_f32(state + _MAXIMUM)
    top = max_f32(splat_f32(maximum_f32(max_f32(max_f32(s0, s1), max_f32(s2, s3)))), before)
    p0, p1, p2, p3 = exp2_f32(s0 - top), exp2_f32(s1 - top), exp2_f32(s2 - top), exp2_f32(s3 - top)
    store_f32(scores, p0)
    store_f32(scores + 64, p1)
    store_f32(scores + 128, p2)
    store_f32(scores + 192, p3)
    denominator = load_f32(state + _DENOMINATOR)
    if mask_bits(top > before) != 0:
        factor = exp2_f32(before - top)
        denominator = denominator * factor
        for d in range(VALUES, state_bytes(head_dim), 64):
            store_f32(state + d, load_f32(state + d) * factor)
        store_f32(state + _MAXIMUM, top)
    store_f32(state + _DENOMINATOR, denominator + ((p0 + p1) + (p2 + p3)))


@njit(cache=True)
def clear_states(states: int, count: int, head_dim: int) -> None:
    """Make states of nothing seen."""
    for j in range(count):
        state = states + j * state_bytes(head_dim)
        store_f32(state + _MAXIMUM, splat_f32(_LOWEST))
        for d in range(_DENOMINATOR, state_bytes(head_dim), 64):
            store_f32(state + d, splat_f32(0.0))


@njit(cache=True)
def merge(total: int, state: int, head_dim: int) -> None:
    """Add what `state` has seen to `total`; nothing happens, to the bit, if it has seen nothing."""
    maximum = load_f32(state + _MAXIMUM)
    if mask_bits(maximum > _LOWEST) == 0:
        return
    before = load_f32(total + _MAXIMUM)
    top = max_f32(maximum, before)
    keep, add = exp2_f32(before - top), exp2_f32(maximum - top)
    store_f32(total + _MAXIMUM, top)
    for d in range(_DENOMINATOR, state_bytes(head_dim), 64):
        store_f32(total + d, fma(load_f32(state + d), add, load_f32(total + d) * keep))


@njit(cache=True)
def write_rows(totals: int, num_vectors: int, group: int, head_dim: int, out: int, out_row_bytes: int) -> None:
    """Weighted values over denominators, as float32 rows of the batch."""
    for j in range(num_vectors):
        total = totals + j * state_bytes(head_dim)
        row = out + j // group * out_row_bytes + j % group * head_dim * 4
        denominator = splat_f32(sum_f32(load_f32(total + _DENOMINATOR)))
        for d in range(0, 4 * head_dim, 64):
            store_f32(row + d, load_f32(total + VALUES + d) / denominator)
