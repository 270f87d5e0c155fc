"""Quantised activation rows: int8 per block of 32 with a float32 scale, like GGUF's Q8_1, in linear_tiles' records.

A row of n_in numbers is n_in / 32 records; which bits a record holds depends on its 32 numbers alone.
"""

from __future__ import annotations

from numba import njit, types

from workers.kernels.linear_pack import BLOCK, WTYPE_Q4_0
from workers.kernels.linear_tiles import MAGIC, RECORD_BYTES, SCALE, SCALED_SUM, START_8, START_128
from workers.kernels.simd import F32, I8, I32, Simd, Value, vector
from workers.kernels.vector import F32x16, emits, load_f32


def act_row_bytes(wtype: int, n_in: int) -> int:
    """Bytes of an activation row as the linear layers of a weight type read it: float32, or quantised records."""
    return 4 * n_in if wtype < WTYPE_Q4_0 else n_in // BLOCK * RECORD_BYTES


@emits(types.void, types.int64, F32x16, F32x16)
def quantize_block(simd: Simd, record: Value, a: Value, b: Value) -> None:
    """Write the record of 32 numbers: scale = max |x| / 127, q = x / scale rounded to nearest, ties to even.

    A block of zeros has scale 0. Infinities and NaN give an unspecified record.
    """
    largest = simd.maximum(simd.max(simd.abs(a), simd.abs(b)))
    scale = largest / 127.0
    zero = simd.constant(F32, 0.0)
    inverse = simd.splat(simd.select(largest > 0.0, simd.constant(F32, 127.0) / largest, zero))
    quants = [simd.round_to_i32(v * inverse) for v in (a, b)]
    for half, q in enumerate(quants):
        simd.store(record, simd.truncate(q, vector(I8)), 16 * half)
    total = simd.sum(quants[0] + quants[1])
    simd.store(record, scale, SCALE)
    simd.store(record, scale * simd.to_f32(total), SCALED_SUM)
    magic = simd.constant(I32, MAGIC)
    simd.store(record, magic - total * 8, START_8)
    simd.store(record, magic - total * 128, START_128)


@njit(cache=True)
def quantize_row(x: int, n_in: int, out: int) -> None:
    """Quantise float32 [n_in] (a multiple of 32) at address x into n_in / 32 records at address out."""
    for i in range(0, n_in, BLOCK):
        quantize_block(out + i // BLOCK * RECORD_BYTES, load_f32(x + 4 * i), load_f32(x + 4 * i + 64))


