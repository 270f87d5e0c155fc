"""Quantised activation rows: int8 with a float32 scale for each 16, a finer Q8_1, in linear_tiles' records.

A row of n_in numbers is n_in / 32 records; which bits a record holds depends on its 32 numbers alone.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import add

from numba import njit, types

from workers.kernels.linear_pack import BLOCK, WTYPE_Q4_0
from workers.kernels.linear_tiles import HALF, MAGIC, RECORD_BYTES, SCALE, SCALED_SUM, START_8, START_128
from workers.kernels.simd import F32, I8, I32, I64, Simd, Value, isa_name, vector
from workers.kernels.vector import F32x16, emits, load_f32

NUM_BLOCKS = 8  # that quantize_blocks takes at once
QUANTIZES_MANY = isa_name() == "avx512"  # elsewhere its many vectors find no registers


def act_row_bytes(wtype: int, n_in: int) -> int:
    """Bytes of an activation row as the linear layers of a weight type read it: float32, or quantised records."""
    return 4 * n_in if wtype < WTYPE_Q4_0 else n_in // BLOCK * RECORD_BYTES


@emits(types.void, types.int64, F32x16, F32x16)
def quantize_block(simd: Simd, record: Value, a: Value, b: Value) -> None:
    """Write the record of 32 numbers: of each half scale = max |x| / 127, q = x / scale to nearest, ties to even.

    A half of zeros has scale 0. Infinities and NaN give an unspecified record.
    """
    _emit_record(simd, record, (a, b))


@emits(types.void, types.int64, types.int64, types.int64)
def quantize_blocks(simd: Simd, x: Value, record: Value, pair_bytes: Value) -> None:
    """quantize_block of NUM_BLOCKS * 32 float32 at x, to pairs of records that are pair_bytes apart.

    Sixteen halves are reduced at once, each to the lane of its number: one by one they would wait for themselves.
    """
    halves = range(2 * NUM_BLOCKS)
    largest = _each_to_its_lane([simd.abs(simd.load_f32(x, 64 * i)) for i in halves], simd, simd.max)
    scale = largest / 127.0
    inverse = simd.select(largest > 0.0, simd.constant(largest.type, 127.0) / largest, simd.constant(largest.type, 0.0))
    quants = []
    records = [record + pair_bytes * pair + RECORD_BYTES * i for pair in range(NUM_BLOCKS // 2) for i in range(2)]
    for i in halves:
        q = simd.round_to_i32(simd.load_f32(x, 64 * i) * simd.shuffle(inverse, inverse, [i] * 16))
        simd.store(records[i // 2], simd.truncate(q, vector(I8)), HALF * (i % 2))
        quants.append(q)
    total = _each_to_its_lane(quants, simd, add)
    magic = simd.constant(total.type, MAGIC)
    sums = scale * simd.to_f32(total)
    neighbours = [lane ^ 1 for lane in range(16)]
    pair_sums = sums + simd.shuffle(sums, sums, neighbours)
    only_first = [16 if lane % 2 else lane for lane in range(16)]
    pair_sums = simd.shuffle(pair_sums, simd.constant(sums.type, 0.0), only_first)
    words = [simd.bitcast(v, vector(I64, 8)) for v in (scale, magic - (total << 3), magic - (total << 7), pair_sums)]
    for place, (a, b) in ((SCALE, words[:2]), (START_128, words[2:])):
        for i, to in enumerate(records):
            simd.store(to, simd.shuffle(a, b, (i, 8 + i)), place)


@emits(types.void, types.int64, types.int64, F32x16, F32x16)
def quantize_block_twice(simd: Simd, record: Value, second: Value, a: Value, b: Value) -> None:
    """quantize_block, and the record of what it leaves: x - scale * q. Together they hold some 15 bits."""
    _emit_record(simd, second, _emit_record(simd, record, (a, b)))


@njit(cache=True)
def quantize_row(x: int, n_in: int, out: int) -> None:
    """Quantise float32 [n_in] (a multiple of 32) at address x into n_in / 32 records at address out."""
    step = NUM_BLOCKS * BLOCK
    whole = n_in // step * step if QUANTIZES_MANY else 0
    for i in range(0, whole, step):
        quantize_blocks(x + 4 * i, out + i // BLOCK * RECORD_BYTES, 2 * RECORD_BYTES)
    for i in range(whole, n_in, BLOCK):
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


def _each_to_its_lane(vectors: list[Value], simd: Simd, combine: Callable[[Value, Value], Value]) -> Value:
    """Lane i: all lanes of vectors[i], combined. 16 vectors of 16 lanes, in 15 steps of two shuffles."""

    def merge(pair: list[Value], first: list[int], second: list[int]) -> Value:
        a, b = pair
        return combine(simd.shuffle(a, b, first), simd.shuffle(a, b, second))

    def lanes(*quarters: int) -> list[int]:
        """Of quarters of 4 lanes, 0 to 3 of the first vector and 4 to 7 of the second."""
        return [4 * quarter + lane for quarter in quarters for lane in range(4)]

    def within(*places: int) -> list[int]:
        """Of each quarter four places, 0 to 3 of the first vector and 4 to 7 of the second."""
        return [4 * quarter + place % 4 + 16 * (place // 4) for quarter in range(4) for place in places]

    groups = []
    for first in range(4):  # vectors first, first + 4, ...: to quarters 0, 1, ...
        pairs = vectors[first:8:4], vectors[first + 8 :: 4]
        halves = [merge(pair, lanes(0, 1, 4, 5), lanes(2, 3, 6, 7)) for pair in pairs]
        groups.append(merge(halves, lanes(0, 2, 4, 6), lanes(1, 3, 5, 7)))
    halves = [merge(pair, within(0, 1, 4, 5), within(2, 3, 6, 7)) for pair in (groups[:2], groups[2:])]
    return merge(halves, within(0, 2, 4, 6), within(1, 3, 5, 7))
