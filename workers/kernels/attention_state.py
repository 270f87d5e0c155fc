"""The state of an online softmax: begin it, bring it up to date with a chunk's scores, merge two, write what it gives.

A state of one query vector is 16 lanes that all hold the maximum, 16 lanes whose sum is the denominator, then head_dim
sums of weighted values; all float32. Scores are in powers of 2.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

from workers.kernels.attention_inner import CHUNK, SCORES_BYTES, SUB_BLOCKS, TILE_SIZES
from workers.kernels.lanes import each_to_a_lane, lane_of
from workers.kernels.simd import LANES, Simd, Value
from workers.kernels.vector import (
    emits,
    exp2_f32,
    fma,
    lane_numbers,
    load_f32,
    mask_bits,
    max_f32,
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
def hide(scores: int, low: int, high: int) -> None:
    """Of a query vector's 64 scores, make those outside low … high too low to count."""
    lowest, lanes = splat_f32(_LOWEST), lane_numbers()
    for c in range(0, CHUNK, 16):
        is_visible = (lanes >= low - c) & (lanes < high - c)
        store_f32(scores + 4 * c, select_f32(is_visible, load_f32(scores + 4 * c), lowest))


@emits(types.void, *(types.int64,) * 4)
def raise_maxima(simd: Simd, count: Value, scores: Value, states: Value, head_dim: Value) -> None:
    """Begin the softmax of a register tile's scores [count, 64]: raise its states' maxima to them, the sums to these.

    No branch asks whether a maximum is new: it would be guessed wrong half of the time.
    """
    size = head_dim * 4 + VALUES

    def emit(count: int) -> None:
        rows = [states + size * r for r in range(count)]
        parts = [[simd.load_f32(scores, r * SCORES_BYTES + 64 * c) for c in range(SUB_BLOCKS)] for r in range(count)]
        highest = [simd.max(simd.max(a, b), simd.max(c, d)) for a, b, c, d in parts]
        lanes = each_to_a_lane(simd, highest, simd.max)
        befores = [simd.load_f32(row, _MAXIMUM) for row in rows]
        splats = [simd.shuffle(lanes, lanes, [lane_of(r)] * LANES) for r in range(count)]
        tops = [simd.max(top, before) for top, before in zip(splats, befores, strict=True)]
        factors = [simd.exp2(before - top) for before, top in zip(befores, tops, strict=True)]
        for row, top in zip(rows, tops, strict=True):
            simd.store(row, top, _MAXIMUM)

        def rescale(d: Value, carried: list[Value]) -> list[Value]:
            for row, factor in zip(rows, factors, strict=True):
                simd.store(row + d, simd.load_f32(row + d) * factor)
            return carried

        simd.loop(_DENOMINATOR, size, 64, [], rescale)

    simd.switch(count, TILE_SIZES, emit)


@njit(cache=True, inline="always")
def weigh(scores: int, state: int) -> None:
    """End it: turn the scores into weights, and add them to the denominator."""
    top = load_f32(state + _MAXIMUM)
    p0, p1 = exp2_f32(load_f32(scores) - top), exp2_f32(load_f32(scores + 64) - top)
    p2, p3 = exp2_f32(load_f32(scores + 128) - top), exp2_f32(load_f32(scores + 192) - top)
    store_f32(scores, p0)
    store_f32(scores + 64, p1)
    store_f32(scores + 128, p2)
    store_f32(scores + 192, p3)
    store_f32(state + _DENOMINATOR, load_f32(state + _DENOMINATOR) + ((p0 + p1) + (p2 + p3)))


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
    """Weighted values over denominators, as float32 rows of the batch; NaN where all scores were.

    The bits are those of states that `merge` has put together: there, a state that saw nothing adds nothing, and no
    zero is negative.
    """
    zero, nan = splat_f32(np.float32(0.0)), splat_f32(np.float32(np.nan))
    for j in range(num_vectors):
        total = totals + j * state_bytes(head_dim)
        row = out + j // group * out_row_bytes + j % group * head_dim * 4
        inverse = splat_f32(np.float32(1.0)) / splat_f32(sum_f32(load_f32(total + _DENOMINATOR)))
        inverse = select_f32(load_f32(total + _MAXIMUM) > _LOWEST, inverse, nan)
        for d in range(0, 4 * head_dim, 64):
            store_f32(row + d, (load_f32(total + VALUES + d) + zero) * inverse)
