"""The step after the one in flight, planned before its result is known, so that the team goes from step to step without
a pause: every sequence goes one token further, and that token is whatever the step in flight samples last.

Only where this is what the Planner would do too. An end that the step in flight may bring (a stop token, an abort) is
found too late: what is computed for that sequence then is dropped.
"""

from __future__ import annotations

import numpy as np

from pagedserve.scheduler.batch import Batch, Scheduled
from pagedserve.scheduler.limits import Limits
from pagedserve.scheduler.pool import Pool
from pagedserve.scheduler.queues import Queues
from pagedserve.scheduler.request import State


def next_batch(in_flight: Batch, limits: Limits, pool: Pool, queues: Queues) -> Batch | None:
    """The batch after the one in flight; None when it depends on more than the sampled tokens' ids."""
    parts = [part for sequence, part in in_flight.parts.items() if sequence.state is State.RUNNING]
    if len(parts) < len(queues.running) or not all(_samples_next(part) for part in parts):
        return None
    next_parts = [_next_part(part, in_flight) for part in parts]
    going_on = [part for part in next_parts if part.end < part.sequence.request.max_num_tokens]
    num_missing = 0
    for part in going_on:
        if pool.is_shared(part.sequence):
            return None  # a copy is made by the first who writes, and who that is is not known yet
        num_missing += pool.num_missing(part.sequence, part.num_to_come())
    if not going_on or num_missing > pool.allocator.num_available:
        return None
    if queues.waiting and len(going_on) < limits.max_num_seqs:
        return None  # somebody may be admitted
    batch = Batch(limits)
    for part in going_on:
        pool.extend(part.sequence, part.num_to_come())
        batch.add(part, is_chunk=False)
    return batch


def _samples_next(part: Scheduled) -> bool:
    """Whether a step does nothing for a sequence but to sample its next token, as will the step after it.

    Nor does it copy a block for it: the step after may write to that block, and both may have to be run again.
    """
    request = part.sequence.request
    is_one_line = request.has_parted and request.beam is None and request.num_draft_tokens == 0
    return part.num_sampled_rows == 1 and part.copy is None and is_one_line


def _next_part(part: Scheduled, in_flight: Batch) -> Scheduled:
    """The part after one in flight: the token that its last round samples."""
    row, num_rows = part.first_row + part.num_target_rows, len(in_flight.parts)  # where there are several rounds
    unknown = -1 - row - num_rows * np.arange(in_flight.num_rounds, dtype=np.int32)
    return Scheduled(part.sequence, part.end + in_flight.num_rounds - 1, 1, 0, 1, None, unknown=unknown)
