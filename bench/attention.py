"""Attention by itself: context x batch in decode, one chunk of a prompt in prefill; several ways to compute the same.

The pool has as many layers as it takes to be larger than the caches, and each repetition goes to another layer: K and
V come from memory, as they do in a step of a model whose weights pass in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import literally, njit

from bench.team import Team
from workers.kernels.attention import attention_tile_ahead, attention_work_bytes, combine_tile, max_partial_states
from workers.kernels.attention_inner import COPY, NOTHING, PREFETCH
from workers.kernels.attention_plan import (
    ITEM_BYTES,
    NUM_ROWS,
    PARTIAL,
    POSITION,
    ROW_BEGIN,
    SPLIT_BEGIN,
    TABLE_START,
    attention_plan_bytes,
    max_items,
    plan_attention,
)
from workers.kernels.kv import F16_BYTES, KvPool, k_address
from workers.kernels.sync import barrier, claim, next_claim
from workers.kernels.vector import read_f16, read_f32, read_i32, write_f32

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16  # SmolLM2-135M's
_POOL_BYTES = 384 << 20  # so much more than a third-level cache that it hardly helps
_LAYER_STRIDE = 7  # a repetition reads every seventh layer, so that no two neighbours help each other
_MEMBERS = 7  # the counter that gives each member its number
_SCALE = HEAD_DIM**-0.5
_ROW_BYTES = NUM_HEADS * HEAD_DIM * 4
TOLERANCE = 1e-4  # of float32 sums in another order

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]


@dataclass(frozen=True)
class Shape:
    """`batch` requests that have `context` tokens each, of which the last `query_len` are the step's."""

    context: int
    batch: int
    query_len: int = 1

    @property
    def num_bytes(self) -> int:
        """K and V that a step reads of one layer, once."""
        return self.batch * self.context * NUM_KV_HEADS * 2 * HEAD_DIM * F16_BYTES

    @property
    def num_operations(self) -> int:
        """Multiplies and adds of one layer, of what the queries may see."""
        before = self.context - self.query_len
        visible = self.query_len * before + self.query_len * (self.query_len + 1) // 2
        return 4 * self.batch * visible * NUM_HEADS * HEAD_DIM


