"""The KV pool as kernels see it: where a block's K and V are, writing one token, copying one block.

Never decides which block belongs to whom: block ids and slots come from the plan.
"""

from __future__ import annotations

from typing import NamedTuple

from numba import njit

from workers.kernels.vector import (
    copy_bytes,
    load_f32,
    max_f32,
    min_f32,
    read_f32,
    splat_f32,
    store_f16,
    store_f32,
    write_f16,
    write_f32,
)

F16_BYTES = 2
F16_MAX = 65504.0  # larger K and V are written as this: an infinity would turn whole outputs into NaN


class KvPool(NamedTuple):
    """Address and shape of the pool, [num_blocks, num_layers, num_kv_heads, 2, block_size * head_dim].

    K of one (block, layer, kv_head) is [head_dim, block_size], V is [block_size, head_dim]. Elements are float16
    (element_bytes 2) or float32 (4). block_size and head_dim are multiples of 16.
    """

    address: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    element_bytes: int


@njit(cache=True)
def block_bytes(pool: KvPool) -> int:
    """Bytes of one block: K and V of its tokens for all layers."""
    return pool.num_layers * pool.num_kv_heads * 2 * pool.block_size * pool.head_dim * pool.element_bytes


@njit(cache=True)
def k_address(pool: KvPool, block_id: int, layer: int, kv_head: int) -> int:
    """Where K [head_dim, block_size] of one (block, layer, kv_head) begins; V follows it."""
    tile_bytes = 2 * pool.block_size * pool.head_dim * pool.element_bytes
    return pool.address + ((block_id * pool.num_layers + layer) * pool.num_kv_heads + kv_head) * tile_bytes


@njit(cache=True)
def write_kv(pool: KvPool, layer: int, slot: int, k_addr: int, v_addr: int) -> None:
    """Write one token's K and V, float32 [num_kv_heads, head_dim] each, to slot = block_id * block_size + place."""
    for kv_head in range(pool.num_kv_heads):
        offset = kv_head * pool.head_dim * 4
        write_kv_head(pool, layer, kv_head, slot, k_addr + offset, v_addr + offset)


@njit(cache=True)
def write_kv_head(pool: KvPool, layer: int, kv_head: int, slot: int, k_addr: int, v_addr: int) -> None:
    """Write one token's K and V of one kv_head, float32 [head_dim] each."""
    place = slot % pool.block_size
    k = k_address(pool, slot // pool.block_size, layer, kv_head)
    v = k + (pool.head_dim * pool.block_size + place * pool.head_dim) * pool.element_bytes
    row_bytes = pool.block_size * pool.element_bytes
    k += place * pool.element_bytes
    if pool.element_bytes == F16_BYTES:
        for d in range(pool.head_dim):
            write_f16(k + d * row_bytes, min(max(read_f32(k_addr + d * 4), -F16_MAX), F16_MAX))
        for d in range(0, pool.head_dim, 16):
            store_f16(v + d * 2, min_f32(max_f32(load_f32(v_addr + d * 4), splat_f32(-F16_MAX)), splat_f32(F16_MAX)))
    else:
        for d in range(pool.head_dim):
            write_f32(k + d * row_bytes, read_f32(k_addr + d * 4))
        for d in range(0, pool.head_dim, 16):
            store_f32(v + d * 4, load_f32(v_addr + d * 4))


@njit(cache=True)
def copy_block(pool: KvPool, source: int, destination: int) -> None:
    """Copy one block's K and V, all layers: a fork's first write to a shared partial block."""
    num_bytes = block_bytes(pool)
    copy_bytes(pool.address + destination * num_bytes, pool.address + source * num_bytes, num_bytes)
