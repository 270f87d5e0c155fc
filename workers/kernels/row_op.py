"""The operations of a program whose tiles are rows: each row is worked on by itself."""

from __future__ import annotations

from typing import Any

from numba import njit

from workers.kernels.activation import gelu_tanh_mul_row, gelu_tanh_row, silu_mul_row
from workers.kernels.embedding import embed_row
from workers.kernels.kv import KvPool, write_kv
from workers.kernels.linear import SILU
from workers.kernels.linear_pack import BLOCK
from workers.kernels.linear_tiles import RECORD_BYTES
from workers.kernels.norm import layer_norm_row, rms_norm_row
from workers.kernels.operations import ACTIVATE, EMBED, GATHER, NORM, NORM_RMS, QK_ROPE_WRITE, QUANTIZE
from workers.kernels.quantize import quantize_row, quantize_row_twice
from workers.kernels.rope import rope_head
from workers.kernels.sample import ROW_BYTES
from workers.kernels.step import POSITIONS, ROWS, SLOTS, TOKEN_IDS
from workers.kernels.vector import load_first, read_i32, store_first


@njit(cache=True, inline="always")
def run_row(code: int, a: Any, number: float, row: int, first: int, few: bool, step: Any, pool: KvPool) -> None:
    """One row of an operation with arguments `a`; `first` is the first of its rows that sample, `few`: PRIVATE_ROWS."""
    if code == NORM:
        _norm(a, number, row, few)
    elif code == QK_ROPE_WRITE:
        _qk_rope_write(a, number, row, step, pool)
    elif code == QUANTIZE:
        quantize_row(a[0] + row * a[1] * 4, a[1], a[2] + row * quantized_row_bytes(a[1]))
    elif code == ACTIVATE:
        _activate(a, row)
    elif code == EMBED:
        _embed(a, number, row, step)
    elif code == GATHER:
        _gather(a, row, read_i32(step[ROWS] + (first + row) * ROW_BYTES))


@njit(cache=True)
def _add_row(a: int, b: int, n: int, out: int) -> None:
    """out = a + b, float32 [n] at each address."""
    for i in range(0, n, 16):
        store_first(out + 4 * i, load_first(a + 4 * i, n - i) + load_first(b + 4 * i, n - i), n - i)


@njit(cache=True)
def quantized_row_bytes(n: int) -> int:
    return n // BLOCK * RECORD_BYTES


@njit(cache=True)
def _embed(a: Any, scale: float, row: int, step: Any) -> None:
    out = a[3] + row * a[2] * 4
    embed_row(a[0], a[1], a[2], read_i32(step[TOKEN_IDS] + 4 * row), out, scale)
    if a[4] != 0:
        _add_row(out, a[4] + read_i32(step[POSITIONS] + 4 * row) * a[2] * 4, a[2], out)


@njit(cache=True)
def _norm(a: Any, eps: float, row: int, few: bool) -> None:
    """Where nobody reads the float32 form of many rows, all of them take turns in one row of this member's own."""
    n, is_private = a[6], few and a[9] != 0
    source, out = a[1] + row * n * 4, a[2] + row * n * 4
    quantized = a[10] if is_private else a[3]
    if is_private:
        out = a[9] + row * n * 4
    elif a[2] == 0:
        out = a[9]
    target = out if a[7] == 0 else source
    if a[0] == NORM_RMS:
        rms_norm_row(source, n, a[4], eps, target)
    else:
        layer_norm_row(source, n, a[4], a[5], eps, target)
    if a[7] != 0:
        _add_row(a[7] + row * n * 4, target, n, out)
    if quantized != 0 and a[8] == 2:
        quantize_row_twice(out, n, quantized + row * 2 * quantized_row_bytes(n))
    elif quantized != 0:
        quantize_row(out, n, quantized + row * quantized_row_bytes(n))


@njit(cache=True)
def _gather(a: Any, row: int, token: int) -> None:
    for source, row_bytes, out in ((a[0], a[1], a[2]), (a[3], a[4], a[5])):
        for i in range(0, row_bytes, 64):
            left = (row_bytes - i) // 4
            store_first(out + row * row_bytes + i, load_first(source + token * row_bytes + i, left), left)


@njit(cache=True)
def _qk_rope_write(a: Any, eps: float, row: int, step: Any, pool: KvPool) -> None:
    """Norm and turn a token's heads of q and k in place, then write its k and v to the pool."""
    num_heads, head_bytes = a[9], pool.head_dim * 4
    q = a[1] + row * a[2] * 4
    k = q + num_heads * head_bytes
    position = read_i32(step[POSITIONS] + 4 * row)
    for head in range(num_heads + pool.num_kv_heads):
        x, weight = q + head * head_bytes, a[7] if head < num_heads else a[8]
        if weight != 0:
            rms_norm_row(x, pool.head_dim, weight, eps, x)
        if a[3] != 0:
            angle = position * (a[5] // 2) * 4
            rope_head(x, a[3] + angle, a[4] + angle, a[5], a[6])
    write_kv(pool, a[0], read_i32(step[SLOTS] + 4 * row), k, k + pool.num_kv_heads * head_bytes)


@njit(cache=True)
def _activate(a: Any, row: int) -> None:
    n = a[4]
    x, out = a[2] + row * a[3] * 4, a[5] + row * n * 4
    if a[1] == 0:
        gelu_tanh_row(x, n, out)
    elif a[0] == SILU:
        silu_mul_row(x, x + n * 4, n, out)
    else:
        gelu_tanh_mul_row(x, x + n * 4, n, out)
    if a[6] != 0:
        quantize_row(out, n, a[6] + row * quantized_row_bytes(n))
