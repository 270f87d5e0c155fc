"""Register tiles of the linear layer: some rows x one panel of 16 outputs, summed over all of n_in in registers.

The whole inner loop is emitted as one piece of code for each weight type and number of rows. The order of operations of
an output is the same in all of them, so the number of rows is chosen for speed alone.
"""

from __future__ import annotations

from collections.abc import Sequence
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

# One block of a quantised activation row: 32 int8 q; then, for each half of it, float32 scale, and int32 MAGIC - 8 *
# sum(q) and MAGIC - 128 * sum(q), which the dot products of Q4_0 and Q8_0 start from (their zero points); then float32
# scale * sum(q) of both halves together, and 4 bytes of nothing, so that a record is a cache line.
RECORD_BYTES, SCALE, START_8, START_128, SCALED_SUM = 64, 32, 40, 48, 56
HALF = BLOCK // 2  # inputs that share a scale: in a block with an outlier, only half of its neighbours become coarse

# An int32 that starts at the bits of the float 1.5 * 2^23 and stays within 2^22 of them is, read as a float, 1.5 * 2^23
# plus what was added. One fused multiply-add then gives d * dot, rounded once: -1.5 * 2^23 * d is exact, since d is a
# float16. That is one operation where a conversion and a product are two.
MAGIC, MAGIC_FLOAT = 0x4B400000, 12582912.0

# Heights of register tiles. A row needs an integer and a float32 accumulator: 32 registers of 16 lanes hold 12 rows.
TILE_ROWS = (1, 2, 4, 8, 12) if isa_name() == "avx512" else (1, 2, 3, 4)
MAX_TILE_ROWS = TILE_ROWS[-1]
ALL_WTYPES = (WTYPE_F32, WTYPE_F16, WTYPE_BF16, WTYPE_Q4_0, WTYPE_Q4_1, WTYPE_Q8_0)

# Shared memory has no huge pages, so the hardware's prefetcher stops at every 4 KB of the one stream that weights are.
# They come past L2 (locality 0), which then keeps what sockets and Python need between steps: 4 % of a single stream's.
PREFETCH_BYTES = 8192
_PAST_L2 = 0


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
        height, kind, *rest = args

        def tile(wtype: int, num_rows: int) -> None:
            emit = emit_quantized_tile if is_quantized(wtype) else emit_float_tile
            emit(s, wtype, num_rows, *rest)

        s.switch(kind, ALL_WTYPES, lambda wtype: s.switch(height, TILE_ROWS, lambda num_rows: tile(wtype, num_rows)))
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 11), generate


def emit_quantized_tile(
    s: Simd, wtype: int, num_rows: int, panel: Any, num_blocks: Any, x: Any, row_stride: Any, last_row: Any, sums: Any,
    sums_stride: Any, end: Any, following: Any,
) -> None:
    """sums = scale * (d * dot) for each half, + m * scaled_sum; block after block."""
    rows = _rows(s, x, row_stride, last_row, num_rows)
    size = block_bytes(wtype)

    def block(i: Value, totals: list[Value]) -> list[Value]:
        stream = s.wrap(panel) + i * size
        records = [row + i * RECORD_BYTES for row in rows]
        coming = _coming(s, stream, PREFETCH_BYTES // size * size, end, following)
        for line in range(0, size, 64):
            s.prefetch(coming, line, _PAST_L2)
        d = s.load_f16(stream)
        minus_magic_d = d * -MAGIC_FLOAT
        for half in (0, 1):
            dots = [_dot_start(s, wtype, record, half) for record in records]
            for k in range(half * HALF, (half + 1) * HALF, 4):
                weights = _quants(s, wtype, stream, k // 4)
                inputs = [s.load_splat_i32(record, k) for record in records]
                dots = [_dot(s, wtype, dot, weights, values) for dot, values in zip(dots, inputs, strict=True)]
            if s.has_fma:
                products = [s.fma(s.bitcast(dot, vector(F32)), d, minus_magic_d) for dot in dots]
            else:
                products = [s.to_f32(dot - MAGIC) * d for dot in dots]
            scales = [s.load_splat_f32(record, SCALE + 4 * half) for record in records]
            totals = [s.fma(*terms) for terms in zip(products, scales, totals, strict=True)]
        if wtype == WTYPE_Q4_1:
            m = s.load_f16(stream, 32)
            scaled_sums = [s.load_splat_f32(record, SCALED_SUM) for record in records]
            totals = [s.fma(m, *terms) for terms in zip(scaled_sums, totals, strict=True)]
        return totals

    _store(s, sums, sums_stride, s.loop(0, num_blocks, 1, [s.f32(0.0)] * num_rows, block))


def emit_float_tile(
    s: Simd, wtype: int, num_rows: int, panel: Any, n_in: Any, x: Any, row_stride: Any, last_row: Any, sums: Any,
    sums_stride: Any, end: Any, following: Any,
) -> None:
    """sums = w * x, one fused multiply-add after the other."""
    load = {WTYPE_F32: s.load_f32, WTYPE_F16: s.load_f16, WTYPE_BF16: s.load_bf16}[wtype]
    size = 64 if wtype == WTYPE_F32 else 32
    rows = _rows(s, x, row_stride, last_row, num_rows)

    def step(k: Value, totals: list[Value]) -> list[Value]:
        stream = s.wrap(panel) + k * size
        s.prefetch(_coming(s, stream, PREFETCH_BYTES, end, following), 0, _PAST_L2)
        weights = load(stream)
        inputs = [s.load_splat_f32(row + k * 4) for row in rows]
        return [s.fma(weights, *terms) for terms in zip(inputs, totals, strict=True)]

    _store(s, sums, sums_stride, s.loop(0, n_in, 1, [s.f32(0.0)] * num_rows, step))


def _coming(s: Simd, stream: Value, distance: int, end: Any, following: Any) -> Value:
    """What will be read `distance` bytes from here, where reading goes on at `following` behind `end`."""
    coming = stream + distance
    return s.select(coming < s.wrap(end), coming, coming + (s.wrap(following) - s.wrap(end)))


def _rows(s: Simd, x: Any, stride: Any, last_row: Any, num_rows: int) -> list[Value]:
    """Addresses of the rows, the last one repeated."""
    return [s.wrap(x) + s.wrap(stride) * s.min(s.i64(row), s.wrap(last_row)) for row in range(num_rows)]


def _store(s: Simd, sums: Any, stride: Any, totals: list[Value]) -> None:
    for row, total in enumerate(totals):
        s.store(s.wrap(sums) + s.wrap(stride) * row, total)


def _dot_start(s: Simd, wtype: int, record: Value, half: int) -> Value:
    """MAGIC, minus the weights' zero point times the sum of the inputs of a half."""
    if wtype == WTYPE_Q4_0:
        return s.load_splat_i32(record, START_8 + 4 * half)
    if wtype == WTYPE_Q8_0 and has_vnni(s):
        return s.load_splat_i32(record, START_128 + 4 * half)
    return s.i32(MAGIC)


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
