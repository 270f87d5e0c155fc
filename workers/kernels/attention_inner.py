"""The two inner loops of attention, each over register tiles of several query vectors: q·K and p·V.

Every output element is one chain of fused multiply-adds in ascending order (over head_dim, over tokens), so the number
of query vectors in a tile never shows in its bits. Knows nothing of masks, tables or softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from workers.kernels.simd import I64, Simd, Value, isa_name

CHUNK = 64  # tokens whose scores are computed, and whose softmax is taken, at a time
SUB_BLOCKS = 4  # of 16 tokens, in a chunk
SCORES_BYTES = CHUNK * 4

# Query vectors and columns (vectors of 16) of the largest register tile. With AVX-512, 6 x 4 accumulators are 24 of 32
# registers; with AVX2, where a vector is two registers, 6 x 1 are 12 of 16.
MAX_QUERIES, _MAX_COLUMNS = {"avx512": (6, 4), "avx2": (6, 1), "generic": (2, 1)}[isa_name()]
TILE_SIZES = tuple(n for n in (1, 2, 3, 4, 6) if n <= MAX_QUERIES)
_UNROLL = 2

# What the loops do for the next chunk on the way through this one. Values of the literal `ahead`.
NOTHING = 0
# Ask for its cache lines (of float16 pools). V's, and with AVX-512 K's too, are asked for twice, which was measured
# to be quicker: a processor seems to forget what it is asked for while all its miss buffers are busy.
PREFETCH = 1
COPY = 2  # double buffering: convert it to float32 in the other one of two buffers


def tile_size(left: int) -> int:
    """How many query vectors the next register tile takes, of so many that are left."""
    if left >= MAX_QUERIES:
        return MAX_QUERIES
    return 3 if left == 5 else left


@intrinsic(prefer_literal=True)
def dot_keys(
    typing_context: Any,
    ahead: Any,
    num_queries: Any,
    is_f16: Any,
    q: Any,
    k_addresses: Any,
    k_row_bytes: Any,
    head_dim: Any,
    scores: Any,
    next_addresses: Any,
    next_row_bytes: Any,
    next_copies: Any,
) -> Any:
    """scores[r, t] = sum over d of q[r, d] k[d, t], for a chunk's 64 tokens.

    q is float32 [head_dim / 16, num_queries, 16], num_queries a tile_size; scores is float32 [num_queries, 64].
    k_addresses points to four addresses, one for each sub-block of 16 tokens; the rows behind them, one for each d, are
    k_row_bytes apart.

    next_addresses points to the addresses of the next chunk's K, then of its V. COPY writes them, which are float16, to
    next_copies (unless it is 0) as float32 K [4, head_dim, 16] and V [64, head_dim].
    """

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        simd = Simd(builder)
        count, is_f16, q, k_at, row_bytes, head_dim, out, next_at, next_row_bytes, copies = map(simd.wrap, args[1:])

        def columns(count: int, half: bool, first: int) -> None:
            places = range(first, first + _MAX_COLUMNS)
            sources = k_at, next_at, next_at + 8 * SUB_BLOCKS
            bases, next_k, next_v = ([simd.load(at, I64, 8 * c) for c in places] for at in sources)

            def prefetch(d: Value) -> None:
                for next_k_base in next_k:
                    simd.prefetch(next_k_base + d * next_row_bytes)

            def look_ahead(d: Value, u: int) -> None:
                if half and ahead.literal_value == PREFETCH and u == 0:
                    prefetch(d)
                elif half and ahead.literal_value == PREFETCH:
                    with builder.if_then((next_row_bytes > 32).llvm):  # else the two rows share a cache line
                        prefetch(d)
                for c, next_k_base, next_v_base in zip(places, next_k, next_v, strict=True):
                    if not half and ahead.literal_value == COPY:
                        with builder.if_then((copies > 0).llvm):
                            copy = copies + (head_dim * c + d) * 64
                            simd.store(copy, simd.load_f16(next_k_base + d * next_row_bytes))
                            simd.store(copy + head_dim * SCORES_BYTES, simd.load_f16(next_v_base + d * 32))

            def body(d: Value, sums: list[Value]) -> list[Value]:
                queries = q + (d >> 4) * (64 * count) + (d & 15) * 4
                for u in range(_UNROLL):
                    look_ahead(d + u, u)
                    row = (d + u) * row_bytes
                    k = [simd.load_f16(base + row) if half else simd.load_f32(base + row) for base in bases]
                    for r in range(count):
                        weight = simd.load_splat_f32(queries, 64 * r + 4 * u)
                        for c in range(_MAX_COLUMNS):
                            sums[r * _MAX_COLUMNS + c] = simd.fma(weight, k[c], sums[r * _MAX_COLUMNS + c])
                return sums

            sums = simd.loop(0, head_dim, _UNROLL, [simd.f32(0.0)] * (count * _MAX_COLUMNS), body)
            for r in range(count):
                for c in range(_MAX_COLUMNS):
                    simd.store(out, sums[r * _MAX_COLUMNS + c], r * SCORES_BYTES + (first + c) * 64)

        def emit(count: int, half: bool) -> None:
            for first in range(0, SUB_BLOCKS, _MAX_COLUMNS):
                columns(count, half, first)

        _for_each_tile_size(simd, count, is_f16, emit)
        return context.get_dummy_value()

    return types.void(ahead, types.int64, types.boolean, *(types.int64,) * 8), generate


@intrinsic(prefer_literal=True)
def add_values(
    typing_context: Any,
    ahead: Any,
    num_queries: Any,
    is_f16: Any,
    weights: Any,
    v_addresses: Any,
    next_addresses: Any,
    next_row_bytes: Any,
    head_dim: Any,
    token_begin: Any,
    token_end: Any,
    sums: Any,
    sums_row_bytes: Any,
) -> Any:
    """sums[r, d] += weights[r, t] v[t, d] for tokens token_begin to token_end of a chunk, in this order.

    weights is float32 [num_queries, 64]; v_addresses points to four addresses, each of a sub-block [16, head_dim];
    sums is float32, its rows sums_row_bytes apart. num_queries, next_addresses and next_row_bytes as in dot_keys.
    """

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        simd = Simd(builder)
        count, is_f16, weights, v_at, next_at, next_row_bytes, head_dim, begin, end, *sums = map(simd.wrap, args[1:])
        out, out_row_bytes = sums

        def emit(count: int, half: bool) -> None:
            element_bytes = 2 if half else 4
            row_bytes = head_dim * element_bytes

            def look_ahead(t: Value, d: Value, place: Value, width: int) -> None:
                v = simd.load(next_at + (t >> 4) * 8, I64, 8 * SUB_BLOCKS) + place
                for line in range(0, width * 16 * element_bytes, 64):
                    simd.prefetch(v, line)
                if width == SUB_BLOCKS:  # 64 tokens meet 64 rows of K: four of a sub-block's each
                    k = simd.load(next_at + (t >> 4) * 8, I64) + (d + (t & 15) * 4) * next_row_bytes
                    for i in (0, 2):
                        simd.prefetch(k + next_row_bytes * i)
                    with builder.if_then((next_row_bytes > 32).llvm):  # else two rows share a cache line
                        for i in (1, 3):
                            simd.prefetch(k + next_row_bytes * i)

            def columns(d: Value, width: int) -> None:
                rows = [out + out_row_bytes * r + d * 4 for r in range(count)]
                column = d * element_bytes

                def body(t: Value, sums: list[Value]) -> list[Value]:
                    place = (t & 15) * row_bytes + column
                    row = simd.load(v_at + (t >> 4) * 8, I64) + place
                    if half and ahead.literal_value == PREFETCH:
                        look_ahead(t, d, place, width)
                    v = [(simd.load_f16 if half else simd.load_f32)(row, c * 16 * element_bytes) for c in range(width)]
                    for r in range(count):
                        weight = simd.load_splat_f32(weights + t * 4, r * SCORES_BYTES)
                        for c in range(width):
                            sums[r * width + c] = simd.fma(weight, v[c], sums[r * width + c])
                    return sums

                before = [simd.load_f32(row, c * 64) for row in rows for c in range(width)]
                after = simd.loop(begin, end, 1, before, body)
                for r, row in enumerate(rows):
                    for c in range(width):
                        simd.store(row, after[r * width + c], c * 64)

            def tiles(d: Value, carried: list[Value]) -> list[Value]:
                columns(d, _MAX_COLUMNS)
                return carried

            width = _MAX_COLUMNS
            done = head_dim & -(16 * width)
            simd.loop(0, done, 16 * width, [], tiles)
            while width > 1:
                width //= 2
                with builder.if_then((head_dim & (16 * width)).equals(16 * width).llvm):
                    columns(done, width)
                done = done + (head_dim & (16 * width))

        _for_each_tile_size(simd, count, is_f16, emit)
        return context.get_dummy_value()

    return types.void(ahead, types.int64, types.boolean, *(types.int64,) * 9), generate


def _for_each_tile_size(simd: Simd, count: Value, is_f16: Value, emit: Callable[[int, bool], None]) -> None:
    """Emit code for every tile size and element type, and a switch to the one that is asked for."""
    builder = simd.builder
    end = builder.append_basic_block("tile.end")
    case = count * 2 + simd.extend(is_f16, I64)
    switch = builder.switch(case.llvm, end)
    for size in TILE_SIZES:
        for half in (False, True):
            block = builder.append_basic_block(f"tile.{size}.{'f16' if half else 'f32'}")
            switch.add_case(simd.i64(2 * size + half).llvm, block)
            builder.position_at_end(block)
            emit(size, half)
            builder.branch(end)
    builder.position_at_end(end)
