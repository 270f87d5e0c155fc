"""Linear layers over packed weights: the tiles that a team claims. Every output has one order of operations.

A tile is panels x rows. Inside it, the shape of register tiles, and whether weights are unpacked first, depend on the
number of rows, for speed; the bits of an output never do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from workers.kernels.activation import gelu_tanh, silu
from workers.kernels.linear_pack import (
    BLOCK,
    PANEL,
    WTYPE_BF16,
    WTYPE_F16,
    WTYPE_F32,
    WTYPE_Q4_0,
    WTYPE_Q4_1,
    WTYPE_Q8_0,
    block_bytes,
)
from workers.kernels.linear_tiles import (
    RECORD_BYTES,
    SUM_PANELS,
    SUM_ROW_BYTES,
    UNPACKED_BYTES,
    linear_tile_sums,
    unpack_blocks,
    unpacked_tile_sums,
)
from workers.kernels.quantize import quantize_block
from workers.kernels.simd import Simd, isa_name
from workers.kernels.vector import load_f32, load_first, splat_f32, store_f32, store_first

SILU, GELU_TANH = 0, 1

# Register tiles, rows x panels: what fits in 32 registers of 16 lanes, or in 16 of 8 lanes.
_WIDE = isa_name() == "avx512"
ONE_ROW_PANELS = 4 if _WIDE else 2
TWO_ROWS_PANELS = 4 if _WIDE else 2
MANY_ROWS_PANELS = 2 if _WIDE else 1
TALL, SHORT = (6, 4) if _WIDE else (4, 2)

PASS_ROWS = 96  # rows whose sums are kept at once
SUMS_BYTES = (PASS_ROWS + TALL) * SUM_ROW_BYTES  # a register tile may reach beyond the last row
CHUNK_BLOCKS = 32  # blocks of each panel that are unpacked at once: 45 KB with two panels
CHUNK_BYTES = MANY_ROWS_PANELS * CHUNK_BLOCKS * UNPACKED_BYTES
UNPACK_FROM_ROWS = 12  # fewer rows do not earn back the unpacking

_BLOCK_BYTES = tuple(block_bytes(wtype) if wtype >= WTYPE_Q4_0 else 0 for wtype in range(WTYPE_Q8_0 + 1))


@intrinsic(prefer_literal=True)
def stack(typing_context: Any, num_bytes: Any) -> Any:
    """The address of a constant number of bytes on the stack; they last until the function returns."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return Simd(builder).stack(num_bytes.literal_value).llvm

    return types.int64(num_bytes), generate


@njit(cache=True)
def _panel_bytes(wtype: int, n_in: int) -> int:
    if wtype >= WTYPE_Q4_0:
        return n_in // BLOCK * _BLOCK_BYTES[wtype]
    return n_in * PANEL * (4 if wtype == WTYPE_F32 else 2)


@njit(cache=True)
def _sums_of_many_rows(
    wtype: int, unpacked: bool, w: int, stride: int, last_panel: int, steps: int, x: int, x_row_bytes: int,
    num_rows: int, sums: int, first: int,
) -> None:
    """Cover the rows with tall and short register tiles, the fewest rows wasted."""
    row = 0
    while row < num_rows:
        left = num_rows - row
        tall = left > 2 * SHORT or SHORT < left <= TALL
        at, to = x + row * x_row_bytes, sums + row * SUM_ROW_BYTES
        if unpacked and tall:
            unpacked_tile_sums(
                TALL, MANY_ROWS_PANELS, wtype, w, stride, last_panel, steps, at, x_row_bytes, left - 1, to, first
            )
        elif unpacked:
            unpacked_tile_sums(
                SHORT, MANY_ROWS_PANELS, wtype, w, stride, last_panel, steps, at, x_row_bytes, left - 1, to, first
            )
        elif tall:
            linear_tile_sums(
                TALL, MANY_ROWS_PANELS, wtype, w, stride, last_panel, steps, at, x_row_bytes, left - 1, to, first
            )
        else:
            linear_tile_sums(
                SHORT, MANY_ROWS_PANELS, wtype, w, stride, last_panel, steps, at, x_row_bytes, left - 1, to, first
            )
        row += TALL if tall else SHORT


