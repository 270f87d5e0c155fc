"""Forward: one run of the model's program over a step, together with the other members of the team.

Holds what a run needs and nothing that outlives it: addresses, work buffers, the attention's work items.
"""

from __future__ import annotations

import itertools
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedserve.contract import segments
from pagedserve.contract.errors import ProtocolError
from pagedserve.contract.messages import SAMPLE_ROW, Setup, StepPlan
from workers.arena import LOGITS_ROWS, Arena
from workers.build import ProgramBuilder, private_bytes
from workers.kernels import program as p
from workers.kernels import step as st
from workers.kernels.attention import attention_work_bytes, max_partial_states
from workers.kernels.attention_plan import attention_plan_bytes, max_items
from workers.kernels.kv import KvPool
from workers.kernels.sample import sample_work_bytes
from workers.weights import Weights


class Forward:
    """Runs plans. Holds the mapped pool and every array that a step needs, made once."""

    def __init__(self, setup: Setup, weights: Weights, arena: Arena) -> None:
        spec = weights.layout.spec
        self._arena = arena
        self._segment = segments.attach(segments.segment_name(setup.tag, "kv"))
        self._pool = KvPool(
            int(self._segment.memory.ctypes.data),
            spec.num_layers,
            spec.num_kv_heads,
            spec.head_dim,
            setup.block_size,
            2 if setup.pool_dtype == "float16" else 4,
        )
        self._worker_id = setup.worker_id
        self._private = _aligned_bytes(private_bytes(spec))
        builder = ProgramBuilder(setup, weights, arena, int(self._private.ctypes.data))
        builder.body()
        self._num_body = len(builder.ops)
        builder.tail()
        builder.link()
        self._ops = np.array(builder.ops, dtype=np.int64)
        self._numbers = np.array(builder.numbers, dtype=np.float64)
        work_bytes = max(attention_work_bytes(spec.head_dim), sample_work_bytes(spec.vocab_size))
        self._work = _aligned_bytes(work_bytes)
        self._work_address = int(self._work.ctypes.data)
        self._scratch = arena.address("attention_scratch")
        group = spec.num_heads // spec.num_kv_heads
        limits = setup.max_num_batched_tokens, setup.max_num_seqs, group
        self._windows = np.zeros((len(builder.windows), st.WINDOW_COLUMNS), dtype=np.int64)
        self._plans = np.zeros((len(builder.windows), attention_plan_bytes(*limits)), dtype=np.uint8)
        for row, plan, window in zip(self._windows, self._plans, builder.windows, strict=True):
            row[st.WINDOW], row[st.WINDOW_PLAN] = window, plan.ctypes.data
        self._places = np.zeros((3, setup.max_num_batched_tokens), dtype=np.int32)  # positions, slots, is_sampled
        self._step = np.zeros(st.STEP_COLUMNS, dtype=np.int64)
        for column, value in (
            (st.POSITIONS, self._places[0].ctypes.data),
            (st.SLOTS, self._places[1].ctypes.data),
            (st.IS_SAMPLED, self._places[2].ctypes.data),
            (st.MAX_TOKENS, setup.max_num_batched_tokens),
            (st.MAX_SEQS, setup.max_num_seqs),
            (st.MAX_POSITIONS, setup.max_model_len),
            (st.VOCAB_SIZE, spec.vocab_size),
            (st.NUM_BLOCKS, setup.num_blocks),
            (st.NUM_HEADS, spec.num_heads),
            (st.MAX_STATES, max_partial_states(setup.max_model_len, spec.num_heads)),
            (st.MAX_ITEMS, max_items(*limits)),
        ):
            self._step[column] = value

    def run(self, plan: StepPlan) -> bool:
        """One step, together with the other members of its team; False when it was aborted. Results are in the arena.

        ProtocolError when the plan's columns do not fit together, or exceed the instance's limits.
        """
        columns = [getattr(plan, name) for name in st.COLUMNS]
        lengths = [len(column) for column in columns]
        buffer = np.frombuffer(bytearray().join(columns), dtype=np.uint8)  # a copy: ids are filled in
        address = buffer.ctypes.data
        self._step[: st.LENGTHS] = [address, *(address + end for end in itertools.accumulate(lengths[:-1]))]
        self._step[st.LENGTHS : 2 * st.LENGTHS] = lengths
        arena = self._arena
        self._step[st.NUM_ROUNDS] = plan.num_rounds
        self._step[st.SAMPLED] = arena.sampled_address(plan.step_id)
        self._step[st.SAMPLED_BEFORE] = arena.sampled_address(plan.step_id - 1)
        outcome = p.run(
            self._ops, self._numbers, self._num_body, self._step, self._windows, self._pool, arena.control,
            len(plan.team), plan.team.index(self._worker_id), self._scratch, self._work_address, LOGITS_ROWS,
        )  # fmt: skip
        if outcome > 0:
            raise ProtocolError(f"step {plan.step_id}: {st.MISFITS[outcome]}")
        return bool(outcome == p.DONE)

    def results(self, plan: StepPlan) -> dict[str, Any]:
        """The columns of StepResult for the plan that was run last."""
        num_sampled = plan.num_rounds * int(self._step[st.NUM_SAMPLED])
        columns: dict[str, Any] = {"sampled_token_ids": self._arena.sampled(plan.step_id, num_sampled)}
        if self._step[st.MAX_NUM_LOGPROBS] >= 0:
            columns |= self._arena.logprobs(np.frombuffer(plan.rows, dtype=SAMPLE_ROW)["num_logprobs"])
        return columns


def _aligned_bytes(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Zeros that begin at a page: a vector across two cache lines is read and written as two."""
    array = np.zeros(num_bytes + mmap.PAGESIZE, dtype=np.uint8)
    begin = -array.ctypes.data % mmap.PAGESIZE
    return array[begin : begin + num_bytes]
