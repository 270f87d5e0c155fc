"""The operations of simd.py as Numba functions and types, for kernels written as plain @njit code.

`F32x16`, `I32x16` and `Mask16` are values in registers: `y = fma(x, scale, y)`, `store_f32(out, y * 2)`.
Register tiles, whose size is a constant, are better written as one intrinsic with simd.py itself.
"""

from __future__ import annotations

from numba import types
from numba.core import cgutils

from workers.kernels import simd as s
from workers.kernels.simd import Simd, Value
from workers.kernels.vector_type import F32x16, I32x16, Mask16, emits

__all__ = ["F32x16", "I32x16", "Mask16", "emits"]

_address = types.int64


@emits(F32x16, types.float32)
def splat_f32(simd: Simd, number: Value) -> Value:
    """A float in every lane."""
    return simd.splat(number)


@emits(I32x16, types.int32)
def splat_i32(simd: Simd, number: Value) -> Value:
    """An int32 in every lane."""
    return simd.splat(number)


@emits(I32x16)
def lane_numbers(simd: Simd) -> Value:
    """0, 1, … 15."""
    return simd.lane_numbers()


@emits(F32x16, _address)
def load_f32(simd: Simd, address: Value) -> Value:
    """16 float32 from memory."""
    return simd.load_f32(address)


@emits(F32x16, _address)
def load_f16(simd: Simd, address: Value) -> Value:
    """16 float16 from memory, as float32."""
    return simd.load_f16(address)


@emits(I32x16, _address)
def load_i32(simd: Simd, address: Value) -> Value:
    """16 int32 from memory."""
    return simd.load(address, s.vector(s.I32))


@emits(types.void, _address, F32x16)
def store_f32(simd: Simd, address: Value, v: Value) -> None:
    """Write 16 float32."""
    simd.store(address, v)


@emits(F32x16, _address, types.int32)
def load_first(simd: Simd, address: Value, count: Value) -> Value:
    """The first `count` of 16 float32, zeros after; nothing else is read. All 16 where count >= 16."""
    return simd.load_first(address, count)


@emits(types.void, _address, F32x16, types.int32)
def store_first(simd: Simd, address: Value, v: Value, count: Value) -> None:
    """Write the first `count` of 16 float32; nothing else is touched. All 16 where count >= 16."""
    simd.store_first(address, v, count)


@emits(types.void, _address, F32x16)
def store_f16(simd: Simd, address: Value, v: Value) -> None:
    """Round to float16 (nearest even) and write 16 of them."""
    simd.store_f16(address, v)


@emits(types.void, _address, I32x16)
def store_i32(simd: Simd, address: Value, v: Value) -> None:
    """Write 16 int32."""
    simd.store(address, v)


@emits(types.float32, _address)
def read_f32(simd: Simd, address: Value) -> Value:
    """One float32 from memory."""
    return simd.load(address, s.F32)


@emits(types.void, _address, types.float32)
def write_f32(simd: Simd, address: Value, number: Value) -> None:
    """One float32 to memory."""
    simd.store(address, number)


@emits(types.int32, _address)
def read_i32(simd: Simd, address: Value) -> Value:
    """One int32 from memory."""
    return simd.load(address, s.I32)


@emits(types.void, _address, types.int32)
def write_i32(simd: Simd, address: Value, number: Value) -> None:
    """One int32 to memory."""
    simd.store(address, number)


@emits(types.int64, _address)
def read_i64(simd: Simd, address: Value) -> Value:
    """One int64 from memory."""
    return simd.load(address, s.I64)


@emits(types.void, _address, types.int64)
def write_i64(simd: Simd, address: Value, number: Value) -> None:
    """One int64 to memory."""
    simd.store(address, number)


@emits(types.float32, _address)
def read_f16(simd: Simd, address: Value) -> Value:
    """One float16 from memory, as float32."""
    bits = simd.splat(simd.load(address, s.I16), 8)
    return simd.lane(simd.f16_to_f32(bits), 0)


@emits(types.void, _address, types.float32)
def write_f16(simd: Simd, address: Value, number: Value) -> None:
    """Round one float32 to float16 (nearest even) and write it."""
    simd.store(address, simd.lane(simd.f32_to_f16(simd.splat(number, 4)), 0))


@emits(types.void, _address, _address, types.int64)
def copy_bytes(simd: Simd, to: Value, source: Value, num_bytes: Value) -> None:
    """Copy memory that does not overlap."""
    cgutils.raw_memcpy(simd.builder, simd.pointer(to, s.I8), simd.pointer(source, s.I8), num_bytes.llvm, 1)


@emits(types.float32, _address)
def read_bf16(simd: Simd, address: Value) -> Value:
    """One bfloat16 from memory, as float32."""
    return simd.bitcast(simd.extend(simd.load(address, s.I16), s.I32) << 16, s.F32)


@emits(F32x16, F32x16, F32x16, F32x16)
def fma(simd: Simd, a: Value, b: Value, c: Value) -> Value:
    """a * b + c, rounded once."""
    return simd.fma(a, b, c)


@emits(F32x16, F32x16, F32x16)
def max_f32(simd: Simd, a: Value, b: Value) -> Value:
    """The larger of each lane; b where either is NaN."""
    return simd.max(a, b)