@njit(cache=True)
def _sums(
    wtype: int, w: int, n_in: int, num_panels: int, x: int, x_row_bytes: int, num_rows: int, sums: int, unpacked: int
) -> None:
    """sums[row, panel, 16] = w x, of up to SUM_PANELS panels and PASS_ROWS rows; `unpacked` is room for a chunk."""
    stride = _panel_bytes(wtype, n_in)
    steps = n_in // BLOCK if wtype >= WTYPE_Q4_0 else n_in
    if num_rows == 1:
        for panel in range(0, num_panels, ONE_ROW_PANELS):
            last, at = num_panels - 1 - panel, w + panel * stride
            linear_tile_sums(1, ONE_ROW_PANELS, wtype, at, stride, last, steps, x, 0, 0, sums + 64 * panel, 1)
        return
    if num_rows == 2:
        for panel in range(0, num_panels, TWO_ROWS_PANELS):
            last, at = num_panels - 1 - panel, w + panel * stride
            linear_tile_sums(2, TWO_ROWS_PANELS, wtype, at, stride, last, steps, x, x_row_bytes, 1, sums + 64 * panel, 1)
        return
    unpack = num_rows >= UNPACK_FROM_ROWS and (wtype == WTYPE_Q4_0 or wtype == WTYPE_Q4_1)
    for panel in range(0, num_panels, MANY_ROWS_PANELS):
        last, at, to = num_panels - 1 - panel, w + panel * stride, sums + 64 * panel
        if not unpack:
            _sums_of_many_rows(wtype, False, at, stride, last, steps, x, x_row_bytes, num_rows, to, 1)
            continue
        chunk_stride = CHUNK_BLOCKS * UNPACKED_BYTES
        for block in range(0, steps, CHUNK_BLOCKS):
            num_blocks = min(CHUNK_BLOCKS, steps - block)
            for p in range(min(MANY_ROWS_PANELS, last + 1)):
                stream = at + p * stride + block * _BLOCK_BYTES[wtype]
                unpack_blocks(wtype, stream, num_blocks, unpacked + p * chunk_stride)
            chunk, first = x + block * RECORD_BYTES, 1 if block == 0 else 0
            _sums_of_many_rows(
                wtype, True, unpacked, chunk_stride, last, num_blocks, chunk, x_row_bytes, num_rows, to, first
            )


@njit(cache=True)
def linear_tile(
    wtype: int, w: int, n_in: int, panel_begin: int, panel_end: int, x: int, x_row_bytes: int, row_begin: int,
    row_end: int, out: int, out_width: int, n_out: int, bias: int, residual: int,
) -> None:
    """out[row, col] = w[col] x[row] (+ bias[col]) (+ residual[row, col]) of some panels and rows.

    `w` is a packed [n_out, n_in] layer; `x` holds activation rows as act_row_bytes says; out and residual are float32
    with rows `out_width` numbers apart, bias is float32 [n_out]; bias and residual 0: none; residual may be out.
    """
    sums, unpacked = stack(SUMS_BYTES), stack(CHUNK_BYTES)
    stride = _panel_bytes(wtype, n_in)
    for panel in range(panel_begin, panel_end, SUM_PANELS):
        num_panels = min(SUM_PANELS, panel_end - panel)
        for begin in range(row_begin, row_end, PASS_ROWS):
            num_rows = min(PASS_ROWS, row_end - begin)
            at = x + begin * x_row_bytes
            _sums(wtype, w + panel * stride, n_in, num_panels, at, x_row_bytes, num_rows, sums, unpacked)
            for row in range(num_rows):
                for p in range(num_panels):
                    col = (panel + p) * PANEL
                    offset = 4 * ((begin + row) * out_width + col)
                    v = load_f32(sums + row * SUM_ROW_BYTES + 64 * p)
                    if bias != 0:
                        v = v + load_first(bias + 4 * col, n_out - col)
                    if residual != 0:
                        v = v + load_first(residual + offset, n_out - col)
                    store_first(out + offset, v, n_out - col)


@njit(cache=True)
def gated_tile(
    kind: int, wtype: int, gate: int, up: int, n_in: int, panel_begin: int, panel_end: int, x: int, x_row_bytes: int,
    row_begin: int, row_end: int, out: int, out_row_bytes: int,
) -> None:
    """Quantised act(gate x) * (up x) of some panels and rows: linear_tile twice, the activation and quantize_row in one.

    kind is SILU or GELU_TANH; gate and up are packed layers of one type and shape, their outputs a multiple of 32;
    panel_begin and panel_end are even; out holds quantised rows, `out_row_bytes` apart. The bits are the unfused ones.
    """
    gate_sums, up_sums = stack(SUMS_BYTES), stack(SUMS_BYTES)
    unpacked = stack(CHUNK_BYTES)
    stride = _panel_bytes(wtype, n_in)
    for panel in range(panel_begin, panel_end, SUM_PANELS):
        num_panels = min(SUM_PANELS, panel_end - panel)
        for begin in range(row_begin, row_end, PASS_ROWS):
            num_rows = min(PASS_ROWS, row_end - begin)
            at = x + begin * x_row_bytes
            _sums(wtype, gate + panel * stride, n_in, num_panels, at, x_row_bytes, num_rows, gate_sums, unpacked)
            _sums(wtype, up + panel * stride, n_in, num_panels, at, x_row_bytes, num_rows, up_sums, unpacked)
            for row in range(num_rows):
                for p in range(0, num_panels, 2):
                    offset = row * SUM_ROW_BYTES + 64 * p
                    a, b = load_f32(gate_sums + offset), load_f32(gate_sums + offset + 64)
                    if kind == SILU:
                        a, b = silu(a), silu(b)
                    else:
                        a, b = gelu_tanh(a), gelu_tanh(b)
                    record = out + (begin + row) * out_row_bytes + (panel + p) // 2 * RECORD_BYTES
                    quantize_block(record, a * load_f32(up_sums + offset), b * load_f32(up_sums + offset + 64))
