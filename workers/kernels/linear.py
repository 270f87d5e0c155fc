"""Linear layers over packed weights: the tiles that a team claims. Every output has one order of operations.

A tile is panels x rows; inside it register tiles of several heights cover the rows. Sizes are chosen for speed, and the
bits of an output never depend on them.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types
from numba.extending import intrinsic

from workers.kernels.activation import gelu_tanh, silu
from workers.kernels.linear_pack import (
    BLOCK,
    PANEL,
    WTYPE_F32,
    WTYPE_Q4_0,
    WTYPE_Q8_0,
    block_bytes,
)
from workers.kernels.linear_tiles import MAX_TILE_ROWS, PAIR_ROWS, RECORD_BYTES, TILE_ROWS, pair_tile, register_tile
from workers.kernels.quantize import NUM_BLOCKS, QUANTIZES_MANY, quantize_block, quantize_blocks
from workers.kernels.simd import Simd
from workers.kernels.vector import load_f32, load_first, store_f32, store_first

SILU, GELU_TANH = 0, 1

# Sums of some panels and rows are kept in 24 KB before they are written out: a row then gets 256 bytes at a time.
SUM_PANELS = 4
SUM_ROW_BYTES = SUM_PANELS * 64
PASS_ROWS = 96
SUMS_BYTES = (PASS_ROWS + MAX_TILE_ROWS) * SUM_ROW_BYTES  # a register tile may reach beyond the last row

_BLOCK_BYTES = tuple(block_bytes(wtype) if wtype >= WTYPE_Q4_0 else 0 for wtype in range(WTYPE_Q8_0 + 1))


@intrinsic(prefer_literal=True)
def stack(typing_context: Any, num_bytes: Any) -> Any:
    """The address of a constant number of bytes on the stack; they last until the function returns."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return Simd(builder).stack(num_bytes.literal_value).llvm

    return types.int64(num_bytes), generate


@njit(cache=True)
def panel_bytes(wtype: int, n_in: int) -> int:
    """linear_pack.panel_bytes, for compiled code."""
    if wtype >= WTYPE_Q4_0:
        return n_in // BLOCK * _BLOCK_BYTES[wtype]
    return n_in * PANEL * (4 if wtype == WTYPE_F32 else 2)


@njit(cache=True)
def _tile_rows(left: int) -> int:
    """The lowest register tile that covers the rows left, or the highest there is."""
    for num_rows in TILE_ROWS:
        if num_rows >= left:
            return num_rows
    return MAX_TILE_ROWS


@njit(cache=True)
def _takes_pairs(num_rows: int) -> bool:
    """Whether panels are taken by twos. Up to 4 rows, reading them is all the work; 8 are one tile of one panel."""
    return num_rows > 4 and num_rows not in (7, 8)


@njit(cache=True)
def _pair_rows(left: int) -> int:
    """_tile_rows of two panels; two tiles of 4 rows where one of 6 would leave one of 2."""
    for num_rows in PAIR_ROWS:
        if num_rows >= left:
            return num_rows
    return 4 if 4 in PAIR_ROWS and left in (7, 8) else PAIR_ROWS[-1]


@njit(cache=True)
def _sums(
    wtype: int, w: int, n_in: int, num_panels: int, x: int, x_row_bytes: int, num_rows: int, sums: int, following: int,
) -> None:
    """sums[row, panel, 16] = w x, of up to SUM_PANELS panels that begin at w, and up to PASS_ROWS rows."""
    steps = n_in // BLOCK if wtype >= WTYPE_Q4_0 else n_in
    stride = panel_bytes(wtype, n_in)
    end = w + num_panels * stride
    num_paired = num_panels // 2 * 2 if _takes_pairs(num_rows) else 0
    for panel in range(num_panels):
        begins = w + panel * stride
        row = 0
        while row < num_rows:
            left = num_rows - row
            at, to = x + row * x_row_bytes, sums + row * SUM_ROW_BYTES + 64 * panel
            if panel >= num_paired:
                height = _tile_rows(left)
                register_tile(
                    height, wtype, begins, steps, at, x_row_bytes, left - 1, to, SUM_ROW_BYTES, end, following
                )
            elif panel % 2 == 0:
                height = _pair_rows(left)
                coming = begins + 2 * stride if panel + 2 < num_panels else following
                pair_tile(height, wtype, begins, steps, at, x_row_bytes, left - 1, to, SUM_ROW_BYTES, coming)
            else:
                height = left  # done with the panel before
            row += height


