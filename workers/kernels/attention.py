"""Paged attention: query rows of one request against one kv_head, by online softmax over the blocks of a table.

A context is cut at absolute positions: chunks of 64 tokens (one step of the online softmax) and splits of 256 (each
with its own softmax state; states merge in order). A query row thus does the same operations in the same order in
prefill and decode, beside any rows, in any chunking of its prompt, for every block_size and every team. Masked
positions' values are left out, never multiplied by zero; to a denominator, which is at least 1, they add 2^-126. Who
computes what is decided in attention_plan.py.
"""

from __future__ import annotations

import math

import numpy as np
from numba import literally, njit

from workers.kernels import attention_plan as plan
from workers.kernels.attention_inner import (
    CHUNK,
    COPY,
    MAX_QUERIES,
    NOTHING,
    PREFETCH,
    SCORES_BYTES,
    SUB_BLOCKS,
    add_values,
    dot_keys,
    tile_size,
)
from workers.kernels.attention_plan import MAX_VECTORS, SPLIT, lowest_visible
from workers.kernels.attention_state import (
    VALUES,
    clear_states,
    hide,
    merge,
    raise_maxima,
    state_bytes,
    weigh,
    write_rows,
)
from workers.kernels.kv import F16_BYTES, KvPool, k_address
from workers.kernels.simd import isa_name
from workers.kernels.vector import (
    load_f16,
    load_f32,
    prefetch_l1,
    read_i32,
    read_i64,
    splat_f32,
    store_f32,
    write_i32,
    write_i64,
)

_LOG2_E = math.log2(math.e)
# Up to so many query vectors float16 is converted in registers at each use, beyond it once for all. AVX-512 has units
# to spare for it, while a chunk's copies would fill half of the first-level cache.
_DIRECT_VECTORS = MAX_VECTORS if isa_name() == "avx512" else 8

# The work buffer: addresses of K and V of this chunk, of the next chunk, and of their copies in float32; scores of a
# register tile; positions of the query vectors, since divisions are slow; then arrays.
_ADDRESS_BYTES = 2 * SUB_BLOCKS * 8
_THIS, _NEXT, _COPIES = 0, _ADDRESS_BYTES, 2 * _ADDRESS_BYTES
_V = SUB_BLOCKS * 8  # V's addresses behind K's
_SCORES = 4 * _ADDRESS_BYTES
_POSITIONS = _SCORES + MAX_QUERIES * SCORES_BYTES
_ARRAYS = _POSITIONS + 4 * MAX_VECTORS


_tile_size = njit(cache=True)(tile_size)


def attention_work_bytes(head_dim: int) -> int:
    """Bytes of the buffer, private to a worker, that attention_tile and combine_tile work in."""
    state = state_bytes.py_func(head_dim)
    return _ARRAYS + MAX_VECTORS * (4 * head_dim + 2 * state) + 2 * 2 * CHUNK * head_dim * 4


def attention_scratch_bytes(max_model_len: int, num_heads: int, head_dim: int) -> int:
    """Bytes of partial states that the team shares: those of max_partial_states."""
    return max_partial_states(max_model_len, num_heads) * state_bytes.py_func(head_dim)


