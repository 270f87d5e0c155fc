"""Linear layers by themselves: every weight type x numbers of rows, weights from memory as in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from bench.team import Team
from pagedserve.models.spec import TensorType
from workers.kernels.linear_op import is_shared_out, linear_tiles, next_share, run_linear_tile
from workers.kernels.linear_pack import BLOCK, is_quantized, native_wtype, pack
from workers.kernels.operations import ARGUMENTS, CODE, LINEAR, NEXT, OP_COLUMNS
from workers.kernels.quantize import act_row_bytes, quantize_row
from workers.kernels.sync import barrier, claim

N_IN, N_OUT = 576, 1536  # gate, up: the most frequent shape in SmolLM2-135M
TYPES = (TensorType.Q4_0, TensorType.Q4_1, TensorType.Q8_0, TensorType.F16, TensorType.BF16, TensorType.F32)
ROWS = (1, 2, 4, 8, 16, 64, 256, 512)
_WEIGHT_BYTES = 384 << 20  # of all copies of the layer: so much more than a third-level cache that it hardly helps

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
    ops = np.zeros((len(layers), OP_COLUMNS), dtype=np.int64)
    for index, (op, weights) in enumerate(zip(ops, layers, strict=True)):
        op[CODE], op[NEXT] = LINEAR, (index + 1) % len(ops)
        source = rows.ctypes.data, act_row_bytes(wtype, N_IN), 0
        arguments = wtype, weights.ctypes.data, N_IN, N_OUT, *source, out.ctypes.data, N_OUT, 0, 0, 1
        op[ARGUMENTS : ARGUMENTS + len(arguments)] = arguments
    return team.seconds(_layers, ops, shape.rows)


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
def _layers(repeats: int, ops: Any, num_rows: int, control: int, team_size: int) -> None:
    """A repetition is one layer, computed as in a step; the next one is another copy of it."""
    member = claim(control, 1)
    for repeat in range(repeats):
        op = ops[repeat % len(ops)]
        coming, coming_end = next_share(ops, op, member, num_rows, team_size)
        num_tiles, size = linear_tiles(op, num_rows, team_size)
        is_shared = is_shared_out(num_rows)
        tile = member if is_shared else claim(control, 0)
        while tile < num_tiles:
            run_linear_tile(op, tile, size, num_rows, coming)
            tile = num_tiles if is_shared else claim(control, 0)
        barrier(control, team_size, coming, coming_end)
