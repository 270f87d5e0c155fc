"""Chooses the instruction set and the cache folder that Numba will use; never imports Numba itself.

Numba reads its environment once, when it is first imported: a worker sets what `kernel_environment` gives before that.
"""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import version
from pathlib import Path

from pagedserve.contract.errors import ConfigError

CHOICES = ("auto", "avx512", "avx2", "generic")

_NEEDED = {
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "fma", "f16c"},
    "avx2": {"avx2", "fma", "f16c", "bmi2"},
}
_FORCED = {
    "avx2": {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+popcnt"},
    "generic": {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "+sse2"},
}


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The instruction sets that the kernel reports for the first processor (empty where there is no such file)."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), []))


def best_isa(flags: frozenset[str]) -> str:
    """The widest of "avx512" (with VNNI), "avx2" and "generic" that these flags allow."""
    return next((isa for isa, needed in _NEEDED.items() if needed <= flags), "generic")


def isa_environment(choice: str, flags: frozenset[str] | None = None) -> dict[str, str]:
    """Environment variables that make Numba compile for `choice`; empty when the host's own best is wanted.

    ConfigError when the machine lacks it. A machine with AVX-512 but no VNNI is served by the AVX2 code.
    """
    flags = cpu_flags() if flags is None else flags
    if choice not in CHOICES:
        raise ConfigError(f"isa: expected one of {', '.join(CHOICES)}, got {choice!r}")
    best = best_isa(flags)
    wanted = best if choice == "auto" else choice
    missing = _NEEDED.get(wanted, set()) - flags
    if missing:
        raise ConfigError(f"isa: this machine has no {wanted} (missing {', '.join(sorted(missing))})")
    if wanted == best and not (wanted == "avx2" and "avx512f" in flags):
        return {}
    if platform.machine() not in ("x86_64", "AMD64"):
        return {}
    return dict(_FORCED[wanted])


def kernel_environment(choice: str, cache_root: Path) -> dict[str, str]:
    """`isa_environment`, and a NUMBA_CACHE_DIR that is the sources' own.

    Numba looks only at the file of a cached function, not at the modules that it calls; a folder named after the
    contents of all kernel sources cannot go stale.
    """
    return {**isa_environment(choice), "NUMBA_CACHE_DIR": str(cache_root / f"kernels-{_source_digest()}")}


def _source_digest() -> str:
    digest = hashlib.sha256(f"{platform.python_version()} {version('numba')} {version('llvmlite')}".encode())
    for source in sorted((Path(__file__).parent / "kernels").rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
