"""SIMD for kernels: a thin layer over the LLVM builder, so that the body of an intrinsic reads like NumPy.

All arithmetic is on logical vectors of 16 lanes; LLVM splits them on narrower machines. AVX-512, AVX2 and generic code
thus do the same operations in the same order (the int8 dot product, int8_dot.py, is the exception: integers, exact in
all). It never decides anything about a model, and knows no array: memory is an int64 address.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from workers.kernels.simd_value import (
    F16,
    F32,
    F64,
    I1,
    I8,
    I16,
    I32,
    I64,
    LANES,
    VOID_PTR,
    Value,
    vector,
)
from workers.kernels.target import isa_name, target_features

__all__ = ["F16", "F32", "F64", "I1", "I8", "I16", "I32", "I64", "LANES", "Simd", "Value", "isa_name", "vector"]


class Simd:
    """Emits vector code at the builder's position. Addresses are int64 Values or LLVM values, offsets are in bytes."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder
        self.isa = isa_name()
        self.features = target_features()

    @property
    def has_fma(self) -> bool:
        """Whether `fma` rounds once; only old x86 does not."""
        return "x86_64" not in self.features or "fma" in self.features

    # ---- values -------------------------------------------------------------------------------------------------

    def wrap(self, value: Any) -> Value:
        """An LLVM value (or a Value, unchanged) as a Value."""
        return value if isinstance(value, Value) else Value(self, value)

    def constant(self, type_: ir.Type, number: int | float) -> Value:
        """A number as a constant of `type_`, the same in every lane."""
        if isinstance(type_, ir.VectorType):
            return Value(self, ir.Constant(type_, [ir.Constant(type_.element, number)] * type_.count))
        return Value(self, ir.Constant(type_, number))

    def like(self, pattern: Value, other: Any) -> Value:
        """`other` as an operand for `pattern`: numbers become constants, scalars are broadcast to its lanes."""
        if isinstance(other, (int, float)):
            return self.constant(pattern.type, other)
        value = self.wrap(other)
        if isinstance(pattern.type, ir.VectorType) and not isinstance(value.type, ir.VectorType):
            return self.splat(value, pattern.type.count)
        return value

    def f32(self, number: float) -> Value:
        """16 lanes of one float32 constant."""
        return self.constant(vector(F32), float(number))

    def i32(self, number: int) -> Value:
        """16 lanes of one int32 constant."""
        return self.constant(vector(I32), number)

    def i64(self, number: int) -> Value:
        """A scalar int64 constant."""
        return self.constant(I64, number)

    def splat(self, scalar: Any, lanes: int = LANES) -> Value:
        """A scalar in every lane."""
        scalar = self.wrap(scalar)
        undefined = ir.Constant(vector(scalar.type, lanes), ir.Undefined)
        one = self.builder.insert_element(undefined, scalar.llvm, ir.Constant(I32, 0))
        mask = ir.Constant(vector(I32, lanes), [0] * lanes)
        return Value(self, self.builder.shuffle_vector(one, undefined, mask))

    def lane(self, v: Value, index: int) -> Value:
        """One lane as a scalar."""
        return Value(self, self.builder.extract_element(v.llvm, ir.Constant(I32, index)))

    def shuffle(self, a: Value, b: Value, lanes: Sequence[int]) -> Value:
        """Lanes chosen from a (0…) and b (len(a)…)."""
        mask = ir.Constant(vector(I32, len(lanes)), list(lanes))
        return Value(self, self.builder.shuffle_vector(a.llvm, b.llvm, mask))

    def bitcast(self, v: Value, type_: ir.Type) -> Value:
        """The same bits as another type of the same size."""
        return Value(self, self.builder.bitcast(v.llvm, type_))

    def lane_numbers(self) -> Value:
        """int32 0, 1, … 15."""
        return Value(self, ir.Constant(vector(I32), list(range(LANES))))

    # ---- memory -------------------------------------------------------------------------------------------------

    def pointer(self, address: Any, type_: ir.Type, offset: int = 0) -> Any:
        """An LLVM pointer to `type_` at address + offset."""
        address = self.wrap(address)
        base = self.builder.inttoptr(address.llvm, VOID_PTR)
        if offset:
            base = self.builder.gep(base, [ir.Constant(I64, offset)])
        return self.builder.bitcast(base, type_.as_pointer())

    def load(self, address: Any, type_: ir.Type, offset: int = 0) -> Value:
        """A value of any LLVM type from any address (no alignment needed)."""
        loaded = self.builder.load(self.pointer(address, type_, offset), align=1)
        return Value(self, loaded)

    def store(self, address: Any, v: Value, offset: int = 0) -> None:
        """Write a value of any LLVM type to any address."""
        self.builder.store(v.llvm, self.pointer(address, v.type, offset), align=1)

    def load_f32(self, address: Any, offset: int = 0) -> Value:
        """16 float32."""
        return self.load(address, vector(F32), offset)

    def load_f16(self, address: Any, offset: int = 0) -> Value:
        """16 float16 as float32 (exact)."""
        return self.f16_to_f32(self.load(address, vector(I16), offset))

    def load_bf16(self, address: Any, offset: int = 0) -> Value:
        """16 bfloat16 as float32 (exact)."""
        bits = self.extend(self.load(address, vector(I16), offset), vector(I32)) << 16
        return self.bitcast(bits, vector(F32))

    def load_splat_f32(self, address: Any, offset: int = 0) -> Value:
        """One float32 in every lane."""
        return self.splat(self.load(address, F32, offset))

    def load_splat_i32(self, address: Any, offset: int = 0) -> Value:
        """One int32 in every lane."""
        return self.splat(self.load(address, I32, offset))

    def load_first(self, address: Any, count: Any) -> Value:
        """The first `count` (int32) of 16 float32 and zeros after, nothing else is read; all 16 where count >= 16."""
        type_ = vector(F32)
        pointer = Value(self, self.pointer(address, type_))

        def whole() -> list[Value]:
            return [Value(self, self.builder.load(pointer.llvm, align=1))]

        def part() -> list[Value]:
            mask = self.lane_numbers() < self.splat(count)
            name = "llvm.masked.load.v16f32.p0"
            return [self.call(name, type_, pointer, self.constant(I32, 1), mask, self.f32(0.0))]

        return self.branch(self.wrap(count) >= LANES, whole, part)[0]

    def store_first(self, address: Any, v: Value, count: Any) -> None:
        """Write the first `count` (int32) of 16 float32 and nothing else; all 16 where count >= 16."""
        pointer = Value(self, self.pointer(address, v.type))
        with self.builder.if_else((self.wrap(count) >= LANES).llvm, likely=True) as (whole, part):
            with whole:
                self.builder.store(v.llvm, pointer.llvm, align=1)
            with part:
                mask = self.lane_numbers() < self.splat(count)
                self.call("llvm.masked.store.v16f32.p0", ir.VoidType(), v, pointer, self.constant(I32, 1), mask)

    def stack(self, num_bytes: int) -> Value:
        """The address of `num_bytes` on the stack, a multiple of 64; they last until the function returns."""
        with self.builder.goto_entry_block():
            place = self.builder.alloca(ir.ArrayType(I8, num_bytes))
            place.align = 64
        return Value(self, self.builder.ptrtoint(place, I64))

    def store_f16(self, address: Any, v: Value, offset: int = 0) -> None:
        """Round 16 float32 to float16 (nearest, ties to even) and write them."""
        self.store(address, self.f32_to_f16(v), offset)

    def compress_store(self, address: Any, v: Value, mask: Value) -> None:
        """Write the lanes where the mask is set, one behind the other."""
        arguments = [v.llvm, self.pointer(address, v.type.element), mask.llvm]
        function_type = ir.FunctionType(ir.VoidType(), [a.type for a in arguments])
        name = f"llvm.masked.compressstore.v{v.type.count}{_element_suffix(v.type.element)}"
        self.builder.call(cgutils.get_or_insert_function(self.builder.module, function_type, name), arguments)

    def prefetch(self, address: Any, offset: int = 0, locality: int = 3) -> None:
        """Ask for the cache line at an address (never faults). Locality 3: into L1; 2: L2; 0: used once."""
        pointer = self.pointer(address, I8, offset)
        function_type = ir.FunctionType(ir.VoidType(), [VOID_PTR, I32, I32, I32])
        function = cgutils.get_or_insert_function(self.builder.module, function_type, "llvm.prefetch.p0")
        self.builder.call(function, [pointer, *(ir.Constant(I32, n) for n in (0, locality, 1))])

    # ---- conversions --------------------------------------------------------------------------------------------

    def extend(self, v: Value, type_: ir.Type, *, signed: bool = False) -> Value:
        """Integers to wider integers, lane by lane."""
        return Value(self, (self.builder.sext if signed else self.builder.zext)(v.llvm, type_))

    def truncate(self, v: Value, type_: ir.Type) -> Value:
        """Integers to narrower integers, lane by lane."""
        return Value(self, self.builder.trunc(v.llvm, type_))

    def to_f32(self, v: Value) -> Value:
        """Signed integers to float32 (exact below 2^24)."""
        return Value(self, self.builder.sitofp(v.llvm, _with_element(v.type, F32)))

    def round_to_i32(self, v: Value) -> Value:
        """float32 to the nearest int32, ties to even; right for |v| < 2^22."""
        magic = 12582912.0  # 1.5 * 2^23: the sum has no room for a fraction, and its low bits are the integer
        return self.bitcast(v + magic, _with_element(v.type, I32)) - 0x4B400000

    def truncate_to_i32(self, v: Value) -> Value:
        """float32 towards zero to int32; |v| must be below 2^31."""
        return Value(self, self.builder.fptosi(v.llvm, _with_element(v.type, I32)))

    def f16_to_f32(self, bits: Value) -> Value:
        """The bits of float16 (an int16 vector) to float32, exactly."""
        if "f16c" in self.features or "avx512f" in self.features:
            half = self.builder.bitcast(bits.llvm, _with_element(bits.type, F16))
            return Value(self, self.builder.fpext(half, _with_element(bits.type, F32)))
        wide = self.extend(bits, _with_element(bits.type, I32))
        magnitude = (wide & 0x7FFF) << 13
        value = self.bitcast(magnitude, _with_element(bits.type, F32)) * 2.0**112
        special = self.bitcast(value, magnitude.type) | 0x7F800000
        finite = self.bitcast(value, magnitude.type)
        magnitude = self.select(magnitude < (0x7C00 << 13), finite, special)
        return self.bitcast(magnitude | ((wide & 0x8000) << 16), _with_element(bits.type, F32))

    def f32_to_f16(self, v: Value) -> Value:
        """float32 to the bits of float16 (an int16 vector), nearest, ties to even; too large becomes infinite."""
        if "f16c" in self.features or "avx512f" in self.features:
            half = self.builder.fptrunc(v.llvm, _with_element(v.type, F16))
            return Value(self, self.builder.bitcast(half, _with_element(v.type, I16)))
        bits = self.bitcast(v, _with_element(v.type, I32))
        magnitude = bits & 0x7FFFFFFF
        normal = (magnitude + (((magnitude >> 13) & 1) + (((15 - 127) << 23) + 0xFFF))) >> 13
        half_of_smallest = 0.5  # its unit in the last place is 2^-24, the smallest float16
        subnormal = self.bitcast(self.bitcast(magnitude, v.type) + half_of_smallest, bits.type) - 0x3F000000
        result = self.select(magnitude < (113 << 23), subnormal, normal)
        result = self.select(magnitude < ((127 + 16) << 23), result, self.constant(bits.type, 0x7C00))
        result = self.select(magnitude > 0x7F800000, ((magnitude >> 13) & 0x3FF) | 0x7E00, result)
        return self.truncate(result | ((bits >> 16) & 0x8000), _with_element(v.type, I16))

    def arithmetic_shift(self, v: Value, bits: int) -> Value:
        """Integers shifted right, the sign shifted in."""
        return Value(self, self.builder.ashr(v.llvm, self.like(v, bits).llvm))

    def count_ones(self, bits: Value) -> Value:
        """How many bits of an integer are set."""
        return self.call(f"llvm.ctpop.{_element_suffix(bits.type)}", bits.type, bits)

    # ---- arithmetic ---------------------------------------------------------------------------------------------

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once where the machine has FMA (x86 without it: rounded twice)."""
        b, c = self.like(a, b), self.like(a, c)
        if not self.has_fma:
            return a * b + c
        return self.call(f"llvm.fma.{_suffix(a.type)}", a.type, a, b, c)

    def sqrt(self, v: Value) -> Value:
        """Square root, correctly rounded."""
        return self.call(f"llvm.sqrt.{_suffix(v.type)}", v.type, v)

    def abs(self, v: Value) -> Value:
        """Absolute value of floats."""
        return self.call(f"llvm.fabs.{_suffix(v.type)}", v.type, v)

    def select(self, mask: Value, a: Value, b: Value) -> Value:
        """a where the mask is set, else b (b's NaNs never leak where the mask is set)."""
        return Value(self, self.builder.select(mask.llvm, a.llvm, b.llvm))

    def max(self, a: Value, b: Value) -> Value:
        """Lane by lane; b where either is NaN."""
        b = self.like(a, b)
        return self.select(a > b, a, b)

    def min(self, a: Value, b: Value) -> Value:
        """Lane by lane; b where either is NaN."""
        b = self.like(a, b)
        return self.select(a < b, a, b)

    def exp(self, v: Value) -> Value:
        """e^v to about 1 unit in the last place; 0 below -87.3 (and at -inf), clamped above 88.3; NaN gives a number.

        Cephes' expf: v = n ln 2 + r with |r| <= ln 2 / 2, then a polynomial of degree 6 and 2^n by its exponent bits.
        """
        low, high = -87.33654, 88.3762626647949
        x = self.min(self.max(v, self.like(v, low)), self.like(v, high))
        n = self.fma(x, self.like(v, math.log2(math.e)), self.like(v, 12582912.0))
        exponent = self.bitcast(n, _with_element(v.type, I32)) - 0x4B400000
        n = n - 12582912.0
        r = self.fma(n, self.like(v, -0.693359375), x)
        r = self.fma(n, self.like(v, 2.12194440e-4), r)
        p = self.like(v, 1.9875691500e-4)
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = self.fma(p, r, self.like(v, c))
        p = self.fma(p, r * r, r) + 1.0
        scale = self.bitcast((exponent + 127) << 23, v.type)
        return self.select(v < low, self.like(v, 0.0), p * scale)

    def exp2(self, v: Value) -> Value:
        """2^v for v <= 0 to about 2 units in the last place; never less than 2^-126, and 2^0 is 1.

        v = n + r with |r| <= 1/2; a polynomial of degree 5 for 2^r (minimax, its constant 1), n added to its exponent.
        """
        x = self.max(v, self.like(v, -126.0))
        n = x + 12582912.0
        r = x - (n - 12582912.0)
        p = self.like(v, 1.3264727e-3)
        for c in (9.6715130e-3, 5.5507336e-2, 2.4022242e-1, 6.9314700e-1, 1.0):
            p = self.fma(p, r, self.like(v, c))
        integer = _with_element(v.type, I32)
        return self.bitcast(self.bitcast(p, integer) + (self.bitcast(n, integer) << 23), v.type)

    def sum(self, v: Value) -> Value:
        """Sum of all lanes as a scalar, in a fixed order: halves are added until one lane is left."""
        return self._reduce(v, lambda a, b: a + b)

    def maximum(self, v: Value) -> Value:
        """The largest lane as a scalar."""
        return self._reduce(v, self.max)

    def _reduce(self, v: Value, combine: Callable[[Value, Value], Value]) -> Value:
        lanes = v.type.count
        while lanes > 1:
            lanes //= 2
            v = combine(self.shuffle(v, v, range(lanes)), self.shuffle(v, v, range(lanes, 2 * lanes)))
        return self.lane(v, 0)

    # ---- control ------------------------------------------------------------------------------------------------

    def loop(
        self,
        begin: Any,
        end: Any,
        step: int,
        carried: Sequence[Value],
        body: Callable[[Value, list[Value]], Sequence[Value]],
    ) -> list[Value]:
        """for i in range(begin, end, step): carried = body(i, carried); the carried values stay in registers.

        begin and end are int64. Returns the carried values after the loop (as given when it runs zero times).
        """
        builder = self.builder
        begin, end = self.like(self.i64(0), begin), self.like(self.i64(0), end)
        before = builder.block
        head = builder.append_basic_block("loop.head")
        inside = builder.append_basic_block("loop.body")
        after = builder.append_basic_block("loop.end")
        builder.branch(head)
        builder.position_at_end(head)
        i = builder.phi(I64)
        i.add_incoming(begin.llvm, before)
        phis = [builder.phi(v.type) for v in carried]
        for phi, v in zip(phis, carried, strict=True):
            phi.add_incoming(v.llvm, before)
        builder.cbranch(builder.icmp_signed("<", i, end.llvm), inside, after)
        builder.position_at_end(inside)
        results = list(body(Value(self, i), [Value(self, phi) for phi in phis]))
        advanced = builder.add(i, ir.Constant(I64, step))
        i.add_incoming(advanced, builder.block)
        for phi, v in zip(phis, results, strict=True):
            phi.add_incoming(v.llvm, builder.block)
        builder.branch(head)
        builder.position_at_end(after)
        return [Value(self, phi) for phi in phis]

    def branch(
        self, condition: Value, then: Callable[[], Sequence[Value]], otherwise: Callable[[], Sequence[Value]]
    ) -> list[Value]:
        """The values of `then()` where the condition (one bit, likely set) holds, else those of `otherwise()`."""
        builder = self.builder
        with builder.if_else(condition.llvm, likely=True) as (on_then, on_otherwise):
            with on_then:
                first, first_block = list(then()), builder.block
            with on_otherwise:
                second, second_block = list(otherwise()), builder.block
        results = []
        for a, b in zip(first, second, strict=True):
            phi = builder.phi(a.type)
            phi.add_incoming(a.llvm, first_block)
            phi.add_incoming(b.llvm, second_block)
            results.append(Value(self, phi))
        return results

    def switch(self, number: Any, cases: Sequence[int], emit: Callable[[int], None]) -> None:
        """Emit code for every case, of which the one that `number` (int64) equals is run; none where it equals none."""
        builder = self.builder
        after = builder.append_basic_block("switch.end")
        switch = builder.switch(self.wrap(number).llvm, after)
        for case in cases:
            block = builder.append_basic_block(f"case.{case}")
            switch.add_case(case, block)
            builder.position_at_end(block)
            emit(case)
            builder.branch(after)
        builder.position_at_end(after)

    # ---- other processes ----------------------------------------------------------------------------------------

    def atomic_add_i32(self, address: Any, amount: Any) -> Value:
        """Add to an int32 in shared memory; the value before."""
        amount = self.like(self.constant(I32, 0), amount)
        pointer = self.pointer(address, I32)
        return Value(self, self.builder.atomic_rmw("add", pointer, amount.llvm, "seq_cst"))

    def load_acquire_i32(self, address: Any) -> Value:
        """Read an int32 that another process writes; nothing after it moves before it."""
        return Value(self, self.builder.load_atomic(self.pointer(address, I32), "acquire", 4))

    def store_release_i32(self, address: Any, v: Any) -> None:
        """Write an int32 that another process reads; nothing before it moves after it."""
        v = self.like(self.constant(I32, 0), v)
        self.builder.store_atomic(v.llvm, self.pointer(address, I32), "release", 4)

    def pause(self) -> None:
        """Tell the core that this is a spin loop (nothing on machines other than x86)."""
        if "x86_64" in self.features:
            self.call("llvm.x86.sse2.pause", ir.VoidType())

    def futex_wait(self, address: Any, expected: Any, timeout_ns: int) -> None:
        """Sleep while the int32 at an address has the expected value, at most so long, until `futex_wake`.

        Linux's futex(2) on memory that processes share. It may return early.
        """
        timeout = self.stack(16)  # struct timespec
        self.store(timeout, self.i64(0))
        self.store(timeout, self.i64(timeout_ns), 8)
        self._futex(address, 0, self.extend(self.wrap(expected), I64), timeout)

    def futex_wake(self, address: Any) -> None:
        """Wake all that sleep at an address."""
        self._futex(address, 1, self.i64(2**31 - 1), self.i64(0))

    def _futex(self, address: Any, operation: int, value: Value, timeout: Value) -> None:
        number = {"x86_64": 202, "aarch64": 98}[next(a for a in ("x86_64", "aarch64") if a in self.features)]
        function_type = ir.FunctionType(I64, [I64], var_arg=True)
        function = cgutils.get_or_insert_function(self.builder.module, function_type, "syscall")
        zero = self.i64(0)
        words = (self.i64(number), self.wrap(address), self.i64(operation), value, timeout, zero, zero)
        self.builder.call(function, [word.llvm for word in words])

    # ---- LLVM ---------------------------------------------------------------------------------------------------

    def call(self, name: str, result: ir.Type, *arguments: Value) -> Value:
        """Call an LLVM intrinsic."""
        function_type = ir.FunctionType(result, [v.type for v in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, function_type, name)
        return Value(self, self.builder.call(function, [v.llvm for v in arguments]))


def _with_element(type_: ir.Type, element: ir.Type) -> ir.Type:
    return ir.VectorType(element, type_.count) if isinstance(type_, ir.VectorType) else element


def _suffix(type_: ir.Type) -> str:
    element = type_.element if isinstance(type_, ir.VectorType) else type_
    return f"v{type_.count}{_element_suffix(element)}" if isinstance(type_, ir.VectorType) else _element_suffix(element)


def _element_suffix(type_: ir.Type) -> str:
    return {"half": "f16", "float": "f32", "double": "f64"}.get(str(type_), str(type_))
