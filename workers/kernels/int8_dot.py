"""The int8 dot product in each instruction set: VNNI of 512 or 256 bits, AVX2, widening products. All are exact."""

from __future__ import annotations

from collections.abc import Callable

from workers.kernels.simd import I16, I32, Simd, Value, vector


def has_vnni(simd: Simd) -> bool:
    """Whether dot_u8s8 is one instruction, exact for every u."""
    return simd.isa == "avx512" or "avxvnni" in simd.features


def dot_u8s8(simd: Simd, acc: Value, u: Value, s: Value) -> Value:
    """acc[i] + sum over j of u[4i+j] * s[4i+j]: acc int32 [16], u unsigned and s signed bytes [64].

    u must be at most 127 where there is no VNNI.
    """
    if simd.isa == "avx512":
        as_i32 = [simd.bitcast(v, vector(I32)) for v in (u, s)]
        return simd.call("llvm.x86.avx512.vpdpbusd.512", vector(I32), acc, *as_i32)
    if has_vnni(simd):
        return _by_halves(simd, _vpdpbusd_256, acc, u, s)
    if simd.isa == "avx2":
        return _by_halves(simd, _dot_u7s8_avx2, acc, u, s)
    pairs = vector(I16, 32)
    u16, s16 = simd.bitcast(u, pairs), simd.bitcast(s, pairs)
    return _add_products(simd, acc, (u16 & 0xFF, u16 >> 8), _even_and_odd(simd, s16))


def dot_s8s8(simd: Simd, acc: Value, a: Value, b: Value) -> Value:
    """acc[i] + sum over j of a[4i+j] * b[4i+j], both signed, b at least -127. For where there is no VNNI."""
    if simd.isa == "avx2":
        return _by_halves(simd, _dot_s8s8_avx2, acc, a, b)
    pairs = vector(I16, 32)
    return _add_products(simd, acc, *(_even_and_odd(simd, simd.bitcast(v, pairs)) for v in (a, b)))


def _vpdpbusd_256(simd: Simd, acc: Value, u: Value, s: Value) -> Value:
    half = vector(I32, 8)
    return simd.call("llvm.x86.avx512.vpdpbusd.256", half, acc, simd.bitcast(u, half), simd.bitcast(s, half))


def _dot_u7s8_avx2(simd: Simd, acc: Value, u: Value, s: Value) -> Value:
    pairs = simd.call("llvm.x86.avx2.pmadd.ub.sw", vector(I16, 16), u, s)
    ones = simd.constant(vector(I16, 16), 1)
    return acc + simd.call("llvm.x86.avx2.pmadd.wd", vector(I32, 8), pairs, ones)


def _dot_s8s8_avx2(simd: Simd, acc: Value, a: Value, b: Value) -> Value:
    """|a| is unsigned, and b takes a's sign; -128 becomes 128, and two products of 128 * 127 still fit in int16."""
    magnitude = simd.call("llvm.x86.avx2.psign.b", a.type, a, a)
    return _dot_u7s8_avx2(simd, acc, magnitude, simd.call("llvm.x86.avx2.psign.b", b.type, b, a))


def _by_halves(simd: Simd, operation: Callable[..., Value], *vectors: Value) -> Value:
    low = operation(simd, *(simd.shuffle(v, v, range(v.type.count // 2)) for v in vectors))
    high = operation(simd, *(simd.shuffle(v, v, range(v.type.count // 2, v.type.count)) for v in vectors))
    return simd.shuffle(low, high, range(2 * low.type.count))


def _even_and_odd(simd: Simd, bytes_: Value) -> tuple[Value, Value]:
    """The signed bytes in the low and in the high half of each int16."""
    return simd.arithmetic_shift(bytes_ << 8, 8), simd.arithmetic_shift(bytes_, 8)


def _add_products(simd: Simd, acc: Value, a: tuple[Value, Value], b: tuple[Value, Value]) -> Value:
    """acc + the sum of products of neighbouring int16, of the even bytes and of the odd ones."""
    for left, right in zip(a, b, strict=True):
        n = left.type.count // 2
        wide = vector(I32, 2 * n)
        product = simd.extend(left, wide, signed=True) * simd.extend(right, wide, signed=True)
        # LLVM makes one pmaddwd of a product and this sum on x86.
        first, second = (simd.shuffle(product, product, range(start, 2 * n, 2)) for start in (0, 1))
        acc = acc + (first + second)
    return acc
