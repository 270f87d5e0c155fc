"""The packed layout and the conversions into it, against the `gguf` package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from pagedserve.models.spec import TensorType
from workers.kernels import linear_pack as pack

QUANTIZABLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def file_bytes(kind: TensorType, n_out: int, n_in: int) -> np.ndarray:
    """A tensor in its file's format: quantised by gguf where it can, else random quants with ordinary scales."""
    rng = np.random.default_rng(0)
    if kind.name in QUANTIZABLE:
        values = rng.standard_normal((n_out, n_in)).astype(np.float32)
        return gguf.quantize(values, gguf.GGMLQuantizationType[kind.name]).view(np.uint8).reshape(-1)
    # Any bytes below 0x3C are numbers of at most 1, also where they are read as the float16 scales of a block.
    return rng.integers(0, 0x3C, kind.num_bytes(n_out * n_in), dtype=np.uint8)


@pytest.mark.parametrize("kind", list(TensorType), ids=lambda kind: kind.name)
def test_every_type_is_dequantised_as_gguf_does(kind: TensorType) -> None:
    data = file_bytes(kind, 4, 512)
    expected = gguf.dequantize(data, gguf.GGMLQuantizationType[kind.name]).reshape(-1)
    np.testing.assert_array_equal(pack.to_float32(data, kind), expected)


@pytest.mark.parametrize("kind", list(TensorType), ids=lambda kind: kind.name)
def test_a_float32_layer_holds_the_dequantised_numbers(kind: TensorType) -> None:
    n_out, n_in = 35, 512
    data = file_bytes(kind, n_out, n_in)
    panels = pack.pack(data, kind, pack.WTYPE_F32, n_out, n_in).view(np.float32).reshape(3, n_in, 16)
    rows = panels.transpose(0, 2, 1).reshape(48, n_in)
    np.testing.assert_array_equal(rows[:n_out], pack.to_float32(data, kind).reshape(n_out, n_in))
    np.testing.assert_array_equal(rows[n_out:], 0)


def test_packing_in_chunks_is_packing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    n_out, n_in = 100, 256
    data = file_bytes(TensorType.Q6_K, n_out, n_in)
    whole = pack.pack(data, TensorType.Q6_K, pack.WTYPE_Q8_0, n_out, n_in)
    monkeypatch.setattr(pack, "_CHUNK_WEIGHTS", 32 * n_in)
    np.testing.assert_array_equal(pack.pack(data, TensorType.Q6_K, pack.WTYPE_Q8_0, n_out, n_in), whole)


def test_q8_0_panels_hold_the_blocks_bits_with_the_sign_turned() -> None:
    n_out, n_in = 16, 64
    data = file_bytes(TensorType.Q8_0, n_out, n_in)
    blocks = data.reshape(n_out, 2, 34)
    packed = pack.pack(data, TensorType.Q8_0, pack.WTYPE_Q8_0, n_out, n_in).reshape(2, 32 + 512)
    np.testing.assert_array_equal(packed[:, :32].reshape(2, 16, 2), blocks[:, :, :2].transpose(1, 0, 2))
    quants = packed[:, 32:].reshape(2, 8, 16, 4).transpose(2, 0, 1, 3).reshape(n_out, 2, 32)
    np.testing.assert_array_equal(quants ^ 0x80, blocks[:, :, 2:])


def test_requantised_weights_are_within_half_a_step() -> None:
    values = np.random.default_rng(1).standard_normal((3, 96)).astype(np.float32)
    values[0, :32] = 0
    values[1, 5] = 1e-7  # beside larger ones
    values[2, 32:64] *= 1e-9  # the scale underflows float16
    again = pack.to_float32(pack.requantize_q8_0(values), TensorType.Q8_0).reshape(values.shape)
    step = np.repeat(np.abs(values.reshape(3, 3, 32)).max(axis=-1) / 127, 32, axis=-1)
    # Half a step, and the rounding of the step itself to float16 (2^-11 of 127 steps; 2^-25 where it is subnormal).
    assert (np.abs(again - values) <= step * (0.5 + 127 * 2**-11) + 127 * 2.0**-25).all()
    np.testing.assert_array_equal(again[0, :32], 0)


def test_ragged_blocks_and_impossible_conversions_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 32, got 40"):
        pack.packed_bytes(pack.WTYPE_Q4_0, 16, 40)
    with pytest.raises(ValueError, match="Q4_0 cannot be packed as Q4_1"):
        pack.pack(file_bytes(TensorType.Q4_0, 16, 32), TensorType.Q4_0, pack.WTYPE_Q4_1, 16, 32)
