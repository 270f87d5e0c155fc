"""Requests on a paged pool, for tests of attention: random K and V, permuted tables, NaN in unwritten slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tests import reference
from workers.kernels.attention import (
    attention_scratch_bytes,
    attention_tile,
    attention_work_bytes,
    combine_tile,
    max_partial_states,
)
from workers.kernels.attention_plan import ITEM_BYTES, attention_plan_bytes, max_items, plan_attention
from workers.kernels.kv import KvPool, write_kv

LAYER, NUM_LAYERS = 1, 2


@dataclass(frozen=True)
class Shape:
    """What a model and a pool look like to the kernel."""

    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    dtype: str = "float16"
    window: int = 0

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


class Paged:
    """Requests with seq_lens tokens each. The same seed gives the same q, K and V, whatever the pool looks like.

    Blocks wholly before the last `kept` tokens are -1 in the table (a sliding window has freed them); 0 keeps all.
    """

    def __init__(self, shape: Shape, seq_lens: Sequence[int], *, seed: int = 0, kept: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.shape, self.seq_lens = shape, list(seq_lens)
        num_blocks = [-(-n // shape.block_size) for n in seq_lens]
        self.start = np.concatenate([[0], np.cumsum(num_blocks)]).astype(np.int32)
        self.tables = np.random.default_rng(99).permutation(self.start[-1] + 3)[: self.start[-1]].astype(np.int32)
        self.array = np.full(
            (self.start[-1] + 3, NUM_LAYERS, shape.num_kv_heads, 2, shape.block_size * shape.head_dim),
            np.nan,
            dtype=shape.dtype,
        )
        sizes = NUM_LAYERS, shape.num_kv_heads, shape.head_dim, shape.block_size, self.array.itemsize
        self.pool = KvPool(self.array.ctypes.data, *sizes)
        self.q, self.k, self.v = [], [], []
        for index, n in enumerate(seq_lens):
            self.q.append(rng.standard_normal((n, shape.num_heads, shape.head_dim)).astype(np.float32))
            k, v = (rng.standard_normal((n, shape.num_kv_heads, shape.head_dim)).astype(np.float16) for _ in range(2))
            self.k.append(k.astype(np.float32))
            self.v.append(v.astype(np.float32))
            for t in range(n):
                self.write(index, t)
            if kept:
                freed = max(0, n - kept) // shape.block_size
                self.tables[self.start[index] : self.start[index] + freed] = -1

    def write(self, index: int, t: int) -> None:
        """Write a request's K and V of token t to its slot."""
        size = self.shape.block_size
        slot = int(self.tables[self.start[index] + t // size]) * size + t % size
        write_kv(self.pool, LAYER, slot, self.k[index][t].ctypes.data, self.v[index][t].ctypes.data)

    def attend(
        self,
        query_lens: Sequence[int],
        *,
        seq_lens: Sequence[int] | None = None,
        max_states: int | None = None,
        tile: Callable[..., None] = attention_tile,
        order: int = 1,
    ) -> list[np.ndarray]:
        """The kernels' output of each request's last query_lens of its first seq_lens tokens.

        max_states 0 forbids to split rows; order -1 works on the items from last to first.
        """
        shape, lens = self.shape, np.array(seq_lens or self.seq_lens)
        computed = (lens - np.array(query_lens)).astype(np.int32)
        bounds = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        spans = zip(self.q, computed, lens, strict=True)
        q = np.concatenate([q[a:b] for q, a, b in spans])
        out = np.full_like(q, np.nan)
        states = max_partial_states(int(lens.max()), shape.num_heads) if max_states is None else max_states
        capacity = max_items(len(q), len(lens), shape.group)
        plan = np.zeros(attention_plan_bytes(len(q), len(lens), shape.group), dtype=np.uint8)
        partials = np.full(attention_scratch_bytes(int(lens.max()), shape.num_heads, shape.head_dim), 0xFF, np.uint8)
        work = np.full(attention_work_bytes(shape.head_dim), 0xFF, dtype=np.uint8)
        self.num_items, self.num_combines = plan_attention(
            bounds.ctypes.data, computed.ctypes.data, self.start.ctypes.data, len(lens), shape.num_heads,
            shape.num_kv_heads, shape.window, states, plan.ctypes.data, capacity,
        )  # fmt: skip
        row_bytes, scale = shape.num_heads * shape.head_dim * 4, shape.head_dim**-0.5
        for number in range(self.num_items)[::order]:
            for kv_head in range(shape.num_kv_heads)[::order]:
                tile(
                    self.pool, LAYER, kv_head, plan.ctypes.data + number * ITEM_BYTES,
                    shape.num_heads, shape.window, scale, self.tables.ctypes.data,
                    q.ctypes.data, row_bytes, out.ctypes.data, row_bytes, partials.ctypes.data, work.ctypes.data,
                )  # fmt: skip
        for number in range(self.num_items, self.num_items + self.num_combines):
            for kv_head in range(shape.num_kv_heads):
                combine_tile(
                    self.pool, kv_head, plan.ctypes.data + number * ITEM_BYTES, shape.num_heads,
                    out.ctypes.data, row_bytes, partials.ctypes.data, work.ctypes.data,
                )  # fmt: skip
        return np.split(out, bounds[1:-1])

    def dense(self, index: int, query_len: int) -> np.ndarray:
        """The twin's output of a request's last query_len tokens."""
        shape, n = self.shape, self.seq_lens[index]
        first = n - query_len
        k, v = self.k[index], self.v[index]
        return reference.attention(self.q[index][first:], k, v, first, shape.window, shape.head_dim**-0.5)
