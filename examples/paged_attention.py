"""The kernel layer by itself: allocate blocks, write K and V, fork copy-on-write, attend, compare with dense attention.

    python examples/paged_attention.py

No server, no scheduler and no model take part: a pool is one array, a request is a list of block ids, and the kernels
take addresses. What a server adds is who gets which block when.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pagedserve.scheduler.block_allocator import BlockAllocator
from pagedserve.scheduler.prefix_cache import PrefixCache
from workers.kernels.attention import (
    attention_scratch_bytes,
    attention_tile,
    attention_work_bytes,
    combine_tile,
    max_partial_states,
)
from workers.kernels.attention_plan import ITEM_BYTES, attention_plan_bytes, max_items, plan_attention
from workers.kernels.kv import KvPool, copy_block, write_kv

NUM_BLOCKS, BLOCK_SIZE = 64, 16
NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 1, 9, 3, 64  # SmolLM2-135M's heads, one of its layers
LAYER, NO_WINDOW = 0, 0
SCALE = HEAD_DIM**-0.5

Floats = npt.NDArray[np.float32]


@dataclass
class Request:
    """Its blocks, and its tokens' K and V once more, [tokens, NUM_KV_HEADS, HEAD_DIM], for dense attention to check."""

    block_table: list[int] = field(default_factory=list)
    keys: list[Floats] = field(default_factory=list)
    values: list[Floats] = field(default_factory=list)


class Cache:
    """A pool of blocks, and requests that write to it and read from it."""

    def __init__(self) -> None:
        # K of a block is [HEAD_DIM, BLOCK_SIZE], V is [BLOCK_SIZE, HEAD_DIM]; unwritten slots may hold anything.
        shape = (NUM_BLOCKS, NUM_LAYERS, NUM_KV_HEADS, 2, BLOCK_SIZE * HEAD_DIM)
        self.memory = np.full(shape, np.nan, dtype=np.float16)
        sizes = NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, self.memory.itemsize
        self.pool = KvPool(self.memory.ctypes.data, *sizes)
        self.allocator = BlockAllocator(NUM_BLOCKS, PrefixCache())

    def append(self, request: Request, key: Floats, value: Floats) -> None:
        """Write one token's K and V, [NUM_KV_HEADS, HEAD_DIM] each, in a block that only this request has."""
        index, place = divmod(len(request.keys), BLOCK_SIZE)
        if place == 0:
            request.block_table.append(self._allocate())
        elif self.allocator.ref_counts[request.block_table[index]] > 1:  # copy on write
            shared, own = request.block_table[index], self._allocate()
            copy_block(self.pool, shared, own)
            self.allocator.release(shared)
            request.block_table[index] = own
        slot = request.block_table[index] * BLOCK_SIZE + place
        write_kv(self.pool, LAYER, slot, key.ctypes.data, value.ctypes.data)
        request.keys.append(key.astype(np.float16).astype(np.float32))
        request.values.append(value.astype(np.float16).astype(np.float32))

    def fork(self, request: Request) -> Request:
        """A second request with the same tokens, in the same blocks: no K and V is copied."""
        for block_id in request.block_table:
            self.allocator.share(block_id)
        return Request(request.block_table.copy(), request.keys.copy(), request.values.copy())

    def _allocate(self) -> int:
        block_id = self.allocator.allocate()
        assert block_id is not None, "the pool is full"
        return block_id

    def attend(self, requests: list[Request], queries: list[Floats]) -> list[Floats]:
        """Attention of each request's last tokens: queries and outputs are [query_len, NUM_HEADS, HEAD_DIM]."""
        # The step's columns, as a StepPlan has them: ragged arrays, cut by offsets.
        query_lens = [len(q) for q in queries]
        query_start_loc = np.cumsum([0, *query_lens], dtype=np.int32)
        computed = [len(r.keys) - n for r, n in zip(requests, query_lens, strict=True)]
        num_computed_tokens = np.array(computed, dtype=np.int32)
        block_tables = np.array([b for r in requests for b in r.block_table], dtype=np.int32)
        table_start = np.cumsum([0, *(len(r.block_table) for r in requests)], dtype=np.int32)
        q = np.concatenate(queries)
        out = np.empty_like(q)

        # The plan: who could work at the same time. Any order of items, by any number of workers, gives the same bits.
        group, longest = NUM_HEADS // NUM_KV_HEADS, max(len(r.keys) for r in requests)
        plan = np.zeros(attention_plan_bytes(len(q), len(requests), group), dtype=np.uint8)
        num_items, num_combines = plan_attention(
            query_start_loc.ctypes.data, num_computed_tokens.ctypes.data, table_start.ctypes.data, len(requests),
            NUM_HEADS, NUM_KV_HEADS, NO_WINDOW, max_partial_states(longest, NUM_HEADS),
            plan.ctypes.data, max_items(len(q), len(requests), group),
        )  # fmt: skip

        # The work: each item for each kv_head; then the rows whose context was cut into several items are put together.
        partials = np.empty(attention_scratch_bytes(longest, NUM_HEADS, HEAD_DIM), dtype=np.uint8)
        work = np.empty(attention_work_bytes(HEAD_DIM), dtype=np.uint8)
        row_bytes = NUM_HEADS * HEAD_DIM * 4
        for item in range(num_items):
            for kv_head in range(NUM_KV_HEADS):
                attention_tile(
                    self.pool, LAYER, kv_head, plan.ctypes.data + item * ITEM_BYTES, NUM_HEADS, NO_WINDOW, SCALE,
                    block_tables.ctypes.data, q.ctypes.data, row_bytes, out.ctypes.data, row_bytes,
                    partials.ctypes.data, work.ctypes.data,
                )  # fmt: skip
        for item in range(num_items, num_items + num_combines):
            for kv_head in range(NUM_KV_HEADS):
                combine_tile(
                    self.pool, kv_head, plan.ctypes.data + item * ITEM_BYTES, NUM_HEADS,
                    out.ctypes.data, row_bytes, partials.ctypes.data, work.ctypes.data,
                )  # fmt: skip
        return np.split(out, query_start_loc[1:-1])


