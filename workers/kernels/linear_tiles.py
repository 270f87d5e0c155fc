"""Register tiles of the linear layer: some rows x one or two panels of 16 outputs, summed over n_in in registers.

The whole inner loop is emitted as one piece of code for each weight type and size of a tile. The order of operations of
an output is the same in all of them, so the size is chosen for speed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numba import types
from numba.extending import intrinsic

from workers.kernels.int8_dot import dot_s8s8, dot_u8s8, has_vnni
from workers.kernels.linear_pack import (
    BLOCK,
    WTYPE_BF16,
    WTYPE_F16,
    WTYPE_F32,
    WTYPE_Q4_0,
    WTYPE_Q4_1,
    WTYPE_Q8_0,
    block_bytes,
    is_quantized,
)
from workers.kernels.simd import F32, I8, I32, Simd, Value, isa_name, vector

# One block of a quantised activation row: 32 int8 q, then eight numbers of 4 bytes, together a cache line.
#     SCALE        float32, of the second half's q; of the first half's it is 2^k times that, with |k| <= MAX_FINER
#     START, _8, _128   int32, the bits of 1.5 * 2^(23 + k), less 0, 8 or 128 times the sum of the first half's q
#     ALIGN, _8, _128   float32, 1.5 * 2^23 - 1.5 * 2^(23 + k), less 0, 8 or 128 times the sum of the second half's q
#     SCALED_SUM   float32, the sum of scale * q
# 0, 8 and 128 are the zero points of Q4_1, Q4_0 and Q8_0. A dot product begins at START, the bits of a float whose last
# place is 2^k. With the first half's products added to them it is 1.5 * 2^(23 + k) + 2^k * dot; with ALIGN it becomes
# 1.5 * 2^23 + 2^k * dot, rounded to an integer: the first half's dot in the scale of the second, whose products follow.
RECORD_BYTES = 64
SCALE, START, START_8, START_128, ALIGN, ALIGN_8, ALIGN_128, SCALED_SUM = range(32, RECORD_BYTES, 4)
HALF = BLOCK // 2  # inputs that share a scale: in a block with an outlier, only half of its neighbours become coarse
MAX_FINER = 3  # so that Q8_0's dot, 2^3 * 16 * 128 * 127 and what the second half adds, stays below 2^22

# An int32 that starts at the bits of the float 1.5 * 2^23 and stays within 2^22 of them is, read as a float, 1.5 * 2^23
# plus what was added. One fused multiply-add then gives d * dot, rounded once: -1.5 * 2^23 * d is exact, since d is a
# float16. That is one operation where a conversion and a product are two.
MAGIC, MAGIC_FLOAT = 0x4B400000, 12582912.0

# Heights of register tiles of one panel and of two. A row and panel needs an integer and a float32 accumulator: 32
# registers of 16 lanes hold 12 of them. Two panels share the loads of inputs, which one panel waits for.
TILE_ROWS = (1, 2, 4, 8, 12) if isa_name() == "avx512" else (1, 2, 3, 4)
MAX_TILE_ROWS = TILE_ROWS[-1]
PAIR_ROWS = (2, 4, 6) if isa_name() == "avx512" else (1, 2)
ALL_WTYPES = (WTYPE_F32, WTYPE_F16, WTYPE_BF16, WTYPE_Q4_0, WTYPE_Q4_1, WTYPE_Q8_0)

# Shared memory has no huge pages, so the hardware's prefetcher stops at every 4 KB of the one stream that weights are.
# They come past L2 (locality 0), which then keeps what sockets and Python need between steps: 4 % of a single stream's.
PREFETCH_BYTES = 8192
_PAST_L2 = 0

Panel = tuple[Value, Value, Value]  # where it begins and ends, and what is read behind its end
# From the number of a step, addresses of the rows, addresses of the step's weights in each panel, and the totals of all
# rows x panels: the new totals.
Step = Callable[[Value, list[Value], list[Value], list[Value]], list[Value]]


@intrinsic
def register_tile(
    typing_context: Any, num_rows: Any, wtype: Any, panel: Any, steps: Any, x: Any, row_stride: Any, last_row: Any,
    sums: Any, sums_stride: Any, end: Any, following: Any,
) -> Any:
    """sums[row, 16] float32 = the panel's weights times x[row], for num_rows (one of TILE_ROWS) rows.

    `steps` counts blocks of a quantised type, or inputs of a float type. Row i of x is at x + row_stride * min(i,
    last_row): a tile may be taller than what is left. Row i of sums is at sums + sums_stride * i. Weights are asked for
    PREFETCH_BYTES before they are read, in the order of reading: up to `end`, and then from `following` on.
    """

    def generate(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
        s = Simd(builder)
        height, kind, panel, *rest, end, following = (s.wrap(arg) for arg in args)

        def ends(stride: Value) -> list[Panel]:
            return [(panel, end, following)]

        _emit_tiles(s, TILE_ROWS, height, kind, ends, *rest)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 11), generate


@intrinsic
def pair_tile(
    typing_context: Any, num_rows: Any, wtype: Any, panel: Any, steps: Any, x: Any, row_stride: Any, last_row: Any,
    sums: Any, sums_stride: Any, following: Any,
) -> Any:
    """sums[row, 32] = the weights of two panels times x[row], for num_rows (one of PAIR_ROWS) rows.

    As register_tile, whose bits it gives. Behind the two panels, two more are asked for that begin at `following`.
    """

    def generate(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
        s = Simd(builder)
        height, kind, panel, *rest, following = (s.wrap(arg) for arg in args)

        def ends(stride: Value) -> list[Panel]:
            second = panel + stride
            return [(panel, second, following), (second, second + stride, following + stride)]

        _emit_tiles(s, PAIR_ROWS, height, kind, ends, *rest)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 10), generate


def _emit_tiles(
    s: Simd, heights: Sequence[int], height: Value, kind: Value, panels: Callable[[Value], list[Panel]], steps: Value,
    x: Value, row_stride: Value, last_row: Value, sums: Value, sums_stride: Value,
) -> None:
    """The code of all tiles, and a switch to the one that is asked for. `panels` is given the bytes of a panel."""

    def tile(wtype: int, num_rows: int) -> None:
        step_bytes, step = _quantized_step(s, wtype) if is_quantized(wtype) else _float_step(s, wtype)
        # The last row is repeated.
        rows = [x + row_stride * s.min(s.i64(row), last_row) for row in range(num_rows)]
        streams = panels(steps * step_bytes)

        def body(i: Value, totals: list[Value]) -> list[Value]:
            at = [panel + i * step_bytes for panel, _, _ in streams]
            for stream, (_, end, following) in zip(at, streams, strict=True):
                coming = stream + PREFETCH_BYTES // step_bytes * step_bytes
                coming = s.select(coming < end, coming, coming + (following - end))
                for line in range(0, step_bytes, 64):
                    s.prefetch(coming, line, _PAST_L2)
            return step(i, rows, at, totals)

        totals = s.loop(0, steps, 1, [s.f32(0.0)] * (num_rows * len(streams)), body)
        for i, total in enumerate(totals):
            row, panel = divmod(i, len(streams))
            s.store(sums + sums_stride * row, total, 64 * panel)

    s.switch(kind, ALL_WTYPES, lambda wtype: s.switch(height, heights, lambda num_rows: tile(wtype, num_rows)))


def _quantized_step(s: Simd, wtype: int) -> tuple[int, Step]:
    """Bytes of a block, and the code that adds d * dot * scale + m * scaled_sum to the totals."""
    size = block_bytes(wtype)
    # The zero point of the weights' unsigned quants chooses among a record's three START and ALIGN.
    zero = {WTYPE_Q4_0: 4, WTYPE_Q8_0: 8 if has_vnni(s) else 0}.get(wtype, 0)

    def step(i: Value, rows: list[Value], streams: list[Value], totals: list[Value]) -> list[Value]:
        records = [row + i * RECORD_BYTES for row in rows]

        def splats(load: Callable[[Value, int], Value], place: int) -> list[Value]:
            """A number of each record, for each of the totals."""
            return [v for v in [load(record, place) for record in records] for _ in streams]

        def add_half(dots: list[Value], half: int) -> list[Value]:
            for k in range(half * HALF, (half + 1) * HALF, 4):
                weights = [_quants(s, wtype, stream, k // 4) for stream in streams] * len(records)
                inputs = splats(s.load_splat_i32, k)
                dots = [_dot(s, wtype, *values) for values in zip(dots, weights, inputs, strict=True)]
            return dots

        dots = add_half(splats(s.load_splat_i32, START + zero), 0)
        aligned = zip(dots, splats(s.load_splat_f32, ALIGN + zero), strict=True)
        dots = [s.bitcast(s.bitcast(dot, vector(F32)) + align, vector(I32)) for dot, align in aligned]
        dots = add_half(dots, 1)
        scales = [s.load_f16(stream) for stream in streams] * len(records)
        if s.has_fma:
            minus_magic = [d * -MAGIC_FLOAT for d in scales[: len(streams)]] * len(records)
            terms = zip(dots, scales, minus_magic, strict=True)
            products = [s.fma(s.bitcast(dot, vector(F32)), d, minus_magic_d) for dot, d, minus_magic_d in terms]
        else:
            products = [s.to_f32(dot - MAGIC) * d for dot, d in zip(dots, scales, strict=True)]
        totals = [s.fma(*values) for values in zip(products, splats(s.load_splat_f32, SCALE), totals, strict=True)]
        if wtype == WTYPE_Q4_1:
            minima = [s.load_f16(stream, 32) for stream in streams] * len(records)
            scaled_sums = splats(s.load_splat_f32, SCALED_SUM)
            totals = [s.fma(*values) for values in zip(minima, scaled_sums, totals, strict=True)]
        return totals

    return size, step


def _float_step(s: Simd, wtype: int) -> tuple[int, Step]:
    """Bytes of one input's weights, and the code that adds w * x to the totals."""
    load = {WTYPE_F32: s.load_f32, WTYPE_F16: s.load_f16, WTYPE_BF16: s.load_bf16}[wtype]

    def step(k: Value, rows: list[Value], streams: list[Value], totals: list[Value]) -> list[Value]:
        weights = [load(stream) for stream in streams] * len(rows)
        inputs = [v for v in [s.load_splat_f32(row + k * 4) for row in rows] for _ in streams]
        return [s.fma(*values) for values in zip(weights, inputs, totals, strict=True)]

    return 64 if wtype == WTYPE_F32 else 32, step


def _quants(s: Simd, wtype: int, stream: Value, k: int) -> Value:
    """Unsigned quants of 16 outputs x the k-th 4 inputs, as int32 [16] of 4 bytes."""
    if wtype == WTYPE_Q8_0:
        return s.load(stream, vector(I32), block_bytes(wtype) - 512 + 64 * k)
    packed = s.load(stream, vector(I32), block_bytes(wtype) - 256 + 64 * (k // 2))
    return (packed >> 4 if k % 2 else packed) & 0x0F0F0F0F


def _dot(s: Simd, wtype: int, dot: Value, weights: Value, inputs: Value) -> Value:
    w, x = s.bitcast(weights, vector(I8, 64)), s.bitcast(inputs, vector(I8, 64))
    if wtype == WTYPE_Q8_0 and not has_vnni(s):
        return dot_s8s8(s, dot, w ^ -128, x)
    return dot_u8s8(s, dot, w, x)
