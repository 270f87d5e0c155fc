"""Rows of a packed matrix as float32: the embedding, which may share its memory with the head."""

from __future__ import annotations

import numpy as np
from numba import njit

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
from workers.kernels.vector import read_bf16, read_f16, read_f32, read_i32, write_f32

_BLOCK_BYTES = tuple(block_bytes(wtype) if wtype >= WTYPE_Q4_0 else 0 for wtype in range(WTYPE_Q8_0 + 1))


@njit(cache=True)
def embed_row(wtype: int, w: int, n_in: int, token_id: int, out: int, scale: float) -> None:
    """out = scale * row `token_id` of a packed [n_out, n_in] matrix, float32 [n_in], as GGUF dequantises it."""
    panel, lane = token_id // PANEL, token_id % PANEL
    factor = np.float32(scale)
    if wtype == WTYPE_F32:
        for i in range(n_in):
            write_f32(out + 4 * i, factor * read_f32(w + 4 * ((panel * n_in + i) * PANEL + lane)))
    elif wtype == WTYPE_F16:
        for i in range(n_in):
            write_f32(out + 4 * i, factor * read_f16(w + 2 * ((panel * n_in + i) * PANEL + lane)))
    elif wtype == WTYPE_BF16:
        for i in range(n_in):
            write_f32(out + 4 * i, factor * read_bf16(w + 2 * ((panel * n_in + i) * PANEL + lane)))
    else:
        num_blocks = n_in // BLOCK
        for block in range(num_blocks):
            stream = w + (panel * num_blocks + block) * _BLOCK_BYTES[wtype]
            _embed_block(wtype, stream, lane, out + 4 * BLOCK * block, factor)


@njit(cache=True)
def _embed_block(wtype: int, stream: int, lane: int, out: int, factor: float) -> None:
    d = read_f16(stream + 2 * lane)
    if wtype == WTYPE_Q8_0:
        for k in range(8):
            word = read_i32(stream + 2 * PANEL + 4 * (k * PANEL + lane))
            for j in range(4):
                q = np.float32(((word >> (8 * j)) & 255) - 128)
                write_f32(out + 4 * (4 * k + j), factor * (d * q))
        return
    zero_point = 8 if wtype == WTYPE_Q4_0 else 0
    m = read_f16(stream + 2 * (PANEL + lane)) if wtype == WTYPE_Q4_1 else np.float32(0.0)
    quants = stream + (4 if wtype == WTYPE_Q4_1 else 2) * PANEL
    for k in range(4):
        word = read_i32(quants + 4 * (k * PANEL + lane))
        for j in range(4):
            low = np.float32(((word >> (8 * j)) & 15) - zero_point)
            high = np.float32(((word >> (8 * j + 4)) & 15) - zero_point)
            write_f32(out + 4 * (8 * k + j), factor * (d * low + m))
            write_f32(out + 4 * (8 * k + 4 + j), factor * (d * high + m))