def dense_attention(request: Request, queries: Floats) -> Floats:
    """The same by matrix products over gathered K and V."""
    keys, values = np.stack(request.keys), np.stack(request.values)
    visible = np.tri(len(queries), len(keys), len(keys) - len(queries), dtype=bool)  # causal
    out = np.empty_like(queries)
    for head in range(NUM_HEADS):
        kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
        scores = np.where(visible, queries[:, head] @ keys[:, kv_head].T * SCALE, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, head] = weights @ values[:, kv_head] / weights.sum(axis=-1, keepdims=True)
    return out


def main() -> None:
    """A prompt, three forks of it, a few own tokens each; attention of all in one step."""
    rng = np.random.default_rng(0)

    def random(*shape: int) -> Floats:
        return rng.standard_normal(shape).astype(np.float32)

    cache, prompt = Cache(), Request()
    for _ in range(300):
        cache.append(prompt, random(NUM_KV_HEADS, HEAD_DIM), random(NUM_KV_HEADS, HEAD_DIM))
    print(f"prompt: {len(prompt.keys)} tokens in {cache.allocator.num_referenced} blocks")

    requests = [prompt, *(cache.fork(prompt) for _ in range(3))]
    print(f"3 forks: {cache.allocator.num_referenced} blocks, each with {cache.allocator.ref_counts[0]} references")

    for number, request in enumerate(requests):
        for _ in range(1 + 2 * number):
            cache.append(request, random(NUM_KV_HEADS, HEAD_DIM), random(NUM_KV_HEADS, HEAD_DIM))
    print(f"1, 3, 5 and 7 own tokens: {cache.allocator.num_referenced} blocks, of which the 18 full ones are shared")

    # One decodes, one has several new tokens, one is a whole prompt: a step does not tell them apart.
    queries = [random(n, NUM_HEADS, HEAD_DIM) for n in (1, 3, 5, len(requests[3].keys))]
    outputs = cache.attend(requests, queries)
    for request, q, out in zip(requests, queries, outputs, strict=True):
        difference = float(np.abs(out - dense_attention(request, q)).max())
        assert difference < 1e-5, difference
        print(f"{len(q):3} queries on {len(request.keys)} tokens: differs from dense attention by {difference:.1e}")

    alone = cache.attend([requests[3]], [queries[3][-1:]])[0]
    assert np.array_equal(alone[0], outputs[3][-1])
    print("the last query alone: the same bits")


if __name__ == "__main__":
    main()
