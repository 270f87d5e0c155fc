"""Linear layers against their twin, and the promise that an output's bits depend on nothing but its row and weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests import reference
from workers.kernels import linear_pack as pack
from workers.kernels.embedding import embed_row
from workers.kernels.linear import GELU_TANH, PASS_ROWS, SILU, gated_tile, linear_tile
from workers.kernels.quantize import act_row_bytes, quantize_row, quantize_row_twice

TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0")
Array = npt.NDArray[Any]


def file_bytes(rng: np.random.Generator, name: str, n_out: int, n_in: int) -> Array:
    """A tensor of random numbers of about the size that weights have, as its file stores it."""
    if name in ("F32", "F16", "BF16"):
        values = (rng.standard_normal((n_out, n_in)) / np.sqrt(n_in)).astype(np.float32)
        if name == "F32":
            return values.view(np.uint8).reshape(-1)
        if name == "F16":
            return values.astype(np.float16).view(np.uint8).reshape(-1)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1)
    block = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[name]
    data = rng.integers(0, 256, (n_out * n_in // 32, block), dtype=np.uint8)
    scale = (rng.uniform(-1, 1, len(data)) / (127 if name == "Q8_0" else 8) / np.sqrt(n_in)).astype(np.float16)
    data[:, 0:2] = scale[:, None].view(np.uint8)
    if name == "Q4_1":
        data[:, 2:4] = (scale * np.float16(-7.5))[:, None].view(np.uint8)
    return data.reshape(-1)


def packed(data: Array, name: str, n_out: int, n_in: int) -> tuple[int, Array]:
    """(weight type, packed layer) with the type kept."""
    source = SimpleNamespace(name=name)
    wtype = pack.native_wtype(source)
    assert wtype is not None
    return wtype, pack.pack(data, source, wtype, n_out, n_in)


def activations(x: Array, wtype: int) -> Array:
    """Rows as the layer reads them."""
    if not pack.is_quantized(wtype):
        return x
    rows = np.zeros((len(x), act_row_bytes(wtype, x.shape[1])), dtype=np.uint8)
    for row, target in zip(x, rows, strict=True):
        quantize_row(row.ctypes.data, len(row), target.ctypes.data)
    return rows


def run(
    wtype: int, w: Array, x: Array, n_out: int, *, bias: Array | None = None, residual: Array | None = None,
    panels_at_once: int = 1000, rows_at_once: int = 1000,
) -> Array:  # fmt: skip
    """The whole layer, tile by tile."""
    rows, n_in = x.shape
    act = activations(x, wtype)
    out = np.full((rows, n_out + 3), 7, dtype=np.float32)
    if residual is not None:
        out[:, :n_out] = residual
    num_panels = -(-n_out // 16)
    for panel in range(0, num_panels, panels_at_once):
        for row in range(0, rows, rows_at_once):
            linear_tile(
                wtype, w.ctypes.data, n_in, panel, min(num_panels, panel + panels_at_once), act.ctypes.data,
                act_row_bytes(wtype, n_in), row, min(rows, row + rows_at_once), out.ctypes.data, out.shape[1], n_out,
                0 if bias is None else bias.ctypes.data, 0 if residual is None else out.ctypes.data, 1,
            )  # fmt: skip
    assert (out[:, n_out:] == 7).all(), "columns beyond n_out were written"
    return out[:, :n_out].copy()


def outliers(rng: np.random.Generator, rows: int, n_in: int) -> Array:
    """Activations with a few large values, a block of zeros and tiny ones."""
    x = rng.standard_normal((rows, n_in)).astype(np.float32)
    x[:, rng.integers(n_in)] *= 50
    if n_in >= 64:
        x[0, :32] = 0
        x[-1, 32:64] *= 1e-20
    return x


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(
    ("rows", "n_out", "n_in"), [(1, 80, 64), (2, 17, 96), (5, 50, 1056), (13, 33, 1120), (100, 16, 64)]
)
def test_linear_layer_equals_its_twin(name: str, rows: int, n_out: int, n_in: int) -> None:
    rng = np.random.default_rng(rows)
    data = file_bytes(rng, name, n_out, n_in)
    wtype, w = packed(data, name, n_out, n_in)
    x = outliers(rng, rows, n_in)
    bias = rng.standard_normal(n_out).astype(np.float32)
    residual = rng.standard_normal((rows, n_out)).astype(np.float32)
    weights = reference.dequantize(data, name, n_out, n_in)
    is_quantized = pack.is_quantized(wtype)
    expected = reference.quantized_linear(x, data, name, n_out) if is_quantized else reference.linear(x, weights)
    expected = expected + bias + residual
    # float32 sums of n_in terms: the error grows with the sum of the terms' sizes, here by far less than n_in ulps.
    size = np.abs(x) @ np.abs(weights).T + np.abs(bias) + np.abs(residual)
    error = np.abs(run(wtype, w, x, n_out, bias=bias, residual=residual) - expected)
    assert (error <= 2e-6 * size).all(), (error / size).max()


@pytest.mark.parametrize("n_in", [1, 7, 31, 100])
@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_float_layers_take_any_number_of_inputs(name: str, n_in: int) -> None:
    rng = np.random.default_rng(n_in)
    data = file_bytes(rng, name, 21, n_in)
    wtype, w = packed(data, name, 21, n_in)
    x = rng.standard_normal((3, n_in)).astype(np.float32)
    expected = reference.linear(x, reference.dequantize(data, name, 21, n_in))
    np.testing.assert_allclose(run(wtype, w, x, 21), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", TYPES)
def test_bits_of_a_row_do_not_depend_on_the_batch(name: str) -> None:
    rows, n_out, n_in = PASS_ROWS + 7, 72, 1120
    rng = np.random.default_rng(1)
    wtype, w = packed(file_bytes(rng, name, n_out, n_in), name, n_out, n_in)
    x = outliers(rng, rows, n_in)
    expected = run(wtype, w, x, n_out)
    for count in (*range(1, 14), 17, 64, PASS_ROWS + 1):
        start = rng.integers(0, rows - count + 1)
        np.testing.assert_array_equal(run(wtype, w, x[start : start + count], n_out), expected[start : start + count])


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(("panels_at_once", "rows_at_once"), [(1, 1), (1, 1000), (2, 5), (3, 14), (4, 2), (6, 33)])
def test_bits_do_not_depend_on_how_work_is_cut(name: str, panels_at_once: int, rows_at_once: int) -> None:
    rows, n_out, n_in = 40, 88, 1056
    rng = np.random.default_rng(2)
    wtype, w = packed(file_bytes(rng, name, n_out, n_in), name, n_out, n_in)
    x = outliers(rng, rows, n_in)
    cut = run(wtype, w, x, n_out, panels_at_once=panels_at_once, rows_at_once=rows_at_once)
    np.testing.assert_array_equal(cut, run(wtype, w, x, n_out))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_dot_products_of_extreme_quants_are_exact(name: str) -> None:
    """All quants and inputs at their limits, where a saturating or overflowing instruction would show."""
    n_out, n_in = 16, 64
    scale_bytes, quant_bytes, low, high = {
        "Q4_0": (2, 16, 0x00, 0xFF),
        "Q4_1": (4, 16, 0x00, 0xFF),
        "Q8_0": (2, 32, 0x80, 0x7F),
    }[name]
    data = np.zeros((n_out * n_in // 32, scale_bytes + quant_bytes), dtype=np.uint8)
    data[:, 0:2] = np.ones(1, np.float16).view(np.uint8)  # d = 1, m = 0
    data[:n_out, scale_bytes:] = low
    data[n_out:, scale_bytes:] = high
    data = data.reshape(-1)
    wtype, w = packed(data, name, n_out, n_in)
    weights = reference.dequantize(data, name, n_out, n_in)
    for sign in (1, -1):
        for first, second in ((1, 1), (8, 1), (1, 8)):  # of the halves' scales
            x = np.resize(np.repeat(np.float32([127 * sign * first, 127 * sign * second]), 16), (3, n_in))
            np.testing.assert_array_equal(run(wtype, w, x, n_out), x.astype(np.float64) @ weights.T.astype(np.float64))


@pytest.mark.parametrize("name", ["F32", "Q4_0", "Q4_1", "Q8_0"])
def test_padding_of_the_last_panel_is_never_nan(name: str) -> None:
    rng = np.random.default_rng(3)
    n_out, n_in = 3, 64
    data = file_bytes(rng, name, n_out, n_in)
    source = SimpleNamespace(name=name)
    wtype = pack.native_wtype(source)
    assert wtype is not None
    dirty = np.full(pack.packed_bytes(wtype, n_out, n_in), 0xFF, dtype=np.uint8)
    pack.pack(data, source, wtype, n_out, n_in, dirty)
    out = np.zeros((2, 16), dtype=np.float32)
    act = activations(rng.standard_normal((2, n_in)).astype(np.float32), wtype)
    linear_tile(
        wtype, dirty.ctypes.data, n_in, 0, 1, act.ctypes.data, act_row_bytes(wtype, n_in), 0, 2,
        out.ctypes.data, 16, 16, 0, 0, 1,
    )  # fmt: skip
    np.testing.assert_array_equal(out[:, n_out:], 0)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_two_terms_leave_nearly_nothing_of_the_activations_rounding(name: str) -> None:
    rows, n_out, n_in = PASS_ROWS, 50, 96
    rng = np.random.default_rng(6)
    data = file_bytes(rng, name, n_out, n_in)
    wtype, w = packed(data, name, n_out, n_in)
    x = outliers(rng, rows, n_in)
    row_bytes = act_row_bytes(wtype, n_in)
    act = np.zeros((rows, 2 * row_bytes), dtype=np.uint8)
    for row, target in zip(x, act, strict=True):
        quantize_row_twice(row.ctypes.data, n_in, target.ctypes.data)
    outs = []
    for rows_at_once in (1, 7, rows):
        out = np.zeros((rows, n_out), dtype=np.float32)
        for row in range(0, rows, rows_at_once):
            linear_tile(
                wtype, w.ctypes.data, n_in, 0, 4, act.ctypes.data, row_bytes, row, min(rows, row + rows_at_once),
                out.ctypes.data, n_out, n_out, 0, 0, 2,
            )  # fmt: skip
        outs.append(out)
    np.testing.assert_array_equal(outs[1], outs[0])
    np.testing.assert_array_equal(outs[2], outs[0])
    weights = reference.dequantize(data, name, n_out, n_in)
    exact = reference.linear(x, weights)
    # A number is off by at most half a step of the second term: 1 / (2 * 254 * 127) of its block's largest.
    largest = np.abs(x).max(axis=-1, keepdims=True)
    assert (np.abs(outs[0] - exact) <= largest / 60_000 * np.abs(weights).sum(axis=-1)).all()


@pytest.mark.parametrize("kind", [SILU, GELU_TANH])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "F16"])
@pytest.mark.parametrize("rows", [1, 2, 5, 20])
def test_fused_gate_and_up_give_the_bits_of_the_unfused(kind: int, name: str, rows: int) -> None:
    from workers.kernels.activation import gelu_tanh_mul_row, silu_mul_row

    rng = np.random.default_rng(4)
    n_out, n_in = 160, 96
    wtype, gate = packed(file_bytes(rng, name, n_out, n_in), name, n_out, n_in)
    _, up = packed(file_bytes(rng, name, n_out, n_in), name, n_out, n_in)
    x = outliers(rng, rows, n_in)
    a, b = run(wtype, gate, x, n_out), run(wtype, up, x, n_out)
    for row_a, row_b in zip(a, b, strict=True):
        (silu_mul_row if kind == SILU else gelu_tanh_mul_row)(
            row_a.ctypes.data, row_b.ctypes.data, n_out, row_a.ctypes.data
        )
    expected = activations(a, pack.WTYPE_Q8_0)
    act, out = activations(x, wtype), np.zeros_like(expected)
    for begin, end in ((0, 2), (2, 8), (8, 10)):
        gated_tile(
            kind, wtype, gate.ctypes.data, up.ctypes.data, n_in, begin, end,
            act.ctypes.data, act_row_bytes(wtype, n_in), 0, rows, out.ctypes.data, out.shape[1],
        )  # fmt: skip
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("name", TYPES)
def test_embedding_rows_are_the_dequantised_ones(name: str) -> None:
    rng = np.random.default_rng(5)
    n_out, n_in = 37, 96
    data = file_bytes(rng, name, n_out, n_in)
    wtype, w = packed(data, name, n_out, n_in)
    out = np.zeros(n_in, dtype=np.float32)
    for token_id in (0, 15, 16, 36):
        embed_row(wtype, w.ctypes.data, n_in, token_id, out.ctypes.data, 1.5)
        np.testing.assert_array_equal(
            out, np.float32(1.5) * reference.dequantize(data, name, n_out, n_in)[token_id]
        )


READ_AT_THE_END_OF_MEMORY = """
import ctypes, mmap
import numpy as np
from tests.kernels import test_linear as t

