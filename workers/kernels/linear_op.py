"""LINEAR and GATED in a program: which panels and rows of a matrix a member of the team computes, and when.

Many rows: tiles, each claimed by whoever is free. Few rows, where reading the matrix is all the work: every member has
its share of the panels. It asks for the first of its share of the next matrix while it ends this one, and for more
while it waits for the others, so that memory is never idle.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from workers.kernels.linear import gated_tile, linear_tile, panel_bytes
from workers.kernels.linear_pack import PANEL
from workers.kernels.linear_tiles import MAX_TILE_ROWS
from workers.kernels.operations import (
    CODE,
    GATED,
    MATRIX,
    N_IN,
    N_OUT,
    NEXT,
    PRIVATE_ROWS,
    PRIVATE_SOURCE,
    REST,
    SOURCE,
    SOURCE_ROW_BYTES,
    WTYPE,
)

_TILES_PER_MEMBER = 3  # enough that members end together, long enough to be streams of memory
_MAX_PANELS = 64
_MAX_ROWS = 128  # of a tile: its activations stay in a core's L2 while panels stream by
_COMING_BYTES = 256 << 10  # of a share, asked for while a member waits: a quarter of its L2


@njit(cache=True)
def is_shared_out(num_rows: int) -> bool:
    """Whether a matrix is read once, each member its share, the tile of its rank: few rows fit one register tile."""
    return num_rows <= MAX_TILE_ROWS


@njit(cache=True)
def linear_tiles(op: Any, num_rows: int, team_size: int) -> tuple[int, int]:
    """How many tiles the operation has, and their size in panels."""
    num_panels = _num_panels(op)
    row_groups = (num_rows + _MAX_ROWS - 1) // _MAX_ROWS
    if is_shared_out(num_rows):
        size = (num_panels + team_size - 1) // team_size
    else:
        size = max(1, min(_MAX_PANELS, num_panels * row_groups // (team_size * _TILES_PER_MEMBER)))
    if op[CODE] == GATED:
        size = (size + 1) // 2 * 2  # a block of the quantised output is two panels
    return row_groups * ((num_panels + size - 1) // size), size


@njit(cache=True)
def next_share(ops: Any, op: Any, member: int, num_rows: int, team_size: int) -> tuple[int, int]:
    """Where a member's share of the next matrix begins, and up to where to ask for it; (0, 0): it has none."""
    if not is_shared_out(num_rows):
        return 0, 0
    following = ops[op[NEXT]]
    num_tiles, size = linear_tiles(following, num_rows, team_size)
    if member >= num_tiles:
        return 0, 0
    stride = panel_bytes(following[WTYPE], following[N_IN])
    begin = following[MATRIX] + member * size * stride
    return begin, begin + min(size * stride, _COMING_BYTES)


@njit(cache=True, inline="always")  # else the kernels below would be compiled once more, as a part of it
def run_linear_tile(op: Any, tile: int, size: int, num_rows: int, following: int) -> None:
    """One tile; `following` is where the weights begin that this member reads next (0: nobody knows).

    Tiles go through the panels first: a group of rows stays in cache meanwhile.
    """
    num_panels = _num_panels(op)
    panel_tiles = (num_panels + size - 1) // size
    panel, row = tile % panel_tiles * size, tile // panel_tiles * _MAX_ROWS
    panel_end, row_end = min(panel + size, num_panels), min(row + _MAX_ROWS, num_rows)
    wtype, matrix, n_in, x_row_bytes = op[WTYPE], op[MATRIX], op[N_IN], op[SOURCE_ROW_BYTES]
    is_private = num_rows <= PRIVATE_ROWS and op[PRIVATE_SOURCE] != 0
    x = op[PRIVATE_SOURCE] if is_private else op[SOURCE]
    a = op[REST:]
    if op[CODE] == GATED:
        gated_tile(
            a[1], wtype, matrix, a[0], n_in, panel, panel_end, x, x_row_bytes, row, row_end, a[2], a[3], following
        )
    else:
        linear_tile(
            wtype, matrix, n_in, panel, panel_end, x, x_row_bytes, row, row_end,
            a[0], a[1], op[N_OUT], a[2], a[3], a[4], following,
        )  # fmt: skip


@njit(cache=True)
def _num_panels(op: Any) -> int:
    return (op[N_OUT] + PANEL - 1) // PANEL