class Problem:
    """Random queries, a float16 pool of random K and V, tables with permuted blocks, the plan of a team."""

    def __init__(self, shape: Shape, team_size: int, pool_bytes: int = _POOL_BYTES) -> None:
        rng = np.random.default_rng(0)
        blocks_each = -(-shape.context // BLOCK_SIZE)
        num_blocks = shape.batch * blocks_each
        layer_bytes = num_blocks * BLOCK_SIZE * NUM_KV_HEADS * 2 * HEAD_DIM * F16_BYTES
        self.num_layers = max(1, pool_bytes // layer_bytes) // _LAYER_STRIDE * _LAYER_STRIDE + 1  # so that all are met
        self.shape = shape
        # [num_blocks, num_layers, num_kv_heads, K and V, block_size * head_dim]
        sizes = (num_blocks, self.num_layers, NUM_KV_HEADS, 2, BLOCK_SIZE * HEAD_DIM)
        self.kv: Halves = np.resize(rng.standard_normal(1 << 20).astype(np.float16), sizes)
        self.tables = rng.permutation(num_blocks).astype(np.int32).reshape(shape.batch, blocks_each)
        num_rows = shape.batch * shape.query_len
        self.q: Floats = rng.standard_normal((num_rows, NUM_HEADS * HEAD_DIM)).astype(np.float32)
        self.out = np.zeros_like(self.q)
        self.pool = KvPool(self.kv.ctypes.data, self.num_layers, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, F16_BYTES)
        group = NUM_HEADS // NUM_KV_HEADS
        capacity = max_items(num_rows, shape.batch, group)
        self.plan = np.zeros(attention_plan_bytes(num_rows, shape.batch, group), dtype=np.uint8)
        starts = np.arange(shape.batch + 1, dtype=np.int32)
        computed = np.full(shape.batch, shape.context - shape.query_len, dtype=np.int32)
        columns = starts * np.int32(shape.query_len), computed, starts * np.int32(blocks_each)
        max_states = max(max_partial_states(shape.context, NUM_HEADS), num_rows * NUM_HEADS * 64)
        self.num_items, self.num_combines = plan_attention(
            *(column.ctypes.data for column in columns),
            shape.batch,
            NUM_HEADS,
            NUM_KV_HEADS,
            0,
            max_states,
            self.plan.ctypes.data,
            capacity,
        )
        self.partials = np.zeros(max_states * (128 + 4 * HEAD_DIM), dtype=np.uint8)
        self.work = np.zeros((team_size, attention_work_bytes(HEAD_DIM)), dtype=np.uint8)

    def dense(self, layer: int) -> Floats:
        """The answer, by matrix products over gathered K and V: the twin of all variants, and the slow one of them."""
        shape, group = self.shape, NUM_HEADS // NUM_KV_HEADS
        out = np.empty_like(self.q).reshape(shape.batch, shape.query_len, NUM_HEADS, HEAD_DIM)
        queries = self.q.reshape(out.shape)
        visible = np.arange(shape.context) <= shape.context - shape.query_len + np.arange(shape.query_len)[:, None]
        for request, table in enumerate(self.tables):
            blocks = self.kv[table, layer].astype(np.float32)  # [blocks, kv_heads, 2, …]
            k = blocks[:, :, 0].reshape(-1, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE).transpose(1, 0, 3, 2)
            v = blocks[:, :, 1].reshape(-1, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM).transpose(1, 0, 2, 3)
            for head in range(NUM_HEADS):
                keys = k[head // group].reshape(-1, HEAD_DIM)[: shape.context]
                values = v[head // group].reshape(-1, HEAD_DIM)[: shape.context]
                scores = np.where(visible, queries[request, :, head] @ keys.T / math.sqrt(HEAD_DIM), -np.inf)
                weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
                out[request, :, head] = weights @ values / weights.sum(axis=-1, keepdims=True)
        return out.reshape(self.q.shape)


class Job(NamedTuple):
    """A problem as kernels see it: numbers and addresses. Each member has work_bytes of `work`."""

    pool: KvPool
    num_items: int
    num_combines: int
    plan: int
    tables: int
    q: int
    out: int
    partials: int
    work: int
    work_bytes: int


def measure(shape: Shape, team: Team) -> dict[str, float]:
    """Seconds that each variant takes for one layer: "numpy" on one core, the others on the team's.

    Prefill is measured of the served kernel only: the slow ones would take minutes. AssertionError when a variant
    computes something else than the twin.
    """
    problem = Problem(shape, team.size)
    seconds = {}
    if shape.query_len == 1:
        seconds["numpy"] = Team(1).seconds(_numpy, problem, rounds=2)
    for name, kernel in VARIANTS.items():
        if shape.query_len > 1 and name == "scalar":
            continue
        difference = error(problem, kernel, team)
        assert difference < TOLERANCE, f"{name} differs from dense attention by {difference}"
        seconds[name] = team.seconds(kernel, _job(problem))
    return seconds


def error(problem: Problem, kernel: Callable[..., None], team: Team) -> float:
    """The largest difference of a variant's output for the first layer from dense attention's."""
    problem.out[:] = np.nan
    team.run(kernel, 1, _job(problem))
    return float(np.abs(problem.out - problem.dense(layer=0)).max())


def _job(problem: Problem) -> Job:
    return Job(
        pool=problem.pool,
        num_items=problem.num_items,
        num_combines=problem.num_combines,
        plan=problem.plan.ctypes.data,
        tables=problem.tables.ctypes.data,
        q=problem.q.ctypes.data,
        out=problem.out.ctypes.data,
        partials=problem.partials.ctypes.data,
        work=problem.work.ctypes.data,
        work_bytes=problem.work.shape[1],
    )


def _numpy(repeats: int, problem: Problem, control: int, team_size: int) -> None:
    """Dense matrix products, one core."""
    for repeat in range(repeats):
        problem.dense(repeat * _LAYER_STRIDE % problem.num_layers)


@njit(cache=True, nogil=True)
def _served(repeats: int, job: Job, control: int, team_size: int) -> None:
    """As the server runs it: SIMD tiles, the next chunk's K and V prefetched while this one's are used."""
    _tiles(PREFETCH, repeats, job, control, team_size)


@njit(cache=True, nogil=True)
def _unprefetched(repeats: int, job: Job, control: int, team_size: int) -> None:
    """SIMD tiles, and what the machine prefetches by itself."""
    _tiles(NOTHING, repeats, job, control, team_size)


@njit(cache=True, nogil=True)
def _double_buffered(repeats: int, job: Job, control: int, team_size: int) -> None:
    """SIMD tiles, the next chunk's K and V converted to the other one of two buffers while this one's are used."""
    _tiles(COPY, repeats, job, control, team_size)


@njit(cache=True, nogil=True)
def _tiles(ahead: int, repeats: int, job: Job, control: int, team_size: int) -> None:
    """A team's work on the items of a plan, `ahead` as attention_tile_ahead takes it."""
    pool, work = job.pool, job.work + claim(control, _MEMBERS) * job.work_bytes
    barrier(control, team_size)
    for repeat in range(repeats):
        layer = repeat * _LAYER_STRIDE % pool.num_layers
        tile = claim(control, 0)
        while tile < job.num_items * NUM_KV_HEADS:
            item, kv_head = job.plan + tile // NUM_KV_HEADS * ITEM_BYTES, tile % NUM_KV_HEADS
            coming, next_item = next_claim(control, 0, team_size), 0
            if coming < job.num_items * NUM_KV_HEADS:
                next_item = job.plan + coming // NUM_KV_HEADS * ITEM_BYTES
            attention_tile_ahead(
                literally(ahead), coming % NUM_KV_HEADS, next_item, pool, layer, kv_head, item, NUM_HEADS, 0, _SCALE,
                job.tables, job.q, _ROW_BYTES, job.out, _ROW_BYTES, job.partials, work,
            )  # fmt: skip
            tile = claim(control, 0)
        barrier(control, team_size)
        tile = claim(control, 0)
        while tile < job.num_combines * NUM_KV_HEADS:
            item = job.plan + (job.num_items + tile // NUM_KV_HEADS) * ITEM_BYTES
            combine_tile(pool, tile % NUM_KV_HEADS, item, NUM_HEADS, job.out, _ROW_BYTES, job.partials, work)
            tile = claim(control, 0)
        barrier(control, team_size)


@njit(cache=True, nogil=True)
def _scalar(repeats: int, job: Job, control: int, team_size: int) -> None:
    """Plain loops over numbers, one query head at a time, by the same items (whole, whatever the plan splits)."""
    barrier(control, team_size)
    for repeat in range(repeats):
        layer = repeat * _LAYER_STRIDE % job.pool.num_layers
        tile = claim(control, 0)
        while tile < job.num_items * NUM_HEADS:
            item, head = job.plan + tile // NUM_HEADS * ITEM_BYTES, tile % NUM_HEADS
            if read_i32(item + PARTIAL) < 0 or read_i32(item + SPLIT_BEGIN) == 0:  # of a split row, only the first item
                table = job.tables + 4 * read_i32(item + TABLE_START)
                for row in range(read_i32(item + NUM_ROWS)):
                    offset = (read_i32(item + ROW_BEGIN) + row) * _ROW_BYTES + head * HEAD_DIM * 4
                    position = read_i32(item + POSITION) + row
                    _scalar_head(job.pool, layer, head, table, position, job.q + offset, job.out + offset)
            tile = claim(control, 0)
        barrier(control, team_size)


@njit(cache=True, nogil=True)
def _scalar_head(pool: KvPool, layer: int, head: int, table: int, position: int, q: int, out: int) -> None:
    """Online softmax, token by token."""
    sums = np.zeros(HEAD_DIM, dtype=np.float32)
    maximum, denominator = np.float32(-np.inf), np.float32(0.0)
    for token in range(position + 1):
        block, place = read_i32(table + 4 * (token // BLOCK_SIZE)), token % BLOCK_SIZE
        k = k_address(pool, block, layer, head // (NUM_HEADS // NUM_KV_HEADS))
        score = np.float32(0.0)
        for d in range(HEAD_DIM):
            score += read_f32(q + 4 * d) * read_f16(k + 2 * (d * BLOCK_SIZE + place))
        score *= np.float32(_SCALE)
        if score > maximum:
            factor = np.exp(maximum - score)
            maximum = score
            denominator *= factor
            for d in range(HEAD_DIM):
                sums[d] *= factor
        weight = np.exp(score - maximum)
        denominator += weight
        v = k + 2 * BLOCK_SIZE * HEAD_DIM + 2 * place * HEAD_DIM
        for d in range(HEAD_DIM):
            sums[d] += weight * read_f16(v + 2 * d)
    for d in range(HEAD_DIM):
        write_f32(out + 4 * d, sums[d] / denominator)


VARIANTS: Mapping[str, Callable[..., None]] = {
    "scalar": _scalar,
    "no prefetch": _unprefetched,
    "double-buffered": _double_buffered,
    "served": _served,
}