rng = np.random.default_rng(0)
pages = 16
memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
start = np.frombuffer(memory, np.uint8).ctypes.data
end = start + pages * mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mprotect(ctypes.c_void_p(end), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
for name in t.TYPES:
    n_out = 48  # two panels, and one
    wtype, w = t.packed(t.file_bytes(rng, name, n_out, 64), name, n_out, 64)
    for place in (0, 1):  # of the weights, of the activations
        for rows in range(1, 14):
            act = t.activations(rng.standard_normal((rows, 64)).astype(np.float32), wtype).view(np.uint8)
            data = [w, act][place].reshape(-1)
            at = end - data.nbytes
            ctypes.memmove(at, data.ctypes.data, data.nbytes)
            addresses = [w.ctypes.data, act.ctypes.data]
            addresses[place] = at
            out = np.zeros((rows, n_out), np.float32)
            t.linear_tile(
                wtype, addresses[0], 64, 0, 3, addresses[1], t.act_row_bytes(wtype, 64), 0, rows,
                out.ctypes.data, n_out, n_out, 0, 0, 1,
            )
"""


def test_nothing_is_read_beyond_the_weights_and_the_last_row() -> None:
    """In a process of its own: where this is wrong, it is killed."""
    subprocess.run([sys.executable, "-c", READ_AT_THE_END_OF_MEMORY], check=True, cwd=Path(__file__).parents[2])