@emits(F32x16, F32x16, F32x16)
def min_f32(simd: Simd, a: Value, b: Value) -> Value:
    """The smaller of each lane; b where either is NaN."""
    return simd.min(a, b)


@emits(F32x16, F32x16)
def exp_f32(simd: Simd, v: Value) -> Value:
    """e^v, deterministic on every machine with FMA (see Simd.exp)."""
    return simd.exp(v)


@emits(F32x16, F32x16)
def exp2_f32(simd: Simd, v: Value) -> Value:
    """2^v of each lane, for v <= 0."""
    return simd.exp2(v)


@emits(F32x16, Mask16, F32x16, F32x16)
def select_f32(simd: Simd, mask: Value, a: Value, b: Value) -> Value:
    """a where the mask is set, else b."""
    return simd.select(mask, a, b)


@emits(I32x16, Mask16, I32x16, I32x16)
def select_i32(simd: Simd, mask: Value, a: Value, b: Value) -> Value:
    """a where the mask is set, else b."""
    return simd.select(mask, a, b)


@emits(types.float32, F32x16)
def sum_f32(simd: Simd, v: Value) -> Value:
    """Sum of the lanes, in a fixed order."""
    return simd.sum(v)


@emits(types.float32, F32x16)
def maximum_f32(simd: Simd, v: Value) -> Value:
    """The largest lane."""
    return simd.maximum(v)


@emits(types.int32, I32x16)
def sum_i32(simd: Simd, v: Value) -> Value:
    """Sum of the lanes."""
    return simd.sum(v)


@emits(F32x16, F32x16, F32x16)
def even_lanes(simd: Simd, a: Value, b: Value) -> Value:
    """Elements 0, 2, 4, … of the 32 in a and b."""
    return simd.shuffle(a, b, range(0, 32, 2))


@emits(F32x16, F32x16, F32x16)
def odd_lanes(simd: Simd, a: Value, b: Value) -> Value:
    """Elements 1, 3, 5, … of the 32 in a and b."""
    return simd.shuffle(a, b, range(1, 32, 2))


@emits(F32x16, F32x16, F32x16)
def interleave_low(simd: Simd, a: Value, b: Value) -> Value:
    """a0, b0, a1, b1, … a7, b7."""
    return simd.shuffle(a, b, [i // 2 + 16 * (i % 2) for i in range(16)])


@emits(F32x16, F32x16, F32x16)
def interleave_high(simd: Simd, a: Value, b: Value) -> Value:
    """a8, b8, … a15, b15."""
    return simd.shuffle(a, b, [8 + i // 2 + 16 * (i % 2) for i in range(16)])


@emits(I32x16, F32x16)
def truncate_to_i32(simd: Simd, v: Value) -> Value:
    """float32 towards zero to int32; |v| must be below 2^31."""
    return simd.truncate_to_i32(v)


@emits(types.int64, I32x16)
def sum_wide_u32(simd: Simd, v: Value) -> Value:
    """Sum of the lanes, taken as unsigned, without overflow."""
    return simd.sum(simd.extend(v, s.vector(s.I64)))


@emits(types.int64, _address, I32x16, Mask16)
def compress_i32(simd: Simd, address: Value, v: Value, mask: Value) -> Value:
    """Write the lanes where the mask is set, one behind the other; how many they are."""
    simd.compress_store(address, v, mask)
    return simd.extend(simd.count_ones(simd.bitcast(mask, s.I16)), s.I64)


@emits(types.int32, Mask16)
def mask_bits(simd: Simd, mask: Value) -> Value:
    """The mask as an integer, lane i in bit i."""
    return simd.extend(simd.bitcast(mask, s.I16), s.I32)


@emits(types.int32, _address, types.int32)
def atomic_add_i32(simd: Simd, address: Value, amount: Value) -> Value:
    """Add to an int32 in shared memory; the value before."""
    return simd.atomic_add_i32(address, amount)


@emits(types.int32, _address)
def load_acquire_i32(simd: Simd, address: Value) -> Value:
    """Read an int32 that another process writes; later reads stay after it."""
    return simd.load_acquire_i32(address)


@emits(types.void, _address, types.int32)
def store_release_i32(simd: Simd, address: Value, number: Value) -> None:
    """Write an int32 that another process reads; earlier writes stay before it."""
    simd.store_release_i32(address, number)


@emits(types.void, _address)
def prefetch(simd: Simd, address: Value) -> None:
    """Ask for a cache line, as far as the second-level cache."""
    simd.prefetch(address, 0, 2)


@emits(types.void, _address)
def prefetch_l1(simd: Simd, address: Value) -> None:
    """Ask for a cache line, as far as the first-level cache."""
    simd.prefetch(address)


@emits(types.void)
def pause(simd: Simd) -> None:
    """In a spin loop: rest the core for a moment."""
    simd.pause()


@emits(types.void, _address, types.int32)
def futex_wait(simd: Simd, address: Value, expected: Value) -> None:
    """Sleep while the int32 at an address has the expected value, 5 ms at most; another process wakes us."""
    simd.futex_wait(address, expected, 5_000_000)


@emits(types.void, _address)
def futex_wake(simd: Simd, address: Value) -> None:
    """Wake all processes that sleep at an address."""
    simd.futex_wake(address)
