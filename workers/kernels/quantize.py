"""Quantised activation rows: int8 with a scale for each 16, a finer Q8_1, in linear_tiles' records.

A row of n_in numbers is n_in / 32 records; which bits a record holds depends on its 32 numbers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import add

from numba import njit, types

from workers.kernels.lanes import each_to_a_lane, lane_of
from workers.kernels.linear_pack import BLOCK, WTYPE_Q4_0
from workers.kernels.linear_tiles import (
    ALIGN,
    HALF,
    MAGIC,
    MAGIC_FLOAT,
    MAX_FINER,
    RECORD_BYTES,
    SCALE,
)
from workers.kernels.simd import F32, I8, I32, I64, LANES, Simd, Value, isa_name, vector
from workers.kernels.vector import F32x16, emits, load_f32

TINIEST = 2.0**-100  # 8 * 127 divided by this is finite
NUM_BLOCKS = 8  # that quantize_blocks takes at once
QUANTIZES_MANY = isa_name() == "avx512"  # elsewhere its many vectors find no registers


def act_row_bytes(wtype: int, n_in: int) -> int:
    """Bytes of an activation row as the linear layers of a weight type read it: float32, or quantised records."""
    return 4 * n_in if wtype < WTYPE_Q4_0 else n_in // BLOCK * RECORD_BYTES


@emits(types.void, types.int64, F32x16, F32x16)
def quantize_block(simd: Simd, record: Value, a: Value, b: Value) -> None:
    """Write the record of 32 numbers: q = x / scale to nearest, ties to even, with a scale for each half.

    The block's scale is max |x| / 127. A half's is that or, where its own largest number allows, 2, 4 or 8 times less.
    Below TINIEST a block counts as zeros. Infinities and NaN give an unspecified record.
    """
    _emit_record(simd, record, (a, b))


@emits(types.void, types.int64, types.int64, types.int64)
def quantize_blocks(simd: Simd, x: Value, record: Value, pair_bytes: Value) -> None:
    """quantize_block of NUM_BLOCKS * 32 float32 at x, to pairs of records that are pair_bytes apart.

    Sixteen halves are reduced at once, each to the lane of its number: one by one they would wait for themselves.
    """
    halves = range(2 * NUM_BLOCKS)
    of_half = _each_to_its_lane(simd, [simd.abs(simd.load_f32(x, 64 * i)) for i in halves], simd.max)
    # Numbers of first halves are in even lanes, those of second halves in odd ones.
    first_lanes, second_lanes = ([lane // 2 * 2 + half for lane in range(LANES)] for half in (0, 1))
    of_block = simd.max(*(simd.shuffle(of_half, of_half, lanes) for lanes in (first_lanes, second_lanes)))
    scale, inverse, finer = _scales(simd, of_half, of_block, MAX_FINER)
    quants = []
    records = [record + pair_bytes * pair + RECORD_BYTES * i for pair in range(NUM_BLOCKS // 2) for i in range(2)]
    for i in halves:
        q = simd.round_to_i32(simd.load_f32(x, 64 * i) * simd.shuffle(inverse, inverse, [i] * 16))
        simd.store(records[i // 2], simd.truncate(q, vector(I8)), HALF * (i % 2))
        quants.append(q)
    total = _each_to_its_lane(simd, quants, add)
    first, second = (
        tuple(simd.shuffle(v, v, lanes) for v in (scale, total, finer)) for lanes in (first_lanes, second_lanes)
    )
    is_odd = (simd.lane_numbers() & 1) > 0
    words = [simd.bitcast(v, vector(I32)) for v in _block_numbers(simd, first, second)]
    pairs = [simd.bitcast(simd.select(is_odd, words[i + 1], words[i]), vector(I64, 8)) for i in range(0, 8, 2)]
    for place, (a, b) in ((SCALE, pairs[:2]), (ALIGN, pairs[2:])):
        for i, to in enumerate(records):
            simd.store(to, simd.shuffle(a, b, (i, 8 + i)), place)


@emits(types.void, types.int64, types.int64, F32x16, F32x16)
def quantize_block_twice(simd: Simd, record: Value, second: Value, a: Value, b: Value) -> None:
    """quantize_block with one scale for both halves, and the record of what it leaves: x - scale * q.

    Together they hold some 15 bits, of which none must be lost where the halves' dots meet.
    """
    _emit_record(simd, second, _emit_record(simd, record, (a, b), max_finer=0), max_finer=0)


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


def _emit_record(
    simd: Simd, record: Value, halves: tuple[Value, Value], max_finer: int = MAX_FINER
) -> tuple[Value, Value]:
    """The code of quantize_block; gives what it leaves of each half."""
    of_halves = [simd.maximum(simd.abs(v)) for v in halves]
    largest = simd.max(*of_halves)
    numbers, left = [], []
    for half, v in enumerate(halves):
        scale, inverse, finer = _scales(simd, of_halves[half], largest, max_finer)
        q = simd.round_to_i32(v * simd.splat(inverse))
        simd.store(record, simd.truncate(q, vector(I8)), HALF * half)
        numbers.append((scale, simd.sum(q), finer))
        left.append(v - simd.to_f32(q) * simd.splat(scale))
    for i, number in enumerate(_block_numbers(simd, *numbers)):
        simd.store(record, number, SCALE + 4 * i)
    return left[0], left[1]


def _scales(simd: Simd, of_half: Value, of_block: Value, max_finer: int) -> tuple[Value, Value, Value]:
    """(scale, its inverse, n) of a half, 2^n times finer than its block, from the largest |x| of both.

    Floats are in order as integers, and 2^n times one adds n to its exponent.
    """
    integer = vector(I32) if of_half.type == vector(F32) else I32
    distance = (simd.bitcast(of_block, integer) - simd.bitcast(of_half, integer)) >> 23
    finer = simd.min(distance, simd.constant(integer, max_finer))
    inverse = simd.select(of_block >= TINIEST, 127.0 / of_block, simd.constant(of_block.type, 0.0))
    powers = [simd.bitcast((n + 127) << 23, of_block.type) for n in (0 - finer, finer)]
    return of_block / 127.0 * powers[0], inverse * powers[1], finer


def _block_numbers(
    simd: Simd, first: Sequence[Value], second: Sequence[Value]
) -> tuple[Value, Value, Value, Value, Value, Value, Value, Value]:
    """The eight numbers of a record, from (scale, sum of q, n) of its halves."""
    (scale_0, total_0, finer_0), (scale_1, total_1, finer_1) = first, second
    start = ((finer_1 - finer_0) << 23) + MAGIC
    align = MAGIC_FLOAT - simd.bitcast(start, scale_0.type)
    starts = start, start - (total_0 << 3), start - (total_0 << 7)
    sum_0, sum_1 = simd.to_f32(total_0), simd.to_f32(total_1)
    aligns = align, align - sum_1 * 8.0, align - sum_1 * 128.0
    return scale_1, *starts, *aligns, scale_0 * sum_0 + scale_1 * sum_1


def _each_to_its_lane(simd: Simd, vectors: list[Value], combine: Callable[[Value, Value], Value]) -> Value:
    """All lanes of vectors[i], combined, in lane i."""
    return each_to_a_lane(simd, [vectors[lane_of(i)] for i in range(LANES)], combine)
