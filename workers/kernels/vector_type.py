"""Numba types for vectors in registers, their operators, and `emits`, which makes a Numba function of emitted code."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

from numba import types
from numba.core.typing import signature
from numba.core.typing.templates import AbstractTemplate, infer_global
from numba.extending import intrinsic, lower_builtin, models, register_model

from workers.kernels import simd as s
from workers.kernels.simd import Simd, Value


class VectorType(types.Type):
    """16 lanes of one element type, as a Numba type."""

    def __init__(self, name: str, element: Any) -> None:
        self.element = element
        super().__init__(name=name)


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, type_: VectorType) -> None:
        super().__init__(manager, type_, s.vector(type_.element))


F32x16 = VectorType("F32x16", s.F32)
I32x16 = VectorType("I32x16", s.I32)
Mask16 = VectorType("Mask16", s.I1)


def _operand(context: Any, builder: Any, simd: Simd, type_: Any, wanted: VectorType, value: Any) -> Value:
    """A vector as it is; a number converted to the vector's element type and broadcast."""
    if isinstance(type_, VectorType):
        return simd.wrap(value)
    element = types.float32 if wanted is F32x16 else types.int32
    return simd.splat(context.cast(builder, value, type_, element))


def _operator(function: Callable[..., Any], pairs: dict[VectorType, VectorType]) -> None:
    """Define `function` on two vectors, or a vector and a number; `pairs` maps operand type to result type."""

    class Template(AbstractTemplate):
        def generic(self, args: tuple[Any, ...], kws: dict[str, Any]) -> Any:
            vectors = [a for a in args if isinstance(a, VectorType)]
            if kws or len(args) != 2 or not vectors or vectors[0] not in pairs:
                return None
            if any(a != vectors[0] and not isinstance(a, types.Number) for a in args):
                return None
            return signature(pairs[vectors[0]], *args)

    infer_global(function)(Template)

    def lower(context: Any, builder: Any, sig: Any, args: tuple[Any, ...]) -> Any:
        simd = Simd(builder)
        wanted = next(a for a in sig.args if isinstance(a, VectorType))
        left, right = (
            _operand(context, builder, simd, type_, wanted, value) for type_, value in zip(sig.args, args, strict=True)
        )
        result = left.equals(right) if function is operator.eq else function(left, right)
        return result.llvm

    for operands in ((VectorType, VectorType), (VectorType, types.Number), (types.Number, VectorType)):
        lower_builtin(function, *operands)(lower)


for _function in (operator.add, operator.sub, operator.mul):
    _operator(_function, {F32x16: F32x16, I32x16: I32x16})
_operator(operator.truediv, {F32x16: F32x16})
for _function in (operator.lshift, operator.rshift):
    _operator(_function, {I32x16: I32x16})
for _function in (operator.and_, operator.or_, operator.xor):
    _operator(_function, {I32x16: I32x16, Mask16: Mask16})
for _function in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq):
    _operator(_function, {F32x16: Mask16, I32x16: Mask16})


def emits(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Turn `emit(simd, *values)` into a function for @njit code. Arguments are converted to these Numba types."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def define(typing_context: Any, *given: Any) -> Any:
            if len(given) != len(arguments):
                return None
            wanted = [a if isinstance(a, VectorType) or not isinstance(g, VectorType) else None
                      for a, g in zip(arguments, given, strict=True)]
            if None in wanted:
                return None

            def generate(context: Any, builder: Any, sig: Any, args: tuple[Any, ...]) -> Any:
                simd = Simd(builder)
                values = []
                for given_type, wanted_type, value in zip(sig.args, arguments, args, strict=True):
                    if isinstance(wanted_type, VectorType):
                        values.append(_operand(context, builder, simd, given_type, wanted_type, value))
                    else:
                        values.append(simd.wrap(context.cast(builder, value, given_type, wanted_type)))
                emitted = emit(simd, *values)
                return context.get_dummy_value() if emitted is None else emitted.llvm

            return signature(result, *given), generate

        define.__name__ = define.__qualname__ = emit.__name__
        define.__doc__ = emit.__doc__
        define.__module__ = emit.__module__
        define.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]
        return intrinsic(define)

    return decorate
