"""All kernels compiled for each instruction set, each in a process of its own, since Numba chooses once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pagedserve.config import load_config
from pagedserve.contract.errors import ConfigError
from workers.isa import cpu_flags, isa_environment, kernel_environment

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


def outputs_of(isa: str, folder: Path, features: str = "") -> dict[str, np.ndarray]:
    """What the probe computes when it is compiled for `isa` and, as LLVM names them, more features."""
    try:
        isa_environment(isa)
    except ConfigError:
        pytest.skip(f"this machine has no {isa}")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_CPU_")}
    environment |= kernel_environment(isa, Path(load_config().home))
    if features:
        environment["NUMBA_CPU_FEATURES"] += f",{features}"
    file = folder / f"{isa}{features}.npz"
    subprocess.run([sys.executable, "-m", "tests.kernels.isa_probe", str(file)], check=True, cwd=ROOT, env=environment)
    return dict(np.load(file))


def test_avx512_and_avx2_have_the_same_bits(tmp_path: Path) -> None:
    wide, narrow = outputs_of("avx512", tmp_path), outputs_of("avx2", tmp_path)
    assert (str(wide.pop("isa")), str(narrow.pop("isa"))) == ("avx512", "avx2")
    for name, array in wide.items():
        np.testing.assert_array_equal(array.view(np.int32), narrow[name].view(np.int32), err_msg=name)


def test_avx2_has_the_same_bits_with_vnni_of_256_bits(tmp_path: Path) -> None:
    if "avx_vnni" not in cpu_flags():
        pytest.skip("this machine has no AVX-VNNI")
    plain, vnni = outputs_of("avx2", tmp_path), outputs_of("avx2", tmp_path, "+avxvnni")
    assert (str(plain.pop("isa")), str(vnni.pop("isa"))) == ("avx2", "avx2 with VNNI")
    for name, array in plain.items():
        np.testing.assert_array_equal(array.view(np.int32), vnni[name].view(np.int32), err_msg=name)


def test_generic_code_differs_by_rounding_only(tmp_path: Path) -> None:
    best, generic = outputs_of("auto", tmp_path), outputs_of("generic", tmp_path)
    assert str(generic.pop("isa")) == "generic"
    assert (best["sampled"] == generic["sampled"]).mean() > 0.9  # a weight on an edge may round to the other side
    for name, array in generic.items():
        if name != "sampled":
            np.testing.assert_allclose(array, best[name], rtol=1e-4, atol=1e-5, err_msg=name)
