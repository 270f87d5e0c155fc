"""The program: a list of operations over addresses, which every member of a team runs together, tile by tile.

`workers/build.py` writes the list once per model; `run` interprets it once per step. An operation is a row of int64
(code, counter, barrier, then the arguments listed at each code) and one float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, typeof, types

from workers.kernels.activation import gelu_tanh_mul_row, gelu_tanh_row, silu_mul_row
from workers.kernels.attention import attention_tile_ahead, combine_tile
from workers.kernels.attention_inner import PREFETCH
from workers.kernels.attention_plan import ITEM_BYTES, NUM_ROWS, PARTIAL, ROW_BEGIN
from workers.kernels.embedding import embed_row
from workers.kernels.kv import KvPool, copy_block, write_kv
from workers.kernels.linear import GELU_TANH, SILU, gated_tile, linear_tile
from workers.kernels.linear_pack import BLOCK, PANEL
from workers.kernels.linear_tiles import RECORD_BYTES
from workers.kernels.norm import layer_norm_row, rms_norm_row
from workers.kernels.quantize import quantize_row, quantize_row_twice
from workers.kernels.rope import PAIR_ADJACENT, PAIR_HALVES, rope_head
from workers.kernels.sample import ROW_BYTES, sample
from workers.kernels.simd import isa_name
from workers.kernels.step import (
    BIAS_IDS,
    BIAS_VALUES,
    BLOCK_TABLES,
    COPIES,
    HISTORY,
    MAX_LOGPROBS,
    NUM_COPIES,
    NUM_ROUNDS,
    NUM_SAMPLED,
    NUM_TOKENS,
    POSITIONS,
    ROWS,
    SAMPLED,
    SLOTS,
    TOKEN_IDS,
    WINDOW,
    WINDOW_COMBINES,
    WINDOW_ITEMS,
    WINDOW_PLAN,
    lay_out,
    next_round,
)
from workers.kernels.sync import ABORT, barrier, claim, next_claim
from workers.kernels.vector import load_acquire_i32, load_first, read_i32, store_first

__all__ = ["GELU_TANH", "PAIR_ADJACENT", "PAIR_HALVES", "SILU", "isa_name", "run"]

OP_COLUMNS = 20

# Operations. Arguments are addresses (0: absent) and sizes; "width" is the distance of two rows in float32.
EMBED = 0  # wtype, matrix, n, out, position_embed; float: scale
NORM = 1  # kind, source, out, quantized out, weight, bias, n, gather, residual, num_terms; float: eps
LINEAR = 2  # wtype, matrix, n_in, n_out, source, source row bytes, out, out width, bias, residual, num_terms
QK_ROPE_WRITE = 3  # layer, qkv, width, cos, sin, rope_dim, pairing, q_norm, k_norm, num_heads; float: eps
ATTENTION = 4  # layer, qkv, width, out, num_heads, window index, quantized out; float: scale
COMBINE = 5  # out, num_heads, window index, quantized out
QUANTIZE = 6  # source, n, out
ACTIVATE = 7  # kind, gated, gate and up, width, n, out, quantized out
SAMPLE = 8  # logits, width, vocab_size, logprobs, ranks, top ids, top logprobs
COPY_BLOCKS = 9
GATED = 10  # wtype, gate, n_in, n_out, source, source row bytes, up, kind, quantized out, its row bytes

NORM_RMS, NORM_LAYER = 0, 1


DONE, ABORTED = 0, -1

_ROWS_PER_TILE = 4  # of the operations whose tiles are rows
_TILES_PER_MEMBER = 3  # of a linear layer: enough that members end together, long enough to be streams of memory
_MAX_LINEAR_PANELS = 64
_MAX_LINEAR_ROWS = 128  # of a tile: its activations stay in a core's L2 while panels stream by


@njit(cache=True)
def run(
    ops: Any,
    floats: Any,
    num_body: int,
    step: Any,
    windows: Any,
    pool: KvPool,
    control: int,
    team_size: int,
    partials: int,
    work: int,
    logits_rows: int,
) -> int:
    """Run one step, all its rounds, with the other members: DONE, ABORTED, or what does not fit (see step.MISFITS).

    ops int64 [num_ops, OP_COLUMNS] and floats float64 [num_ops]: the first num_body of them for all tokens, the rest
    for the rows that sample, logits_rows at a time. step int64 [STEP_COLUMNS]; windows int64 [num_windows,
    WINDOW_COLUMNS]: see step.py; partials is the team's attention scratch, work this member's own.
    """
    if load_acquire_i32(control + ABORT) != 0:  # the step before this one was aborted, and this one with it
        return ABORTED
    misfit = lay_out(step, windows, pool)
    if misfit != 0:
        return misfit
    no_row = np.int64(0)  # a literal 0 is another type to Numba, and all of this would be compiled twice
    for rounds_done in range(step[NUM_ROUNDS]):
        if rounds_done > 0:  # the barrier of SAMPLE is behind every member
            misfit = next_round(step, windows, pool)
            if misfit != 0:
                return misfit
        for index in range(num_body):
            op, number, num_rows = ops[index], floats[index], step[NUM_TOKENS]
            if not _run_op(op, number, no_row, num_rows, step, windows, pool, control, team_size, partials, work):
                return ABORTED
        for first in range(0, step[NUM_SAMPLED], logits_rows):
            num_rows = min(logits_rows, step[NUM_SAMPLED] - first)
            for index in range(num_body, len(ops)):
                op, number = ops[index], floats[index]
                if not _run_op(op, number, first, num_rows, step, windows, pool, control, team_size, partials, work):
                    return ABORTED
    return DONE


@njit(cache=True, inline="always")  # else all kernels would be compiled once more, as a part of it
def _run_op(
    op: Any,
    number: float,
    first: int,
    num_rows: int,
    step: Any,
    windows: Any,
    pool: KvPool,
    control: int,
    team_size: int,
    partials: int,
    work: int,
) -> bool:
    """Claim tiles of one operation until there are none, then meet the others. Rows are first to first + num_rows."""
    num_tiles, size = _tiles(op, num_rows, step, windows, pool, team_size)
    if num_tiles == 0:  # every member sees the same, so nobody waits
        return True
    tile = claim(control, op[1])
    while tile < num_tiles:
        _run_tile(op, number, tile, size, first, num_rows, step, windows, pool, control, team_size, partials, work)
        tile = claim(control, op[1])
    return barrier(control, team_size) if op[2] != 0 else True


@njit(cache=True)
def _tiles(op: Any, num_rows: int, step: Any, windows: Any, pool: KvPool, team_size: int) -> tuple[int, int]:
    """How many tiles an operation has, and their size in rows (LINEAR: in panels)."""
    code = op[0]
    if code in (LINEAR, GATED):
        num_panels = (op[6] + PANEL - 1) // PANEL
        row_groups = (num_rows + _MAX_LINEAR_ROWS - 1) // _MAX_LINEAR_ROWS
        size = max(1, min(_MAX_LINEAR_PANELS, num_panels * row_groups // (team_size * _TILES_PER_MEMBER)))
        if code == GATED:
            size = (size + 1) // 2 * 2  # a block of the quantised output is two panels
        return row_groups * ((num_panels + size - 1) // size), size
    if code == ATTENTION:
        return windows[op[8], WINDOW_ITEMS] * pool.num_kv_heads, 1
    if code == COMBINE:
        return windows[op[5], WINDOW_COMBINES] * pool.num_kv_heads, 1
    if code == COPY_BLOCKS:
        return step[NUM_COPIES], 1
    if code == SAMPLE:
        return num_rows, 1
    return (num_rows + _ROWS_PER_TILE - 1) // _ROWS_PER_TILE, _ROWS_PER_TILE


@njit(cache=True)
def _run_tile(
    op: Any,
    number: float,
    tile: int,
    size: int,
    first: int,
    num_rows: int,
    step: Any,
    windows: Any,
    pool: KvPool,
    control: int,
    team_size: int,
    partials: int,
    work: int,
) -> None:
    """One tile of any operation."""
    code, a = op[0], op[3:]
    begin, end = tile * size, min((tile + 1) * size, num_rows)
    if code == LINEAR:
        _linear(a, tile, size, num_rows)
    elif code == GATED:
        _gated(a, tile, size, num_rows)
    elif code == ATTENTION:
        w = windows[a[5]]
        item = w[WINDOW_PLAN] + tile // pool.num_kv_heads * ITEM_BYTES
        kv_head, tables = tile % pool.num_kv_heads, step[BLOCK_TABLES]
        coming, next_item = next_claim(control, op[1], team_size), 0
        if coming < w[WINDOW_ITEMS] * pool.num_kv_heads:
            next_item = w[WINDOW_PLAN] + coming // pool.num_kv_heads * ITEM_BYTES
        attention_tile_ahead(
            PREFETCH, coming % pool.num_kv_heads, next_item, pool, a[0], kv_head, item, a[4], w[WINDOW], number, tables,
            a[1], a[2] * 4, a[3], a[4] * pool.head_dim * 4, partials, work,
        )  # fmt: skip
        if a[6] != 0 and read_i32(item + PARTIAL) < 0:
            _quantize_heads(pool, item, kv_head, a[4], a[3], a[6])
    elif code == COMBINE:
        w = windows[a[2]]
        item = w[WINDOW_PLAN] + (w[WINDOW_ITEMS] + tile // pool.num_kv_heads) * ITEM_BYTES
        kv_head = tile % pool.num_kv_heads
        combine_tile(pool, kv_head, item, a[1], a[0], a[1] * pool.head_dim * 4, partials, work)
        if a[3] != 0:
            _quantize_heads(pool, item, kv_head, a[1], a[0], a[3])
    elif code == NORM:
        for row in range(begin, end):
            _norm(a, number, row, read_i32(step[ROWS] + (first + row) * ROW_BYTES) if a[7] else row)
    elif code == QK_ROPE_WRITE:
        for row in range(begin, end):
            _qk_rope_write(a, number, row, step, pool)
    elif code == QUANTIZE:
        for row in range(begin, end):
            quantize_row(a[0] + row * a[1] * 4, a[1], a[2] + row * _quantized_row_bytes(a[1]))
    elif code == ACTIVATE:
        for row in range(begin, end):
            _activate(a, row)
    elif code == EMBED:
        for row in range(begin, end):
            _embed(a, number, row, step)
    elif code == SAMPLE:
        _sample(a, first, tile, step, work)
    elif code == COPY_BLOCKS:
        pair = step[COPIES] + 8 * tile
        copy_block(pool, read_i32(pair), read_i32(pair + 4))


@njit(cache=True)
def _add_row(a: int, b: int, n: int, out: int) -> None:
    """out = a + b, float32 [n] at each address."""
    for i in range(0, n, 16):
        store_first(out + 4 * i, load_first(a + 4 * i, n - i) + load_first(b + 4 * i, n - i), n - i)


@njit(cache=True)
def _quantized_row_bytes(n: int) -> int:
    return n // BLOCK * RECORD_BYTES


@njit(cache=True)
def _embed(a: Any, scale: float, row: int, step: Any) -> None:
    out = a[3] + row * a[2] * 4
    embed_row(a[0], a[1], a[2], read_i32(step[TOKEN_IDS] + 4 * row), out, scale)
    if a[4] != 0:
        _add_row(out, a[4] + read_i32(step[POSITIONS] + 4 * row) * a[2] * 4, a[2], out)


@njit(cache=True)
def _norm(a: Any, eps: float, row: int, source_row: int) -> None:
    n = a[6]
    source, out = a[1] + source_row * n * 4, a[2] + row * n * 4
    target = out if a[8] == 0 else source
    if a[0] == NORM_RMS:
        rms_norm_row(source, n, a[4], eps, target)
    else:
        layer_norm_row(source, n, a[4], a[5], eps, target)
    if a[8] != 0:
        _add_row(a[8] + row * n * 4, target, n, out)
    if a[3] != 0 and a[9] == 2:
        quantize_row_twice(out, n, a[3] + row * 2 * _quantized_row_bytes(n))
    elif a[3] != 0:
        quantize_row(out, n, a[3] + row * _quantized_row_bytes(n))


@njit(cache=True)
def _linear_part(n_out: int, tile: int, size: int, num_rows: int) -> tuple[int, int, int, int]:
    """A linear tile's panels and rows. Tiles go through the panels first: a group of rows stays in cache meanwhile."""
    num_panels = (n_out + PANEL - 1) // PANEL
    panel_tiles = (num_panels + size - 1) // size
    panel, row = tile % panel_tiles * size, tile // panel_tiles * _MAX_LINEAR_ROWS
    return panel, min(panel + size, num_panels), row, min(row + _MAX_LINEAR_ROWS, num_rows)


