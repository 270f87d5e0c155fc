"""Forward: one run of the model's program over a batch, together with the other members of the team.

Holds what a run needs and nothing that outlives it: addresses, work buffers, the attention's work items.
"""

from __future__ import annotations

import numpy as np

from pagedserve.contract import segments
from pagedserve.contract.messages import Setup
from workers.arena import LOGITS_ROWS, Arena
from workers.batch import Batch
from workers.build import ProgramBuilder
from workers.kernels import program as p
from workers.kernels.attention import attention_work_bytes, max_partial_states
from workers.kernels.attention_plan import attention_plan_bytes, max_items, plan_attention
from workers.kernels.kv import KvPool
from workers.kernels.sample import sample_work_bytes
from workers.weights import Weights


class Forward:
    """Runs batches. Holds the mapped pool and every array that a step needs, made once."""

    def __init__(self, setup: Setup, weights: Weights, arena: Arena) -> None:
        spec = weights.layout.spec
        self._setup, self._spec, self._arena = setup, spec, arena
        self._segment = segments.attach(segments.segment_name(setup.tag, "kv"))
        self._pool = KvPool(
            int(self._segment.memory.ctypes.data),
            spec.num_layers,
            spec.num_kv_heads,
            spec.head_dim,
            setup.block_size,
            2 if setup.pool_dtype == "float16" else 4,
        )
        builder = ProgramBuilder(setup, weights, arena)
        builder.body()
        self._num_body = len(builder.ops)
        builder.tail()
        self._ops = np.array(builder.ops, dtype=np.int64)
        self._numbers = np.array(builder.numbers, dtype=np.float64)
        self._step = np.zeros(p.STEP_COLUMNS, dtype=np.int64)
        work_bytes = max(attention_work_bytes(spec.head_dim), sample_work_bytes(spec.vocab_size))
        self._work = np.zeros(work_bytes, dtype=np.uint8)
        self._windows = np.zeros((len(builder.windows), p.WINDOW_COLUMNS), dtype=np.int64)
        group = spec.num_heads // spec.num_kv_heads
        self._capacity = max_items(setup.max_num_batched_tokens, setup.max_num_seqs, group)
        plan_bytes = attention_plan_bytes(setup.max_num_batched_tokens, setup.max_num_seqs, group)
        self._plans = np.zeros((len(builder.windows), plan_bytes), dtype=np.uint8)
        for row, plan, window in zip(self._windows, self._plans, builder.windows, strict=True):
            row[p.WINDOW], row[p.WINDOW_PLAN] = window, plan.ctypes.data

    def run(self, batch: Batch, team_size: int) -> bool:
        """One step, together with the other members; False when it was aborted. Results are in the arena."""
        step = self._step
        step[p.NUM_TOKENS], step[p.NUM_SAMPLED], step[p.NUM_COPIES] = (
            batch.num_tokens, len(batch.rows), len(batch.copies)
        )
        for column, array in (
            (p.TOKEN_IDS, batch.token_ids),
            (p.POSITIONS, batch.positions),
            (p.SLOTS, batch.slots),
            (p.BLOCK_TABLES, batch.block_tables),
            (p.COPIES, batch.copies),
            (p.ROWS, batch.rows),
            (p.HISTORY, batch.history),
            (p.BIAS_IDS, batch.bias_token_ids),
            (p.BIAS_VALUES, batch.bias_values),
        ):
            step[column] = array.ctypes.data
        step[p.SAMPLED] = self._arena.sampled(batch.step_id).ctypes.data
        self._plan_attention(batch)
        arena = self._arena
        return bool(
            p.run(
                self._ops, self._numbers, self._num_body, step, self._windows, self._pool, arena.control, team_size,
                arena.address("attention_scratch"), self._work.ctypes.data, LOGITS_ROWS,
            )
        )

    def _plan_attention(self, batch: Batch) -> None:
        spec = self._spec
        max_states = max_partial_states(self._setup.max_model_len, spec.num_heads)
        for row in self._windows:
            row[p.WINDOW_ITEMS], row[p.WINDOW_COMBINES] = plan_attention(
                batch.query_start_loc.ctypes.data,
                batch.num_computed_tokens.ctypes.data,
                batch.block_table_start.ctypes.data,
                batch.num_seqs,
                spec.num_heads,
                spec.num_kv_heads,
                row[p.WINDOW],
                max_states,
                row[p.WINDOW_PLAN],
                self._capacity,
            )
