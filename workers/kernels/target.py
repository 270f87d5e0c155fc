"""What Numba compiles for in this process: it reads its environment once (workers/isa.py chooses it), at import."""

from __future__ import annotations

from numba.core.registry import cpu_target


def target_features() -> frozenset[str]:
    """What Numba compiles for in this process: "x86_64" or "aarch64", and instruction sets as LLVM names them."""
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return frozenset({name[1:] for name in features.split(",") if name.startswith("+")} | {triple.split("-")[0]})


def isa_name() -> str:
    """What this process compiles for: "avx512" (with VNNI), "avx2" (with FMA and F16C) or "generic"."""
    features = target_features()
    if {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni"} <= features:
        return "avx512"
    if {"avx2", "fma", "f16c"} <= features:
        return "avx2"
    return "generic"
