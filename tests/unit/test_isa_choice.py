"""Which instruction set a worker compiles for, from what the machine has and what was asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedserve.contract.errors import ConfigError
from workers.isa import best_isa, cpu_flags, isa_environment, kernel_environment

AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
VNNI = AVX512 | {"avx512_vnni"}


def test_the_widest_that_the_machine_has_is_the_hosts_own_code() -> None:
    assert [best_isa(flags) for flags in (VNNI, AVX2, frozenset())] == ["avx512", "avx2", "generic"]
    assert isa_environment("auto", VNNI) == {}
    assert isa_environment("auto", AVX2) == {}


def test_avx512_without_vnni_is_served_by_avx2() -> None:
    assert best_isa(AVX512) == "avx2"
    assert isa_environment("auto", AVX512)["NUMBA_CPU_NAME"] == "haswell"


def test_a_narrower_set_can_be_forced_and_a_wider_one_is_refused() -> None:
    assert isa_environment("avx2", VNNI)["NUMBA_CPU_NAME"] == "haswell"
    with pytest.raises(ConfigError, match=r"isa: this machine has no avx512 \(missing avx512_vnni\)"):
        isa_environment("avx512", AVX512)
    with pytest.raises(ConfigError, match="isa: expected one of auto, avx512, avx2, generic, got 'sse'"):
        isa_environment("sse", VNNI)


def test_flags_are_those_of_the_first_processor(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx2\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert cpu_flags(cpuinfo) == {"fpu", "avx2"}
    assert cpu_flags(tmp_path / "none") == frozenset()


def test_compiled_kernels_are_kept_under_a_name_of_their_sources(tmp_path: Path) -> None:
    folder = Path(kernel_environment("auto", tmp_path)["NUMBA_CACHE_DIR"])
    assert folder.parent == tmp_path
    assert kernel_environment("auto", tmp_path) == kernel_environment("auto", tmp_path)
