"""Quantised activation rows: int8 with a float32 scale for each 16, a finer Q8_1, in linear_tiles' records.

A row of n_in numbers is n_in / 32 records; which bits a record holds depends on its 32 numbers alone.
"""

from __future__ import annotations

from numba import njit, types

from workers.kernels.linear_pack import BLOCK, WTYPE_Q4_0
from workers.kernels.linear_tiles import HALF, MAGIC, RECORD_BYTES, SCALE, SCALED_SUM, START_8, START_128
from workers.kernels.simd import F32, I8, I32, Simd, Value, vector
from workers.kernels.vector import F32x16, emits, load_f32


def act_row_bytes(wtype: int, n_in: int) -> int:
    """Bytes of an activation row as the linear layers of a weight type read it: float32, or quantised records."""
    return 4 * n_in if wtype < WTYPE_Q4_0 else n_in // BLOCK * RECORD_BYTES


@emits(types.void, types.int64, F32x16, F32x16)
def quantize_block(simd: Simd, record: Value, a: Value, b: Value) -> None:
    """Write the record of 32 numbers: of each half scale = max |x| / 127, q = x / scale to nearest, ties to even.

    A half of zeros has scale 0. Infinities and NaN give an unspecified record.
    """
    _emit_record(simd, record, (a, b))


@emits(types.void, types.int64, types.int64, F32x16, F32x16)
def quantize_block_twice(simd: Simd, record: Value, second: Value, a: Value, b: Value) -> None:
    """quantize_block, and the record of what it leaves: x - scale * q. Together they hold some 15 bits."""
    _emit_record(simd, second, _emit_record(simd, record, (a, b)))


@njit(cache=True)
def quantize_row(x: int, n_in: int, out: int) -> None:
    """Quantise float32 [n_in] (a multiple of 32) at address x into n_in / 32 records at address out."""
    for i in range(0, n_in, BLOCK):
        quantize_block(out + i // BLOCK * RECORD_BYTES, load_f32(x + 4 * i), load_f32(x + 4 * i + 64))


@njit(cache=True)
def quantize_row_twice(x: int, n_in: int, out: int) -> None:
    """Quantise a row into two rows of records, one after the other, whose products with a matrix add up to x's."""
    second = n_in // BLOCK * RECORD_BYTES
    for i in range(0, n_in, BLOCK):
        record = out + i // BLOCK * RECORD_BYTES
        quantize_block_twice(record, record + second, load_f32(x + 4 * i), load_f32(x + 4 * i + 64))


def _emit_record(simd: Simd, record: Value, halves: tuple[Value, Value]) -> tuple[Value, Value]:
    """The code of quantize_block; gives what it leaves of each half."""
    magic, zero = simd.constant(I32, MAGIC), simd.constant(F32, 0.0)
    scaled_sums, left = [], []
    for half, v in enumerate(halves):
        largest = simd.maximum(simd.abs(v))
        scale = largest / 127.0
        inverse = simd.select(largest > 0.0, simd.constant(F32, 127.0) / largest, zero)
        q = simd.round_to_i32(v * simd.splat(inverse))
        total = simd.sum(q)
        simd.store(record, simd.truncate(q, vector(I8)), HALF * half)
        simd.store(record, scale, SCALE + 4 * half)
        simd.store(record, magic - total * 8, START_8 + 4 * half)
        simd.store(record, magic - total * 128, START_128 + 4 * half)
        scaled_sums.append(scale * simd.to_f32(total))
        left.append(v - simd.to_f32(q) * simd.splat(scale))
    simd.store(record, scaled_sums[0] + scaled_sums[1], SCALED_SUM)
    return left[0], left[1]
