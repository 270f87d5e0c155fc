"""The program: a list of operations over addresses, which every member of a team runs together, tile by tile.

`workers/build.py` writes the list once per model, as operations.py says; `run` interprets it once per step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, typeof, types

from workers.kernels.attention import attention_tile_ahead, combine_tile
from workers.kernels.attention_inner import PREFETCH
from workers.kernels.attention_plan import ITEM_BYTES, NUM_ROWS, PARTIAL, ROW_BEGIN
from workers.kernels.kv import KvPool, copy_block
from workers.kernels.linear_op import is_shared_out, linear_tiles, next_share, run_linear_tile
from workers.kernels.operations import (
    ARGUMENTS,
    ATTENTION,
    BARRIER,
    CODE,
    COMBINE,
    COPY_BLOCKS,
    COUNTER,
    GATED,
    LINEAR,
    NORM,
    PRIVATE_OUT,
    PRIVATE_ROWS,
    SAMPLE,
)
from workers.kernels.quantize import quantize_row
from workers.kernels.row_op import quantized_row_bytes, run_row
from workers.kernels.sample import ROW_BYTES, sample
from workers.kernels.simd import isa_name
from workers.kernels.step import (
    BIAS_IDS,
    BIAS_VALUES,
    BLOCK_TABLES,
    COPIES,
    HISTORY,
    IS_SAMPLED,
    MAX_LOGPROBS,
    NUM_COPIES,
    NUM_ROUNDS,
    NUM_SAMPLED,
    NUM_TOKENS,
    ROWS,
    SAMPLED,
    WINDOW,
    WINDOW_COMBINES,
    WINDOW_ITEMS,
    WINDOW_PLAN,
    lay_out,
    next_round,
)
from workers.kernels.sync import ABORT, barrier, claim, next_claim
from workers.kernels.vector import load_acquire_i32, read_i32

__all__ = ["isa_name", "run"]

DONE, ABORTED = 0, -1

_ROWS_PER_TILE = 4  # of the operations whose tiles are rows
_MANY_ROWS_PER_TILE = 16  # where there are many: two members then seldom write to one cache line of K


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
    member: int,
    partials: int,
    work: int,
    logits_rows: int,
) -> int:
    """Run one step, all its rounds, with the other members: DONE, ABORTED, or what does not fit (see step.MISFITS).

    ops int64 [num_ops, OP_COLUMNS] and floats float64 [num_ops]: the first num_body of them for all tokens, the rest
    for the rows that sample, logits_rows at a time. step int64 [STEP_COLUMNS]; windows int64 [num_windows,
    WINDOW_COLUMNS]: see step.py; member is this one's rank in the team; partials is the team's attention scratch, work
    this member's own.
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
            if not _run_op(
                ops, op, number, no_row, num_rows, step, windows, pool, control, team_size, member, partials, work
            ):
                return ABORTED
        for first in range(0, step[NUM_SAMPLED], logits_rows):
            num_rows = min(logits_rows, step[NUM_SAMPLED] - first)
            for index in range(num_body, len(ops)):
                op, number = ops[index], floats[index]
                if not _run_op(
                    ops, op, number, first, num_rows, step, windows, pool, control, team_size, member, partials, work
                ):
                    return ABORTED
    return DONE


@njit(cache=True, inline="always")  # else all kernels would be compiled once more, as a part of it
def _run_op(
    ops: Any,
    op: Any,
    number: float,
    first: int,
    num_rows: int,
    step: Any,
    windows: Any,
    pool: KvPool,
    control: int,
    team_size: int,
    member: int,
    partials: int,
    work: int,
) -> bool:
    """Do this member's part of one operation, then meet the others. Rows are first to first + num_rows.

    Parts are tiles, claimed until there are none; but few rows of a linear layer are shared out, and few rows are
    normalised by every member for itself, who then need not meet.
    """
    num_tiles, size = _tiles(op, num_rows, step, windows, pool, team_size)
    coming, coming_end = next_share(ops, op, member, num_rows, team_size)
    if num_tiles == 0:  # every member sees the same, so nobody waits
        return True
    is_private = op[CODE] == NORM and op[PRIVATE_OUT] != 0 and num_rows <= PRIVATE_ROWS
    is_shared = (op[CODE] == LINEAR or op[CODE] == GATED) and is_shared_out(num_rows)
    if is_private:
        tile = 0
    elif is_shared:
        tile = member
    else:
        tile = claim(control, op[COUNTER])
    while tile < num_tiles:  # one call of all kernels: a second one would be compiled again
        _run_tile(
            op, number, tile, size, first, num_rows, step, windows, pool, control, team_size, coming, partials, work
        )
        tile = num_tiles if is_private or is_shared else claim(control, op[COUNTER])
    return True if is_private or op[BARRIER] == 0 else barrier(control, team_size, coming, coming_end)