@njit(cache=True)
def _linear(a: Any, tile: int, size: int, num_rows: int) -> None:
    panel, panel_end, row, row_end = _linear_part(a[3], tile, size, num_rows)
    linear_tile(a[0], a[1], a[2], panel, panel_end, a[4], a[5], row, row_end, a[6], a[7], a[3], a[8], a[9], a[10])


@njit(cache=True)
def _gated(a: Any, tile: int, size: int, num_rows: int) -> None:
    panel, panel_end, row, row_end = _linear_part(a[3], tile, size, num_rows)
    gated_tile(a[7], a[0], a[1], a[6], a[2], panel, panel_end, a[4], a[5], row, row_end, a[8], a[9])


@njit(cache=True)
def _quantize_heads(pool: KvPool, item: int, kv_head: int, num_heads: int, attention: int, out: int) -> None:
    """Quantise what an attention item has written: the query heads of one kv_head, in its rows."""
    n, part = num_heads * pool.head_dim, num_heads // pool.num_kv_heads * pool.head_dim
    first = read_i32(item + ROW_BEGIN)
    for row in range(first, first + read_i32(item + NUM_ROWS)):
        source = attention + (row * n + kv_head * part) * 4
        quantize_row(source, part, out + row * _quantized_row_bytes(n) + kv_head * _quantized_row_bytes(part))


