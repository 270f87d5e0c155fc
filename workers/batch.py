"""Batch: one StepPlan as the flat arrays that the program reads. Checked at this border; private to each worker."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedserve.contract.errors import ProtocolError
from pagedserve.contract.messages import SAMPLE_ROW, StepPlan, unpack_ids

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Batch:
    """N tokens of S sequences, R of which sample. Shapes behind each field."""

    step_id: int
    token_ids: Int32  # [N]
    positions: Int32  # [N]
    slots: Int32  # [N] block_id * block_size + place in the block, where each token's K and V go
    query_start_loc: Int32  # [S+1]
    num_computed_tokens: Int32  # [S]
    block_tables: Int32  # flat
    block_table_start: Int32  # [S+1]
    copies: Int32  # [num_copies, 2]
    rows: npt.NDArray[np.void]  # SAMPLE_ROW [R]
    history: Int32
    bias_token_ids: Int32
    bias_values: npt.NDArray[np.float32]

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.token_ids)

    @property
    def num_seqs(self) -> int:
        """S."""
        return len(self.num_computed_tokens)


def make_batch(plan: StepPlan, block_size: int, max_num_tokens: int, before: Int32) -> Batch:
    """The arrays of a plan; ProtocolError when its columns do not fit together.

    `before` [R] is what the rows of the step before have sampled.
    """
    token_ids = _known_ids(plan, "token_ids", before)
    query_start_loc = unpack_ids(plan.query_start_loc)
    num_computed = unpack_ids(plan.num_computed_tokens)
    block_tables = unpack_ids(plan.block_tables)
    block_table_start = unpack_ids(plan.block_table_start)
    num_tokens, num_seqs = len(token_ids), len(num_computed)
    if not 0 < num_tokens <= max_num_tokens:
        raise ProtocolError(f"step {plan.step_id}: expected 1 to {max_num_tokens} tokens, got {num_tokens}")
    if len(query_start_loc) != num_seqs + 1 or len(block_table_start) != num_seqs + 1:
        raise ProtocolError(f"step {plan.step_id}: query_start_loc and block_table_start need {num_seqs + 1} entries")
    if query_start_loc[0] != 0 or query_start_loc[-1] != num_tokens or block_table_start[-1] != len(block_tables):
        raise ProtocolError(f"step {plan.step_id}: the columns' ends do not meet their lengths")
    lengths = np.diff(query_start_loc)
    sequence = np.repeat(np.arange(num_seqs, dtype=np.int32), lengths)
    positions = (np.arange(num_tokens, dtype=np.int32) - query_start_loc[sequence]) + num_computed[sequence]
    slots = block_tables[block_table_start[sequence] + positions // block_size] * block_size + positions % block_size
    return Batch(
        step_id=plan.step_id,
        token_ids=token_ids,
        positions=positions.astype(np.int32, copy=False),
        slots=slots.astype(np.int32, copy=False),
        query_start_loc=query_start_loc,
        num_computed_tokens=num_computed,
        block_tables=block_tables,
        block_table_start=block_table_start,
        copies=unpack_ids(plan.copies).reshape(-1, 2),
        rows=np.frombuffer(plan.rows, dtype=SAMPLE_ROW),
        history=_known_ids(plan, "history", before),
        bias_token_ids=unpack_ids(plan.bias_token_ids),
        bias_values=np.frombuffer(plan.bias_values, dtype="<f4"),
    )


def _known_ids(plan: StepPlan, column: str, before: Int32) -> Int32:
    """A column of token ids in which -1 - r has become what row r of the step before sampled."""
    token_ids = unpack_ids(getattr(plan, column))
    if len(token_ids) == 0 or (lowest := int(token_ids.min())) >= 0:
        return token_ids
    if -1 - lowest >= len(before):
        raise ProtocolError(f"step {plan.step_id}: {column} refers to row {-1 - lowest} of the step before")
    return np.where(token_ids < 0, before[np.where(token_ids < 0, -1 - token_ids, 0)], token_ids)
