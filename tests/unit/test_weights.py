"""Rules of the weights segment: one packed copy in the types that were asked for, sealed, attached without the file."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pagedserve.contract import segments
from pagedserve.contract.errors import SegmentError
from pagedserve.models.spec import TensorType
from tests.golden_data import golden_checkpoint
from workers import weights
from workers.kernels import linear_pack as pack

TAG = "test-weights"


@pytest.fixture(autouse=True)
def no_segment_is_left() -> Iterator[None]:
    yield
    segments.unlink_instance(TAG)


@pytest.mark.parametrize(
    ("quantize", "compute", "wtype"),
    [
        ("none", "auto", pack.WTYPE_BF16),
        ("q8_0", "auto", pack.WTYPE_Q8_0),
        ("q4_0", "auto", pack.WTYPE_Q4_0),
        ("q4_0", "f32", pack.WTYPE_F32),
    ],
)
def test_float_matrices_are_packed_as_asked(quantize: str, compute: str, wtype: int) -> None:
    checkpoint = golden_checkpoint("llama-tiny")
    made = weights.prepare(TAG, checkpoint, checkpoint.spec, compute, quantize)
    assert {matrix.wtype for matrix in made.layout.matrices.values()} == {wtype}
    assert {"embed", "head", "layers.0.qkv", "layers.2.down"} <= set(made.layout.matrices)
    assert "layers.0.q" not in made.layout.matrices


def test_what_is_attached_is_what_was_prepared() -> None:
    checkpoint = golden_checkpoint("qwen2-tiny")
    made = weights.prepare(TAG, checkpoint, checkpoint.spec, "auto")
    attached = weights.attach(TAG)
    assert attached.layout == made.layout
    bias = attached.layout.vectors["layers.0.qkv.bias"]
    assert bias.size == (6 + 2 * 2) * 16


def test_a_segment_that_was_not_finished_is_refused() -> None:
    checkpoint = golden_checkpoint("qwen2-tiny")
    made = weights.prepare(TAG, checkpoint, checkpoint.spec, "auto")
    made._segment.memory[:8] = 0
    with pytest.raises(SegmentError, match="is not complete: its preparing worker died"):
        weights.attach(TAG)


@pytest.mark.parametrize(("convert", "name"), [(pack.requantize_q8_0, "Q8_0"), (pack.requantize_q4_0, "Q4_0")])
def test_quantising_rounds_as_the_reference_implementation_of_gguf_does(convert: object, name: str) -> None:
    from gguf import GGMLQuantizationType, quantize

    values = np.random.default_rng(3).standard_normal((8, 96)).astype(np.float32)
    values[0] = 0.0
    expected = quantize(values, GGMLQuantizationType[name])
    if name == "Q4_0":
        assert np.array_equal(convert(values), expected)  # type: ignore[operator]
    else:  # d is rounded to float16 before or after the quants are: one step apart at most
        ours = pack.to_float32(convert(values), TensorType.Q8_0)  # type: ignore[operator]
        step = np.abs(values).reshape(-1, 32).max(axis=1) / 127
        assert (np.abs(ours - values.reshape(-1)).reshape(-1, 32).max(axis=1) <= 0.51 * step + 1e-7).all()
