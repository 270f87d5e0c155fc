"""Kernels that work on one row: quantisation, norms, activations, rotary embedding."""

from __future__ import annotations

import numpy as np
import pytest

from tests import reference
from workers.kernels import activation, norm
from workers.kernels.quantize import act_row_bytes, quantize_row
from workers.kernels.rope import PAIR_ADJACENT, PAIR_HALVES, rope_head

RECORD = np.dtype(
    [
        ("q", "i1", (2, 16)),
        ("scale", "<f4"),
        ("start", "<i4", (3,)),
        ("align", "<f4", (3,)),
        ("scaled_sum", "<f4"),
    ]
)


def quantized(x: np.ndarray) -> np.ndarray:
    """The records of one row."""
    out = np.zeros(len(x) // 32, dtype=RECORD)
    quantize_row(x.ctypes.data, len(x), out.ctypes.data)
    return out


def test_quantised_records_are_exactly_the_twins() -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(32 * 200) * 10.0 ** rng.integers(-20, 20, 32 * 200)).astype(np.float32)
    x[:32] = 0
    x[32:48] = np.append(np.arange(-7.5, 7), 127)  # scale 1: ties are rounded to even
    x[64] = 1e38
    x[96:128] = np.linspace(-1e-37, 1e-37, 32)  # 127 divided by it would be infinite
    for n, ratio in enumerate((1, 2, 3.99, 4, 7.99, 8, 15.99, 16)):  # of the halves' largest numbers, either way
        x[320 + 64 * n : 352 + 64 * n] = [2] * 16 + [2 / ratio] * 16
        x[352 + 64 * n : 384 + 64 * n] = [2 / ratio] * 16 + [2] * 16
    records = quantized(x)
    q, scale = (values[0] for values in reference.quantize_rows(x[None]))
    np.testing.assert_array_equal(records["q"], q)
    np.testing.assert_array_equal(records["scale"], scale[:, 1])
    total = q.astype(np.int32).sum(axis=-1)
    np.testing.assert_array_equal(records["scaled_sum"], (scale * total.astype(np.float32)).sum(axis=-1))
    ratio = np.divide(scale[:, 0], scale[:, 1], out=np.ones(200, np.float32), where=scale[:, 1] > 0)
    assert set(ratio) == {2.0**k for k in range(-3, 4)}
    magic = np.float32(1.5 * 2**23)
    for i, zero_point in enumerate((0, 8, 128)):
        np.testing.assert_array_equal(records["start"][:, i], (magic * ratio).view(np.int32) - zero_point * total[:, 0])
        np.testing.assert_array_equal(records["align"][:, i], magic - magic * ratio - zero_point * total[:, 1])
    assert records.nbytes == act_row_bytes(5, len(x))


@pytest.mark.parametrize("n", [16, 100, 576])
def test_norms_equal_their_twins(n: int) -> None:
    rng = np.random.default_rng(n)
    x = (rng.standard_normal(n) * 3 + 1).astype(np.float32)
    weight, bias = (rng.standard_normal(n).astype(np.float32) for _ in range(2))
    out = np.zeros(n + 1, dtype=np.float32)
    at = x.ctypes.data, n, weight.ctypes.data
    norm.rms_norm_row(*at, 1e-5, out.ctypes.data)
    np.testing.assert_allclose(out[:n], reference.rms_norm(x, weight, 1e-5), rtol=1e-6)
    norm.layer_norm_row(*at, bias.ctypes.data, 1e-5, out.ctypes.data)
    np.testing.assert_allclose(out[:n], reference.layer_norm(x, weight, bias, 1e-5), rtol=1e-5, atol=2e-6)
    norm.layer_norm_row(*at, 0, 1e-5, out.ctypes.data)
    np.testing.assert_allclose(out[:n], reference.layer_norm(x, weight, 0, 1e-5), rtol=1e-5, atol=2e-6)
    assert out[n] == 0
    norm.rms_norm_row(*at, 1e-5, out.ctypes.data)
    norm.rms_norm_row(*at, 1e-5, x.ctypes.data)
    np.testing.assert_array_equal(x, out[:n])


@pytest.mark.parametrize("n", [5, 64, 100])
def test_activations_equal_their_twins(n: int) -> None:
    rng = np.random.default_rng(n)
    gate, up = (rng.standard_normal(n).astype(np.float32) * 8 for _ in range(2))
    gate[:4] = [-200, 200, 0, -87]
    out = np.zeros(n + 1, dtype=np.float32)
    for name, twin in (("silu", reference.silu), ("gelu_tanh", reference.gelu_tanh)):
        getattr(activation, f"{name}_mul_row")(gate.ctypes.data, up.ctypes.data, n, out.ctypes.data)
        np.testing.assert_allclose(out[:n], twin(gate) * up, rtol=2e-6, atol=1e-6)
    activation.gelu_tanh_row(gate.ctypes.data, n, out.ctypes.data)
    np.testing.assert_allclose(out[:n], reference.gelu_tanh(gate), rtol=2e-6, atol=1e-6)
    assert out[n] == 0


@pytest.mark.parametrize(("pairing", "code"), [("adjacent", PAIR_ADJACENT), ("halves", PAIR_HALVES)])
@pytest.mark.parametrize(("head_dim", "rope_dim"), [(64, 64), (80, 80), (128, 96), (16, 16), (64, 20)])
def test_rotation_is_exactly_the_twins(pairing: str, code: int, head_dim: int, rope_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    head = rng.standard_normal(head_dim).astype(np.float32)
    angles = rng.uniform(0, 7, rope_dim // 2)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    expected = reference.rope(head, cos, sin, pairing)
    rope_head(head.ctypes.data, cos.ctypes.data, sin.ctypes.data, rope_dim, code)
    np.testing.assert_array_equal(head, expected)