def max_partial_states(max_model_len: int, num_heads: int) -> int:
    """plan_attention's max_states: 16 rows over the longest context, every 256 tokens of it apart."""
    return 16 * num_heads * -(-max_model_len // SPLIT)


@njit(cache=True)
def attention_tile(
    pool: KvPool,
    layer: int,
    kv_head: int,
    item: int,
    num_heads: int,
    window: int,
    scale: float,
    block_tables: int,
    q: int,
    q_row_bytes: int,
    out: int,
    out_row_bytes: int,
    partials: int,
    work: int,
) -> None:
    """attention_tile_ahead as it was measured to be best, with nothing to come after it."""
    attention_tile_ahead(
        PREFETCH, 0, 0, pool, layer, kv_head, item, num_heads, window, scale, block_tables,
        q, q_row_bytes, out, out_row_bytes, partials, work,
    )  # fmt: skip


@njit(cache=True)
def attention_tile_ahead(
    ahead: int,
    next_kv_head: int,
    next_item: int,
    pool: KvPool,
    layer: int,
    kv_head: int,
    item: int,
    num_heads: int,
    window: int,
    scale: float,
    block_tables: int,
    q: int,
    q_row_bytes: int,
    out: int,
    out_row_bytes: int,
    partials: int,
    work: int,
) -> None:
    """Attend with one item's rows and one kv_head's query heads.

    q and out are float32 rows of the batch, q_row_bytes and out_row_bytes apart, [num_heads * head_dim] at the start
    of each; block_tables is the StepPlan's int32 column. Causal; a query at p sees p - window + 1 … p (window 0: all).
    A whole item writes `out`, a partial one its states in `partials` (attention_scratch_bytes), for combine_tile to
    merge when all of them are there. `work` is this worker's own (attention_work_bytes).

    `ahead` is a constant, NOTHING, PREFETCH or COPY: what is done for the next chunk while this one is attended to. It
    changes no bit, and means something for float16 pools only. At the last chunk, PREFETCH asks for the first one of
    next_item and next_kv_head, which this worker will probably attend to next (0: nobody knows).
    """
    head_dim, group = pool.head_dim, num_heads // pool.num_kv_heads
    size = state_bytes(head_dim)
    queries = work + _ARRAYS
    totals = queries + MAX_VECTORS * 4 * head_dim  # of a whole item; its later splits are computed behind, then merged
    states = totals
    copies = totals + 2 * MAX_VECTORS * size
    next_copies = copies + 2 * CHUNK * head_dim * 4
    position, num_rows = read_i32(item + plan.POSITION), read_i32(item + plan.NUM_ROWS)
    num_vectors = num_rows * group
    partial = read_i32(item + plan.PARTIAL)
    first_query = q + read_i32(item + plan.ROW_BEGIN) * q_row_bytes + kv_head * group * head_dim * 4
    _pack_queries(first_query, q_row_bytes, num_rows, group, head_dim, scale, queries)
    for row in range(num_rows):
        for head in range(group):
            write_i32(work + _POSITIONS + 4 * (row * group + head), position + row)

    low, high = _visible_range(item, window)
    table = block_tables + 4 * read_i32(item + plan.TABLE_START)
    half = pool.element_bytes == F16_BYTES
    buffered = half and ahead == COPY
    copied = half and ahead != COPY and num_vectors > _DIRECT_VECTORS
    this, following = work + _THIS, work + _NEXT
    _find_chunk(pool, layer, kv_head, table, low // CHUNK * CHUNK, low, high, following)
    if buffered:
        _copy_chunk(pool, following, copies)
    for begin in range(low // CHUNK * CHUNK, high, CHUNK):
        this, following = following, this
        if begin + CHUNK < high or next_item == 0:
            more = min(begin + CHUNK, (high - 1) // CHUNK * CHUNK)
            _find_chunk(pool, layer, kv_head, table, more, low, high, following)
        else:
            next_low, next_high = _visible_range(next_item, window)
            next_table = block_tables + 4 * read_i32(next_item + plan.TABLE_START)
            next_begin = next_low // CHUNK * CHUNK
            _find_chunk(pool, layer, next_kv_head, next_table, next_begin, next_low, next_high, following)
        if begin % SPLIT == 0 or begin <= low:  # the first chunk of a split, or of all
            if partial >= 0:
                index = (begin // SPLIT - read_i32(item + plan.SPLIT_BEGIN)) * pool.num_kv_heads + kv_head
                states = partials + (partial + index * num_vectors) * size
            else:
                states = totals if begin <= low else totals + MAX_VECTORS * size
            clear_states(states, num_vectors, head_dim)
        if copied:
            _copy_chunk(pool, this, copies)
        sources = this
        if copied or buffered:
            sources = work + _COPIES
            _find_copies(copies, head_dim, sources)
        _attend_chunk(
            ahead, pool, sources, following, half and sources == this, next_copies if buffered else 0, begin,
            work + _POSITIONS, window, num_vectors, queries, states, work + _SCORES,
        )  # fmt: skip
        if buffered:
            copies, next_copies = next_copies, copies
        if partial < 0 and states != totals and (begin + CHUNK >= high or (begin + CHUNK) % SPLIT == 0):
            for j in range(num_vectors):
                merge(totals + j * size, states + j * size, head_dim)
    if partial < 0:
        first_out = out + read_i32(item + plan.ROW_BEGIN) * out_row_bytes + kv_head * group * head_dim * 4
        write_rows(totals, num_vectors, group, head_dim, first_out, out_row_bytes)


@njit(cache=True)
def combine_tile(
    pool: KvPool, kv_head: int, item: int, num_heads: int, out: int, out_row_bytes: int, partials: int, work: int
) -> None:
    """Merge the partial states of a combine item's rows, in order of their splits, and write their output."""
    head_dim, group = pool.head_dim, num_heads // pool.num_kv_heads
    size = state_bytes(head_dim)
    totals = work + _ARRAYS
    num_vectors = read_i32(item + plan.NUM_ROWS) * group
    clear_states(totals, num_vectors, head_dim)
    for split in range(read_i32(item + plan.SPLIT_END) - read_i32(item + plan.SPLIT_BEGIN)):
        first = read_i32(item + plan.PARTIAL) + (split * pool.num_kv_heads + kv_head) * num_vectors
        for j in range(num_vectors):
            merge(totals + j * size, partials + (first + j) * size, head_dim)
    first_out = out + read_i32(item + plan.ROW_BEGIN) * out_row_bytes + kv_head * group * head_dim * 4
    write_rows(totals, num_vectors, group, head_dim, first_out, out_row_bytes)


@njit(cache=True)
def _pack_queries(
    q: int, q_row_bytes: int, num_rows: int, group: int, head_dim: int, scale: float, queries: int
) -> None:
    """Queries times scale and log2(e), for each register tile [head_dim / 16, tile, 16]: it is read from front to back.

    Vector j is head j % group of row j // group. The softmax is one of powers of 2.
    """
    factor = splat_f32(np.float32(scale * _LOG2_E))
    num_vectors = num_rows * group
    row, head, begin, count = 0, 0, 0, _tile_size(num_vectors)
    for j in range(num_vectors):
        if j == begin + count:
            begin, count = j, _tile_size(num_vectors - j)
        source = q + row * q_row_bytes + head * head_dim * 4
        to = queries + (begin * head_dim + (j - begin) * 16) * 4
        for d in range(0, head_dim, 16):
            store_f32(to + d * count * 4, load_f32(source + d * 4) * factor)
        head += 1
        if head == group:
            row, head = row + 1, 0


@njit(cache=True)
def _visible_range(item: int, window: int) -> tuple[int, int]:
    """The positions that an item's rows see any of: low and behind high."""
    position = read_i32(item + plan.POSITION)
    low = max(lowest_visible(position, window), read_i32(item + plan.SPLIT_BEGIN) * SPLIT)
    return low, min(position + read_i32(item + plan.NUM_ROWS), read_i32(item + plan.SPLIT_END) * SPLIT)


@njit(cache=True)
def _find_chunk(
    pool: KvPool, layer: int, kv_head: int, table: int, begin: int, low: int, high: int, addresses: int
) -> None:
    """Addresses of K and of V of a chunk's four sub-blocks; outside low … high of one inside, not to be used."""
    lowest, highest = low // 16 * 16, (high - 1) // 16 * 16
    token = min(max(begin, lowest), highest)
    index = token // pool.block_size
    place = token - index * pool.block_size
    k = k_address(pool, read_i32(table + 4 * index), layer, kv_head)
    for c in range(SUB_BLOCKS):
        if token < min(begin + 16 * c, highest):
            token += 16
            place += 16
            if place == pool.block_size:
                index, place = index + 1, 0
                k = k_address(pool, read_i32(table + 4 * index), layer, kv_head)
        write_i64(addresses + 8 * c, k + place * pool.element_bytes)
        v = k + (pool.block_size + place) * pool.head_dim * pool.element_bytes
        write_i64(addresses + _V + 8 * c, v)


@njit(cache=True)
def _copy_chunk(pool: KvPool, source: int, copies: int) -> None:
    """Convert a chunk to float32: K [4, head_dim, 16] and V [64, head_dim]."""
    head_dim, k_row_bytes = pool.head_dim, pool.block_size * F16_BYTES
    for c in range(SUB_BLOCKS):
        k, v = read_i64(source + 8 * c), read_i64(source + _V + 8 * c)
        k_copy = copies + c * head_dim * 64
        v_copy = k_copy + SUB_BLOCKS * head_dim * 64
        for d in range(head_dim):
            store_f32(k_copy + d * 64, load_f16(k + d * k_row_bytes))
            store_f32(v_copy + d * 64, load_f16(v + d * 32))  # 16 rows of head_dim, one behind the other


@njit(cache=True)
def _find_copies(copies: int, head_dim: int, addresses: int) -> None:
    """Addresses of the sub-blocks that _copy_chunk, or COPY, has written."""
    for c in range(2 * SUB_BLOCKS):
        write_i64(addresses + 8 * c, copies + c * head_dim * 64)


@njit(cache=True)
def _attend_chunk(
    ahead: int,
    pool: KvPool,
    this: int,
    following: int,
    half: bool,
    next_copies: int,
    begin: int,
    positions: int,
    window: int,
    num_vectors: int,
    queries: int,
    states: int,
    scores: int,
) -> None:
    """One step of the online softmax, for all query vectors: a chunk's scores, weights and weighted values."""
    head_dim = pool.head_dim
    size = state_bytes(head_dim)
    v = this + _V
    is_first = True  # who looks ahead, for all
    j = 0
    while j < num_vectors:
        count = _tile_size(num_vectors - j)
        first, last = read_i32(positions + 4 * j), read_i32(positions + 4 * (j + count - 1))
        if last >= begin and lowest_visible(first, window) < begin + CHUNK:
            q = queries + j * head_dim * 4
            if is_first:
                _dot_keys(ahead, pool, count, half, q, this, scores, following, next_copies)
            else:
                _dot_keys(NOTHING, pool, count, half, q, this, scores, following, 0)
            for r in range(count):
                low, high = _visible(read_i32(positions + 4 * (j + r)), window, begin)
                if low > 0 or high < CHUNK:
                    hide(scores + r * SCORES_BYTES, low, high)
            if is_first and half and ahead == PREFETCH:
                _ask_for_values(following, head_dim)  # a softmax leaves memory idle
            raise_maxima(count, scores, states + j * size, head_dim)
            for r in range(count):
                low, high = _visible(read_i32(positions + 4 * (j + r)), window, begin)
                if low < high:
                    weigh(scores + r * SCORES_BYTES, states + (j + r) * size)
            # The tokens that all of the tile's rows see are added for all at once, those before and after row by row.
            all_low, all_high = _visible(last, window, begin)[0], _visible(first, window, begin)[1]
            if all_low >= all_high:
                all_low = all_high = CHUNK
            for r in range(count):
                low, high = _visible(read_i32(positions + 4 * (j + r)), window, begin)
                weights, state = scores + r * SCORES_BYTES, states + (j + r) * size
                if low < min(high, all_low):
                    _add_values(NOTHING, 1, half, weights, v, following, pool, low, min(high, all_low), state)
            if all_low < all_high:
                state = states + j * size
                if is_first:
                    _add_values(ahead, count, half, scores, v, following, pool, all_low, all_high, state)
                else:
                    _add_values(NOTHING, count, half, scores, v, following, pool, all_low, all_high, state)
            for r in range(count):
                low, high = _visible(read_i32(positions + 4 * (j + r)), window, begin)
                weights, state = scores + r * SCORES_BYTES, states + (j + r) * size
                if max(low, all_high) < high:
                    _add_values(NOTHING, 1, half, weights, v, following, pool, max(low, all_high), high, state)
            is_first = False
        j += count


@njit(cache=True)
def _ask_for_values(following: int, head_dim: int) -> None:
    """Ask for the next chunk's V, of float16."""
    for c in range(SUB_BLOCKS):
        v = read_i64(following + _V + 8 * c)
        for line in range(v, v + 16 * head_dim * F16_BYTES, 64):
            prefetch_l1(line)


@njit(cache=True)
def _visible(position: int, window: int, begin: int) -> tuple[int, int]:
    """Which tokens of the chunk at `begin` a query sees, as a range within 0 … 64."""
    low = min(max(lowest_visible(position, window) - begin, 0), CHUNK)
    return low, min(max(position + 1 - begin, 0), CHUNK)


@njit(cache=True)
def _dot_keys(
    ahead: int, pool: KvPool, count: int, half: bool, q: int, k: int, scores: int, following: int, next_copies: int
) -> None:
    next_row_bytes = pool.block_size * pool.element_bytes
    row_bytes = next_row_bytes if half or pool.element_bytes != F16_BYTES else 64
    dot_keys(
        literally(ahead), count, half, q, k, row_bytes, pool.head_dim, scores, following, next_row_bytes, next_copies
    )


@njit(cache=True)
def _add_values(
    ahead: int,
    count: int,
    half: bool,
    weights: int,
    v: int,
    following: int,
    pool: KvPool,
    begin: int,
    end: int,
    state: int,
) -> None:
    sums, sums_row_bytes, row_bytes = state + VALUES, state_bytes(pool.head_dim), pool.block_size * pool.element_bytes
    add_values(
        literally(ahead), count, half, weights, v, following, row_bytes, pool.head_dim, begin, end, sums, sums_row_bytes
    )