@njit(cache=True)
def linear_tile(
    wtype: int, w: int, n_in: int, panel_begin: int, panel_end: int, x: int, x_row_bytes: int, row_begin: int,
    row_end: int, out: int, out_width: int, n_out: int, bias: int, residual: int, num_terms: int, following: int = 0,
) -> None:
    """out[row, col] = w[col] x[row] (+ bias[col]) (+ residual[row, col]) of some panels and rows.

    `w` is a packed [n_out, n_in] layer; `x` holds activation rows as act_row_bytes says; out and residual are float32
    with rows `out_width` numbers apart, bias is float32 [n_out]; bias and residual 0: none; residual may be out. Where
    num_terms is 2, a row of x is two activation rows (quantize_row_twice), whose products are added. `following` is
    where the weights begin that this worker reads next, which it asks for at the end (0: right behind these).
    """
    sums = stack(SUMS_BYTES)
    stride, pass_rows = panel_bytes(wtype, n_in), PASS_ROWS // num_terms
    for panel in range(panel_begin, panel_end, SUM_PANELS):
        num_panels = min(SUM_PANELS, panel_end - panel)
        begins = w + panel * stride
        coming = begins + num_panels * stride if following == 0 or panel + num_panels < panel_end else following
        for begin in range(row_begin, row_end, pass_rows):
            num_rows = min(pass_rows, row_end - begin)
            at = x + begin * num_terms * x_row_bytes
            _sums(wtype, begins, n_in, num_panels, at, x_row_bytes, num_rows * num_terms, sums, coming)
            for row in range(num_rows):
                for p in range(num_panels):
                    col = (panel + p) * PANEL
                    offset = 4 * ((begin + row) * out_width + col)
                    v = load_f32(sums + row * num_terms * SUM_ROW_BYTES + 64 * p)
                    if num_terms == 2:
                        v = v + load_f32(sums + (2 * row + 1) * SUM_ROW_BYTES + 64 * p)
                    if bias != 0:
                        v = v + load_first(bias + 4 * col, n_out - col)
                    if residual != 0:
                        v = v + load_first(residual + offset, n_out - col)
                    store_first(out + offset, v, n_out - col)


@njit(cache=True)
def gated_tile(
    kind: int, wtype: int, gate: int, up: int, n_in: int, panel_begin: int, panel_end: int, x: int, x_row_bytes: int,
    row_begin: int, row_end: int, out: int, out_row_bytes: int, following: int = 0,
) -> None:
    """Quantised act(gate x) * (up x) of some panels and rows: two linear_tiles, activation and quantize_row in one.

    kind is SILU or GELU_TANH; gate and up are packed layers of one type and shape, their outputs a multiple of 32;
    panel_begin and panel_end are even; out holds quantised rows, `out_row_bytes` apart; `following` as in linear_tile.
    The bits are the unfused ones.
    """
    gate_sums, up_sums = stack(SUMS_BYTES), stack(SUMS_BYTES)
    stride = panel_bytes(wtype, n_in)
    for panel in range(panel_begin, panel_end, SUM_PANELS):
        num_panels = min(SUM_PANELS, panel_end - panel)
        this_gate, this_up = gate + panel * stride, up + panel * stride
        coming = this_gate + num_panels * stride if following == 0 or panel + num_panels < panel_end else following
        for begin in range(row_begin, row_end, PASS_ROWS):
            num_rows = min(PASS_ROWS, row_end - begin)
            at = x + begin * x_row_bytes
            _sums(wtype, this_gate, n_in, num_panels, at, x_row_bytes, num_rows, gate_sums, this_up)
            _sums(wtype, this_up, n_in, num_panels, at, x_row_bytes, num_rows, up_sums, coming)
            for row in range(num_rows):
                for p in range(num_panels):
                    offset = row * SUM_ROW_BYTES + 64 * p
                    a = load_f32(gate_sums + offset)
                    a = silu(a) if kind == SILU else gelu_tanh(a)
                    store_f32(gate_sums + offset, a * load_f32(up_sums + offset))
            records = out + begin * out_row_bytes + panel // 2 * RECORD_BYTES
            _quantize_sums(gate_sums, num_rows, num_panels, records, out_row_bytes)


@njit(cache=True, inline="always")
def _quantize_sums(sums: int, num_rows: int, num_panels: int, records: int, out_row_bytes: int) -> None:
    """Quantise sums into records of rows that are out_row_bytes apart."""
    rows_at_once = 2 * NUM_BLOCKS // SUM_PANELS
    whole = num_rows // rows_at_once * rows_at_once if QUANTIZES_MANY and num_panels == SUM_PANELS else 0
    for row in range(0, whole, rows_at_once):
        quantize_blocks(sums + row * SUM_ROW_BYTES, records + row * out_row_bytes, out_row_bytes)
    for row in range(whole, num_rows):
        for p in range(0, num_panels, 2):
            at = sums + row * SUM_ROW_BYTES + 64 * p
            quantize_block(records + row * out_row_bytes + p // 2 * RECORD_BYTES, load_f32(at), load_f32(at + 64))
