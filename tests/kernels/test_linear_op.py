"""LINEAR and GATED as a team runs them: shares or tiles, every output once, with the bits of a team of one."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.test_linear import Array, activations, file_bytes, packed
from workers.kernels import operations as p
from workers.kernels.linear import SILU, gated_tile, linear_tile
from workers.kernels.linear_op import is_shared_out, linear_tiles, next_share, run_linear_tile
from workers.kernels.linear_tiles import MAX_TILE_ROWS
from workers.kernels.quantize import act_row_bytes

N_IN = 64


def operation(code: int, wtype: int, w: Array, n_out: int, act: Array, private: int, *rest: int) -> list[int]:
    """An operation's row, which follows itself."""
    source = act.ctypes.data, act_row_bytes(wtype, N_IN), private
    row = [code, 0, 1, 0, wtype, w.ctypes.data, N_IN, n_out, *source, *rest]
    return row + [0] * (p.OP_COLUMNS - len(row))


def run_team(ops: Array, num_rows: int, team_size: int) -> None:
    """What the members of a team do, one after the other."""
    num_tiles, size = linear_tiles(ops[0], num_rows, team_size)
    assert num_tiles <= team_size or not is_shared_out(num_rows)
    for tile in reversed(range(num_tiles)):
        following, _ = next_share(ops, ops[0], tile, num_rows, team_size)
        run_linear_tile(ops[0], tile, size, num_rows, following)


@pytest.mark.parametrize("rows", [1, MAX_TILE_ROWS, MAX_TILE_ROWS + 1, 300])
@pytest.mark.parametrize("n_out", [7, 150, 16 * 36])
def test_members_write_every_output_with_the_same_bits(rows: int, n_out: int) -> None:
    rng = np.random.default_rng(rows)
    wtype, w = packed(file_bytes(rng, "Q4_1", n_out, N_IN), "Q4_1", n_out, N_IN)
    act = activations(rng.standard_normal((rows, N_IN)).astype(np.float32), wtype)
    expected = np.zeros((rows, n_out), dtype=np.float32)
    linear_tile(
        wtype, w.ctypes.data, N_IN, 0, -(-n_out // 16), act.ctypes.data, act_row_bytes(wtype, N_IN), 0, rows,
        expected.ctypes.data, n_out, n_out, 0, 0, 1,
    )  # fmt: skip
    for team_size in (1, 2, 3, 5, 64):
        out = np.full((rows, n_out), np.nan, dtype=np.float32)
        op = operation(p.LINEAR, wtype, w, n_out, act, 0, out.ctypes.data, n_out, 0, 0, 1)
        run_team(np.array([op], dtype=np.int64), rows, team_size)
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("rows", [1, MAX_TILE_ROWS, MAX_TILE_ROWS + 1])
def test_members_write_every_block_of_the_gated_output_with_the_same_bits(rows: int) -> None:
    rng = np.random.default_rng(rows)
    n_out = 32 * 9
    wtype, gate = packed(file_bytes(rng, "Q4_1", n_out, N_IN), "Q4_1", n_out, N_IN)
    _, up = packed(file_bytes(rng, "Q4_1", n_out, N_IN), "Q4_1", n_out, N_IN)
    act = activations(rng.standard_normal((rows, N_IN)).astype(np.float32), wtype)
    row_bytes = act_row_bytes(wtype, n_out)
    expected = np.zeros((rows, row_bytes), dtype=np.uint8)
    gated_tile(
        SILU, wtype, gate.ctypes.data, up.ctypes.data, N_IN, 0, n_out // 16, act.ctypes.data,
        act_row_bytes(wtype, N_IN), 0, rows, expected.ctypes.data, row_bytes,
    )  # fmt: skip
    for team_size in (1, 2, 4, 64):
        out = np.zeros_like(expected)
        op = operation(p.GATED, wtype, gate, n_out, act, 0, up.ctypes.data, SILU, out.ctypes.data, row_bytes)
        run_team(np.array([op], dtype=np.int64), rows, team_size)
        np.testing.assert_array_equal(out, expected)


def test_few_rows_are_read_from_the_private_place() -> None:
    rng = np.random.default_rng(0)
    wtype, w = packed(file_bytes(rng, "Q8_0", 32, N_IN), "Q8_0", 32, N_IN)
    for rows, expects_private in ((p.PRIVATE_ROWS, True), (p.PRIVATE_ROWS + 1, False)):
        x = rng.standard_normal((2, rows, N_IN)).astype(np.float32)
        shared, private = activations(x[0], wtype), activations(x[1], wtype)
        outs = np.zeros((2, rows, 32), dtype=np.float32)
        for source, out in zip((shared, private), outs, strict=True):
            op = operation(p.LINEAR, wtype, w, 32, source, 0, out.ctypes.data, 32, 0, 0, 1)
            run_team(np.array([op], dtype=np.int64), rows, 1)
        out = np.zeros((rows, 32), dtype=np.float32)
        op = operation(p.LINEAR, wtype, w, 32, shared, private.ctypes.data, out.ctypes.data, 32, 0, 0, 1)
        run_team(np.array([op], dtype=np.int64), rows, 2)
        np.testing.assert_array_equal(out, outs[int(expects_private)])
