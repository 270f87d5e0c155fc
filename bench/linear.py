"""Linear layers by themselves: every weight type x numbers of rows, weights from memory as in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from bench.team import Team
from pagedserve.models.spec import TensorType
from workers.kernels.linear import linear_tile
from workers.kernels.linear_pack import BLOCK, PANEL, is_quantized, native_wtype, pack
from workers.kernels.quantize import act_row_bytes, quantize_row
from workers.kernels.sync import barrier, claim

N_IN, N_OUT = 576, 1536  # gate, up: the most frequent shape in SmolLM2-135M
TYPES = (TensorType.Q4_0, TensorType.Q4_1, TensorType.Q8_0, TensorType.F16, TensorType.BF16, TensorType.F32)
ROWS = (1, 2, 4, 8, 16, 64, 256, 512)
_WEIGHT_BYTES = 384 << 20  # of all copies of the layer: so much more than a third-level cache that it hardly helps
_ROWS_PER_TILE, _PANELS_PER_TILE = 128, 6

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Shape:
    """One layer of one weight type, and how many rows of activations meet it."""

    type: TensorType
    rows: int

    @property
    def num_operations(self) -> int:
        """Multiplies and adds of weights with activations."""
        return 2 * N_IN * N_OUT * self.rows


def packed_layer(kind: TensorType) -> Bytes:
    """A packed layer of random weights."""
    wtype = native_wtype(kind)
    assert wtype is not None
    return pack(_random_weights(kind), kind, wtype, N_OUT, N_IN)


def measure(shape: Shape, layer: Bytes, team: Team) -> float:
    """Seconds that the team takes for the layer."""
    wtype = native_wtype(shape.type)
    assert wtype is not None
    layers = np.resize(layer, (max(2, _WEIGHT_BYTES // layer.nbytes), layer.nbytes))
    x = np.random.default_rng(1).standard_normal((shape.rows, N_IN)).astype(np.float32)
    rows: Any = x
    if is_quantized(wtype):
        rows = np.zeros((shape.rows, act_row_bytes(wtype, N_IN)), dtype=np.uint8)
        for source, target in zip(x, rows, strict=True):
            quantize_row(source.ctypes.data, N_IN, target.ctypes.data)
    out = np.zeros((shape.rows, N_OUT), dtype=np.float32)
    addresses = (layers.ctypes.data, rows.ctypes.data, out.ctypes.data)
    return team.seconds(
        _layers, wtype, *addresses, len(layers), layer.nbytes, act_row_bytes(wtype, N_IN), shape.rows
    )


def _random_weights(kind: TensorType) -> Bytes:
    """A layer in its file's format, with scales of an ordinary size."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(N_OUT * N_IN).astype(np.float32)
    if kind is TensorType.F32:
        return values.view(np.uint8)
    if kind is TensorType.F16:
        return values.astype(np.float16).view(np.uint8)
    if kind is TensorType.BF16:
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    num_scales = 2 if kind is TensorType.Q4_1 else 1
    block_bytes = 2 * num_scales + (BLOCK if kind is TensorType.Q8_0 else BLOCK // 2)
    blocks = rng.integers(0, 256, (N_OUT * N_IN // BLOCK, block_bytes), dtype=np.uint8)
    blocks[:, : 2 * num_scales] = np.full(num_scales, 0.01, dtype=np.float16).view(np.uint8)
    return blocks.reshape(-1)


@njit(cache=True, nogil=True)
def _layers(
    repeats: int, wtype: int, layers: int, x: int, out: int, num_layers: int, layer_bytes: int, x_row_bytes: int,
    num_rows: int, control: int, team_size: int,
) -> None:
    """A repetition is one layer; the next one is another copy of it."""
    panel_tiles = N_OUT // PANEL // _PANELS_PER_TILE
    num_tiles = panel_tiles * ((num_rows + _ROWS_PER_TILE - 1) // _ROWS_PER_TILE)
    for repeat in range(repeats):
        w = layers + repeat % num_layers * layer_bytes
        tile = claim(control, 0)
        while tile < num_tiles:
            panel, row = tile % panel_tiles * _PANELS_PER_TILE, tile // panel_tiles * _ROWS_PER_TILE
            row_end = min(row + _ROWS_PER_TILE, num_rows)
            linear_tile(
                wtype, w, N_IN, panel, panel + _PANELS_PER_TILE,
                x, x_row_bytes, row, row_end, out, N_OUT, N_OUT, 0, 0, 1
            )  # fmt: skip
            tile = claim(control, 0)
        barrier(control, team_size)
