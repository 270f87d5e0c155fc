"""Register tiles of the linear layer: rows x panels of 16 outputs, accumulated over all of n_in in registers.

Each function emits the whole inner loop as one intrinsic. The order of operations of an output is the same in every
tile shape, so shapes are chosen for speed alone. Missing rows and panels repeat the last one; the caller drops them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numba import types
from numba.extending import intrinsic

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
from workers.kernels.simd import F32, I8, I32, Simd, Value, vector

# One block of a quantised activation row: 32 int8 q, then float32 scale and scale * sum(q), then int32
# MAGIC - 8 * sum(q) and MAGIC - 128 * sum(q), which the dot products of Q4_0 and Q8_0 start from (their zero points).
RECORD_BYTES, SCALE, SCALED_SUM, START_8, START_128 = 48, 32, 36, 40, 44

# An int32 that starts at the bits of the float 1.5 * 2^23 and stays within 2^22 of them is, read as a float, 1.5 * 2^23
# plus what was added. One fused multiply-add then gives d * dot, rounded once: -1.5 * 2^23 * d is exact, since d is a float16.
MAGIC, MAGIC_FLOAT = 0x4B400000, 12582912.0

# An unpacked block (of Q4_0, Q4_1): float32 d, -MAGIC_FLOAT * d and m [16 outputs], then bytes [8, 16 outputs, 4 inputs].
UNPACKED_BYTES, UNPACKED_QUANTS = 704, 192

SUM_PANELS = 4  # the most panels that a register tile has
SUM_ROW_BYTES = SUM_PANELS * 64

ALL_WTYPES = (WTYPE_F32, WTYPE_F16, WTYPE_BF16, WTYPE_Q4_0, WTYPE_Q4_1, WTYPE_Q8_0)
UNPACKABLE = (WTYPE_Q4_0, WTYPE_Q4_1)


@intrinsic(prefer_literal=True)
def linear_tile_sums(
    typing_context: Any, num_rows: Any, num_panels: Any, wtype: Any, w: Any, panel_stride: Any, last_panel: Any,
    steps: Any, x: Any, row_stride: Any, last_row: Any, sums: Any, first: Any,
) -> Any:
    """sums[row, panel] += w x over `steps` blocks of a quantised type, or `steps` inputs of a float type.

    Where `first` is 1, sums = w x: what they held before is not read. sums are float32 [num_rows, SUM_PANELS, 16]; those of num_panels panels are used. num_rows and num_panels are constants. Panels are at w + panel_stride * min(panel, last_panel), rows at
    x + row_stride * min(row, last_row).
    """

    def generate(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
        def tile(s: Simd, kind: int) -> None:
            shape = num_rows.literal_value, num_panels.literal_value
            if is_quantized(kind):
                emit_quantized_tile(s, kind, False, *shape, *args[3:])
            else:
                emit_float_tile(s, kind, *shape, *args[3:])

        _for_wtype(Simd(builder), args[2], ALL_WTYPES, tile)
        return context.get_dummy_value()

    return types.void(num_rows, num_panels, *(types.int64,) * 10), generate


@intrinsic(prefer_literal=True)
def unpacked_tile_sums(
    typing_context: Any, num_rows: Any, num_panels: Any, wtype: Any, w: Any, panel_stride: Any, last_panel: Any,
    num_blocks: Any, x: Any, row_stride: Any, last_row: Any, sums: Any, first: Any,
) -> Any:
    """linear_tile_sums, the same bits, of panels that unpack_blocks has written."""

    def generate(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
        def tile(s: Simd, kind: int) -> None:
            emit_quantized_tile(s, kind, True, num_rows.literal_value, num_panels.literal_value, *args[3:])

        _for_wtype(Simd(builder), args[2], UNPACKABLE, tile)
        return context.get_dummy_value()

    return types.void(num_rows, num_panels, *(types.int64,) * 10), generate


@intrinsic
def unpack_blocks(typing_context: Any, wtype: Any, stream: Any, num_blocks: Any, out: Any) -> Any:
    """Write blocks of one panel unpacked (UNPACKED_BYTES each): work that many rows then share. Q4_0 and Q4_1 only."""

    def generate(context: Any, builder: Any, sig: Any, args: Sequence[Any]) -> Any:
        _for_wtype(Simd(builder), args[0], UNPACKABLE, lambda s, kind: emit_unpack(s, kind, *args[1:]))
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4), generate


def emit_unpack(s: Simd, wtype: int, stream: Any, num_blocks: Any, out: Any) -> None:
    """The code of `unpack_blocks`."""

    def block(i: Value, _: list[Value]) -> list[Value]:
        source, target = s.wrap(stream) + i * block_bytes(wtype), s.wrap(out) + i * UNPACKED_BYTES
        for index, v in enumerate(_scales(s, wtype, False, source)):
            s.store(target, v, 64 * index)
        for k in range(BLOCK // 4):
            s.store(target, _quants(s, wtype, False, source, k), UNPACKED_QUANTS + 64 * k)
        return []

    s.loop(0, num_blocks, 1, [], block)


def emit_quantized_tile(
    s: Simd, wtype: int, unpacked: bool, num_rows: int, num_panels: int, w: Any, panel_stride: Any, last_panel: Any,
    num_blocks: Any, x: Any, row_stride: Any, last_row: Any, sums: Any, first: Any, prefetch_bytes: int = 4096,
) -> None:
    """sums += scale * (d * dot) + m * scaled_sum, block after block; panels as packed, or as unpack_blocks leaves them."""
    panels = _clamped(s, w, panel_stride, last_panel, num_panels)
    rows = _clamped(s, x, row_stride, last_row, num_rows)
    pairs = [(row, panel) for row in range(num_rows) for panel in range(num_panels)]
    size = UNPACKED_BYTES if unpacked else block_bytes(wtype)

    def block(i: Value, totals: list[Value]) -> list[Value]:
        streams = [panel + i * size for panel in panels]
        records = [row + i * RECORD_BYTES for row in rows]
        if num_rows == 1:
            for stream in streams:
                for line in range(0, size, 64):
                    s.prefetch(stream, prefetch_bytes + line)
        starts = [_dot_start(s, wtype, record) for record in records]
        dots = [starts[row] for row, _ in pairs]
        for k in range(BLOCK // 4):
            quants = [_quants(s, wtype, unpacked, stream, k) for stream in streams]
            for row, record in enumerate(records):
                inputs = s.bitcast(s.load_splat_i32(record, _input_offset(wtype, k)), vector(I8, 64))
                for panel, weights in enumerate(quants):
                    index = row * num_panels + panel
                    dots[index] = _dot(s, wtype, dots[index], weights, inputs)
        scales = [_scales(s, wtype, unpacked, stream) for stream in streams]
        row_scales = [s.load_splat_f32(record, SCALE) for record in records]
        row_sums = [s.load_splat_f32(record, SCALED_SUM) for record in records]
        results = []
        for (row, panel), dot, total in zip(pairs, dots, totals, strict=True):
            d, minus_magic_d, *m = scales[panel]
            if s.has_fma:
                product = s.fma(s.bitcast(dot, vector(F32)), d, minus_magic_d)
            else:
                product = s.to_f32(dot - MAGIC) * d
            total = s.fma(product, row_scales[row], total)
            results.append(s.fma(m[0], row_sums[row], total) if m else total)
        return results

    _accumulate(s, sums, first, num_rows, num_panels, num_blocks, block)


def emit_float_tile(
    s: Simd, wtype: int, num_rows: int, num_panels: int, w: Any, panel_stride: Any, last_panel: Any, n_in: Any,
    x: Any, row_stride: Any, last_row: Any, sums: Any, first: Any, prefetch_bytes: int = 4096,
) -> None:
    """sums += w * x, one fused multiply-add after the other."""
    load = {WTYPE_F32: s.load_f32, WTYPE_F16: s.load_f16, WTYPE_BF16: s.load_bf16}[wtype]
    size = 64 if wtype == WTYPE_F32 else 32
    panels = _clamped(s, w, panel_stride, last_panel, num_panels)
    rows = _clamped(s, x, row_stride, last_row, num_rows)

    def step(k: Value, totals: list[Value]) -> list[Value]:
        if num_rows == 1:
            for panel in panels:
                s.prefetch(panel + k * size, prefetch_bytes)
        weights = [load(panel + k * size) for panel in panels]
        inputs = [s.load_splat_f32(row + k * 4) for row in rows]
        products = [(weight, value) for value in inputs for weight in weights]
        return [s.fma(weight, value, total) for (weight, value), total in zip(products, totals, strict=True)]

    _accumulate(s, sums, first, num_rows, num_panels, n_in, step)


def _for_wtype(s: Simd, wtype: Any, kinds: Sequence[int], emit: Callable[[Simd, int], None]) -> None:
    """Code for each kind, of which the one that wtype names is run."""
    builder = s.builder
    after = builder.append_basic_block("wtype.end")
    switch = builder.switch(wtype, after)
    for kind in kinds:
        block = builder.append_basic_block(f"wtype.{kind}")
        switch.add_case(kind, block)
        builder.position_at_end(block)
        emit(s, kind)
        builder.branch(after)
    builder.position_at_end(after)


def _clamped(s: Simd, base: Any, stride: Any, last: Any, count: int) -> list[Value]:
    """Addresses of items 0…count-1, the last one repeated after `last`."""
    base, stride, last = s.wrap(base), s.wrap(stride), s.wrap(last)
    return [base + stride * s.min(s.i64(index), last) for index in range(count)]


def _dot_start(s: Simd, wtype: int, record: Value) -> Value:
    """MAGIC, minus the weights' zero point times the sum of the inputs."""
    if wtype == WTYPE_Q4_0:
        return s.load_splat_i32(record, START_8)
    if wtype == WTYPE_Q8_0 and s.has_vnni:
        return s.load_splat_i32(record, START_128)
    return s.i32(MAGIC)