@njit(cache=True)
def _qk_rope_write(a: Any, eps: float, row: int, step: Any, pool: KvPool) -> None:
    """Norm and turn a token's heads of q and k in place, then write its k and v to the pool."""
    num_heads, head_bytes = a[9], pool.head_dim * 4
    q = a[1] + row * a[2] * 4
    k = q + num_heads * head_bytes
    position = read_i32(step[POSITIONS] + 4 * row)
    for head in range(num_heads + pool.num_kv_heads):
        x, weight = q + head * head_bytes, a[7] if head < num_heads else a[8]
        if weight != 0:
            rms_norm_row(x, pool.head_dim, weight, eps, x)
        if a[3] != 0:
            angle = position * (a[5] // 2) * 4
            rope_head(x, a[3] + angle, a[4] + angle, a[5], a[6])
    write_kv(pool, a[0], read_i32(step[SLOTS] + 4 * row), k, k + pool.num_kv_heads * head_bytes)


@njit(cache=True)
def _activate(a: Any, row: int) -> None:
    n = a[4]
    x, out = a[2] + row * a[3] * 4, a[5] + row * n * 4
    if a[1] == 0:
        gelu_tanh_row(x, n, out)
    elif a[0] == SILU:
        silu_mul_row(x, x + n * 4, n, out)
    else:
        gelu_tanh_mul_row(x, x + n * 4, n, out)
    if a[6] != 0:
        quantize_row(out, n, a[6] + row * _quantized_row_bytes(n))


@njit(cache=True)
def _sample(a: Any, first: int, row: int, step: Any, work: int) -> None:
    index = first + row
    sample(
        a[0] + row * a[1] * 4,
        a[2],
        step[ROWS] + index * ROW_BYTES,
        step[HISTORY],
        step[BIAS_IDS],
        step[BIAS_VALUES],
        step[SAMPLED] + 4 * index,
        a[3] + 4 * index,
        a[4] + 4 * index,
        a[5] + 4 * index * MAX_LOGPROBS,
        a[6] + 4 * index * MAX_LOGPROBS,
        work,
    )


def compile_all() -> None:
    """Compile what a step needs, or load it from the cache on disk; later calls find it."""
    pool = typeof(KvPool(0, 0, 0, 0, 0, 0))
    integer = types.int64
    rows, row = types.Array(integer, 2, "C"), types.Array(integer, 1, "C")
    numbers = types.Array(types.float64, 1, "C")
    run.compile((rows, numbers, integer, row, rows, pool, integer, integer, integer, integer, integer))
