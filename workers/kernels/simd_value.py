"""What the SIMD layer computes with: LLVM types, and values with Python's operators. Emits through its Simd alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir

if TYPE_CHECKING:
    from workers.kernels.simd import Simd

LANES = 16

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
VOID_PTR = ir.IntType(8).as_pointer()


def vector(element: ir.Type, lanes: int = LANES) -> ir.VectorType:
    """The LLVM type of `lanes` elements."""
    return ir.VectorType(element, lanes)


class Value:
    """An LLVM scalar or vector with Python's operators: + - * / on floats; + - * & | ^ << >> on integers.

    `>>` is logical. Python numbers become constants of the other operand's type, in every lane. Comparisons give masks
    for `Simd.select`; integers compare signed. `a * b + c` rounds twice: `Simd.fma` rounds once.
    """

    def __init__(self, simd: Simd, value: Any) -> None:
        self.simd = simd
        self.llvm = value

    @property
    def type(self) -> ir.Type:
        """The LLVM type."""
        return self.llvm.type

    def _binary(
        self, other: Value | int | float, float_op: str | None, int_op: str | None, swap: bool = False
    ) -> Value:
        left, right = self.llvm, self.simd.like(self, other).llvm
        if swap:
            left, right = right, left
        op = float_op if _is_float(self.type) else int_op
        if op is None:
            raise TypeError(f"no such operation on {self.type}")
        return Value(self.simd, getattr(self.simd.builder, op)(left, right))

    def __add__(self, other: Value | int | float) -> Value:
        return self._binary(other, "fadd", "add")

    __radd__ = __add__

    def __sub__(self, other: Value | int | float) -> Value:
        return self._binary(other, "fsub", "sub")

    def __rsub__(self, other: Value | int | float) -> Value:
        return self._binary(other, "fsub", "sub", swap=True)

    def __mul__(self, other: Value | int | float) -> Value:
        return self._binary(other, "fmul", "mul")

    __rmul__ = __mul__

    def __truediv__(self, other: Value | int | float) -> Value:
        return self._binary(other, "fdiv", None)

    def __rtruediv__(self, other: Value | int | float) -> Value:
        return self._binary(other, "fdiv", None, swap=True)

    def __and__(self, other: Value | int) -> Value:
        return self._binary(other, None, "and_")

    def __or__(self, other: Value | int) -> Value:
        return self._binary(other, None, "or_")

    def __xor__(self, other: Value | int) -> Value:
        return self._binary(other, None, "xor")

    def __lshift__(self, other: Value | int) -> Value:
        return self._binary(other, None, "shl")

    def __rshift__(self, other: Value | int) -> Value:
        return self._binary(other, None, "lshr")

    def _compare(self, op: str, other: Value | int | float) -> Value:
        builder, right = self.simd.builder, self.simd.like(self, other).llvm
        if _is_float(self.type):
            return Value(self.simd, builder.fcmp_ordered(op, self.llvm, right))
        return Value(self.simd, builder.icmp_signed(op, self.llvm, right))

    def __lt__(self, other: Value | int | float) -> Value:
        return self._compare("<", other)

    def __le__(self, other: Value | int | float) -> Value:
        return self._compare("<=", other)

    def __gt__(self, other: Value | int | float) -> Value:
        return self._compare(">", other)

    def __ge__(self, other: Value | int | float) -> Value:
        return self._compare(">=", other)

    def equals(self, other: Value | int | float) -> Value:
        """Mask of equal lanes (== is left to Python)."""
        return self._compare("==", other)


def _is_float(type_: ir.Type) -> bool:
    element = type_.element if isinstance(type_, ir.VectorType) else type_
    return isinstance(element, (ir.HalfType, ir.FloatType, ir.DoubleType))