def _dot(s: Simd, wtype: int, acc: Value, weights: Value, inputs: Value) -> Value:
    if wtype == WTYPE_Q8_0 and not s.has_vnni:
        return s.dot_s8s8(acc, weights ^ -128, inputs)
    return s.dot_u8s8(acc, weights, inputs)


def _scales(s: Simd, wtype: int, unpacked: bool, stream: Value) -> list[Value]:
    """float32 d, -MAGIC_FLOAT * d and, for Q4_1, m of a block."""
    if unpacked:
        return [s.load_f32(stream, offset) for offset in ((0, 64, 128) if wtype == WTYPE_Q4_1 else (0, 64))]
    d = s.load_f16(stream)
    return [d, d * -MAGIC_FLOAT, *([s.load_f16(stream, 32)] if wtype == WTYPE_Q4_1 else [])]


def _quants(s: Simd, wtype: int, unpacked: bool, stream: Value, k: int) -> Value:
    """Unsigned quants of 16 outputs x the k-th 4 inputs in stream order, as bytes [64]."""
    bytes_ = vector(I8, 64)
    if unpacked:
        return s.load(stream, bytes_, UNPACKED_QUANTS + 64 * k)
    if wtype == WTYPE_Q8_0:
        return s.load(stream, bytes_, block_bytes(wtype) - 512 + 64 * k)
    packed = s.load(stream, vector(I32), block_bytes(wtype) - 256 + 64 * (k // 2))
    nibbles = (packed >> 4 if k % 2 else packed) & 0x0F0F0F0F
    return s.bitcast(nibbles, bytes_)


def _input_offset(wtype: int, k: int) -> int:
    """Where in a block the inputs of the k-th quants begin: low nibbles are inputs 0-15, high ones 16-31."""
    return 4 * k if wtype == WTYPE_Q8_0 else 4 * (k // 2) + 16 * (k % 2)


def _accumulate(
    s: Simd, sums: Any, first: Any, num_rows: int, num_panels: int, steps: Any,
    body: Callable[[Value, list[Value]], list[Value]],
) -> None:
    """Add `steps` turns of `body` to the sums of a tile in memory, or to zeros where this is the `first` part of n_in."""
    offsets = [row * SUM_ROW_BYTES + panel * 64 for row in range(num_rows) for panel in range(num_panels)]
    is_first = s.wrap(first).equals(1)
    start = s.branch(is_first, lambda: [s.f32(0.0)] * len(offsets), lambda: [s.load_f32(sums, o) for o in offsets])
    totals = s.loop(0, steps, 1, start, body)
    for offset, total in zip(offsets, totals, strict=True):
        s.store(sums, total, offset)
