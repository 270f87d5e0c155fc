"""Attention's work items: which query rows against which part of their context, balanced over uneven requests.

The items say who may work at the same time, never what is computed: a row's bits are the same for every plan.
"""

from __future__ import annotations

from numba import njit

from workers.kernels.attention_inner import CHUNK
from workers.kernels.vector import read_i32, read_i64, write_i32, write_i64

SPLIT = 4 * CHUNK  # a context is cut at multiples of 256 tokens; each part's softmax is taken alone, then merged
MAX_VECTORS = 48  # query vectors (rows x query heads of one kv_head) of an item

ITEM_BYTES = 32  # int32 fields, at these offsets:
ROW_BEGIN = 0  # first of the batch's token rows
NUM_ROWS = 4
POSITION = 8  # of the first row, in its request
TABLE_START = 12  # where the request's block table begins in block_tables
SPLIT_BEGIN = 16
SPLIT_END = 20
PARTIAL = 24  # index of the item's first partial state; -1: the item is whole and writes its output itself

_TARGET_TILES = 12  # an item larger than total / 12 is cut: shared out over six workers, and few cold starts
_COST_PER_TOKEN = 8  # reading a token's K and V costs about as much as eight query vectors' arithmetic on them


def max_items(max_num_tokens: int, max_num_seqs: int, group: int) -> int:
    """An upper bound of items (and of combines) of one plan; `group`, num_heads / num_kv_heads, is 48 at most."""
    assert group <= MAX_VECTORS, f"{group} query heads of one kv_head are more than {MAX_VECTORS}"
    return max_num_seqs + max_num_tokens // rows_per_item.py_func(group) + _TARGET_TILES + 1


def attention_plan_bytes(max_num_tokens: int, max_num_seqs: int, group: int) -> int:
    """Bytes of the buffer that plan_attention writes to, and works in."""
    return max_items(max_num_tokens, max_num_seqs, group) * (3 * ITEM_BYTES + 8)


@njit(cache=True)
def rows_per_item(group: int) -> int:
    """Query rows of an item."""
    return max(1, MAX_VECTORS // group)


@njit(cache=True)
def plan_attention(
    query_start_loc: int,
    num_computed_tokens: int,
    block_table_start: int,
    num_seqs: int,
    num_heads: int,
    num_kv_heads: int,
    window: int,
    max_states: int,
    plan: int,
    capacity: int,
) -> tuple[int, int]:
    """Write a plan's items; how many there are: (num_items for attention_tile, num_combines for combine_tile).

    The items begin at `plan`, largest first, the combines behind them; each is worked on once for each kv_head.
    query_start_loc, num_computed_tokens and block_table_start are addresses of the StepPlan's int32 columns; `plan` is
    a buffer of attention_plan_bytes, its `capacity` max_items. window 0 is none. At most max_states partial states are
    used.
    """
    group = num_heads // num_kv_heads
    unsorted = plan + 2 * capacity * ITEM_BYTES
    keys = unsorted + capacity * ITEM_BYTES
    total = _total_cost(query_start_loc, num_computed_tokens, num_seqs, group, window)
    limit = max(1, total * num_kv_heads // _TARGET_TILES)
    num_items, num_combines, num_states = 0, 0, 0
    step = rows_per_item(group)
    for s in range(num_seqs):
        row, end = read_i32(query_start_loc + 4 * s), read_i32(query_start_loc + 4 * s + 4)
        position = read_i32(num_computed_tokens + 4 * s)
        table_start = read_i32(block_table_start + 4 * s)
        while row < end:
            num_rows = min(step, end - row)
            cost = _cost(position, num_rows, group, window)
            first, last = lowest_visible(position, window) // SPLIT, (position + num_rows - 1) // SPLIT + 1
            states = num_rows * num_heads * (last - first)
            pieces = min(-(-cost // limit), last - first)
            if num_states + states > max_states:
                pieces = 1
            partial = num_states if pieces > 1 else -1
            for piece in range(pieces):
                begin = first + piece * (last - first) // pieces
                stop = first + (piece + 1) * (last - first) // pieces
                at = partial + num_rows * num_heads * (begin - first) if pieces > 1 else -1
                _write_item(unsorted + num_items * ITEM_BYTES, row, num_rows, position, table_start, begin, stop, at)
                write_i64(keys + 8 * num_items, (cost // pieces << 20) + num_items)
                num_items += 1
            if pieces > 1:
                combine = plan + (capacity + num_combines) * ITEM_BYTES
                _write_item(combine, row, num_rows, position, table_start, first, last, partial)
                num_combines += 1
                num_states += states
            row += num_rows
            position += num_rows
    _sort_descending(keys, num_items)
    for i in range(num_items):
        _copy_item(plan + i * ITEM_BYTES, unsorted + (read_i64(keys + 8 * i) & 0xFFFFF) * ITEM_BYTES)
    for i in range(num_combines):
        _copy_item(plan + (num_items + i) * ITEM_BYTES, plan + (capacity + i) * ITEM_BYTES)
    return num_items, num_combines


@njit(cache=True)
def lowest_visible(position: int, window: int) -> int:
    """The first position that a query at `position` sees."""
    return max(0, position - window + 1) if window > 0 else 0


@njit(cache=True)
def _cost(position: int, num_rows: int, group: int, window: int) -> int:
    tokens = position + num_rows - lowest_visible(position, window)
    return tokens * (_COST_PER_TOKEN + num_rows * group)


@njit(cache=True)
def _total_cost(query_start_loc: int, num_computed_tokens: int, num_seqs: int, group: int, window: int) -> int:
    total, step = 0, rows_per_item(group)
    for s in range(num_seqs):
        row, end = read_i32(query_start_loc + 4 * s), read_i32(query_start_loc + 4 * s + 4)
        position = read_i32(num_computed_tokens + 4 * s)
        while row < end:
            num_rows = min(step, end - row)
            total += _cost(position, num_rows, group, window)
            row += num_rows
            position += num_rows
    return total


@njit(cache=True)
def _write_item(
    item: int, row: int, num_rows: int, position: int, table_start: int, split_begin: int, split_end: int, partial: int
) -> None:
    write_i32(item + ROW_BEGIN, row)
    write_i32(item + NUM_ROWS, num_rows)
    write_i32(item + POSITION, position)
    write_i32(item + TABLE_START, table_start)
    write_i32(item + SPLIT_BEGIN, split_begin)
    write_i32(item + SPLIT_END, split_end)
    write_i32(item + PARTIAL, partial)


@njit(cache=True)
def _copy_item(to: int, item: int) -> None:
    for field in range(0, ITEM_BYTES, 8):
        write_i64(to + field, read_i64(item + field))


@njit(cache=True)
def _sort_descending(keys: int, count: int) -> None:
    """Shell sort of int64 in place: no recursion, no allocation, quick to compile."""
    gap = 1
    while gap < count // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(gap, count):
            key = read_i64(keys + 8 * i)
            j = i
            while j >= gap and read_i64(keys + 8 * (j - gap)) < key:
                write_i64(keys + 8 * j, read_i64(keys + 8 * (j - gap)))
                j -= gap
            write_i64(keys + 8 * j, key)
        gap //= 3