@njit(cache=True)
def _tiles(op: Any, num_rows: int, step: Any, windows: Any, pool: KvPool, team_size: int) -> tuple[int, int]:
    """How many tiles an operation has, and their size in rows (LINEAR, GATED: in panels)."""
    code, a = op[CODE], op[ARGUMENTS:]
    if code in (LINEAR, GATED):
        return linear_tiles(op, num_rows, team_size)
    if code == ATTENTION:
        return windows[a[5], WINDOW_ITEMS] * pool.num_kv_heads, 1
    if code == COMBINE:
        return windows[a[2], WINDOW_COMBINES] * pool.num_kv_heads, 1
    if code == COPY_BLOCKS:
        return step[NUM_COPIES], 1
    if code == SAMPLE:
        return num_rows, 1
    size = _ROWS_PER_TILE if num_rows < 4 * _MANY_ROWS_PER_TILE else _MANY_ROWS_PER_TILE
    return (num_rows + size - 1) // size, size


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
    following: int,
    partials: int,
    work: int,
) -> None:
    """One tile of any operation; `following` is where the weights begin that this member reads next (0: unknown)."""
    code, a = op[CODE], op[ARGUMENTS:]
    begin, end = tile * size, min((tile + 1) * size, num_rows)
    if code in (LINEAR, GATED):
        run_linear_tile(op, tile, size, num_rows, following)
    elif code == ATTENTION:
        w = windows[a[5]]
        item = w[WINDOW_PLAN] + tile // pool.num_kv_heads * ITEM_BYTES
        if a[7] != 0 and not _has_sampled(item, step):
            return
        kv_head, tables = tile % pool.num_kv_heads, step[BLOCK_TABLES]
        coming, next_item = next_claim(control, op[COUNTER], team_size), 0
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
        if a[4] != 0 and not _has_sampled(item, step):
            return
        kv_head = tile % pool.num_kv_heads
        combine_tile(pool, kv_head, item, a[1], a[0], a[1] * pool.head_dim * 4, partials, work)
        if a[3] != 0:
            _quantize_heads(pool, item, kv_head, a[1], a[0], a[3])
    elif code == SAMPLE:
        _sample(a, first, tile, step, work)
    elif code == COPY_BLOCKS:
        pair = step[COPIES] + 8 * tile
        copy_block(pool, read_i32(pair), read_i32(pair + 4))
    else:
        for row in range(begin, end):
            run_row(code, a, number, row, first, num_rows <= PRIVATE_ROWS, step, pool)


@njit(cache=True)
def _has_sampled(item: int, step: Any) -> bool:
    """Whether any of an attention item's rows is of a token whose logits are wanted."""
    first, num_sampled = read_i32(item + ROW_BEGIN), 0
    for row in range(first, first + read_i32(item + NUM_ROWS)):
        num_sampled += read_i32(step[IS_SAMPLED] + 4 * row)
    return num_sampled > 0


@njit(cache=True)
def _quantize_heads(pool: KvPool, item: int, kv_head: int, num_heads: int, attention: int, out: int) -> None:
    """Quantise what an attention item has written: the query heads of one kv_head, in its rows."""
    n, part = num_heads * pool.head_dim, num_heads // pool.num_kv_heads * pool.head_dim
    first = read_i32(item + ROW_BEGIN)
    for row in range(first, first + read_i32(item + NUM_ROWS)):
        source = attention + (row * n + kv_head * part) * 4
        quantize_row(source, part, out + row * quantized_row_bytes(n) + kv_head * quantized_row_bytes(part))


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
    run.compile((rows, numbers, integer, row, rows, pool, *(integer,) * 6))
