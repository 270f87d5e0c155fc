"""How many rounds a step has: passes that the team runs one after another, without a result or a plan in between.

Only where each of them would have been a step of the same sequences: in a round nobody can be admitted, preempted or
end. A sequence that ends in one by a stop token is found too late: what is computed for it after that is dropped.
"""

from __future__ import annotations

from pagedserve.scheduler.batch import Batch, Scheduled
from pagedserve.scheduler.limits import Limits
from pagedserve.scheduler.pool import Pool
from pagedserve.scheduler.queues import Queues

ROUNDS_S = 0.008  # about as long a step of several rounds may last, since who comes meanwhile has to wait
MAX_ROUNDS = 4  # more would save little: the Python around a step of SmolLM2 costs a quarter of a round


def rounds_in_time(round_s: float) -> int:
    """How many rounds a step may have if one lasts so long; 0.0, nothing is known yet: 1."""
    return max(1, min(MAX_ROUNDS, int(ROUNDS_S / round_s))) if round_s > 0.0 else 1


def add_rounds(batch: Batch, limits: Limits, pool: Pool, queues: Queues, max_rounds: int) -> None:
    """Give a batch as many rounds as it can have, max_rounds at most, and its sequences the blocks for them."""
    num_rounds = _most_rounds(batch, limits, queues, max_rounds)
    while num_rounds > 1 and _num_missing(batch, pool, num_rounds) > pool.allocator.num_available:
        num_rounds -= 1
    if num_rounds > 1:
        batch.num_rounds = num_rounds
        for sequence, part in batch.parts.items():
            pool.extend(sequence, part.num_to_come(num_rounds))


def _most_rounds(batch: Batch, limits: Limits, queues: Queues, max_rounds: int) -> int:
    """The most rounds of a batch, blocks left aside."""
    parts = batch.parts.values()
    if max_rounds == 1 or queues.waiting or len(parts) < len(queues.running) or not all(map(_only_samples, parts)):
        return 1
    max_num_sampled = min(limits.max_num_rows, limits.max_num_batched_tokens)
    return min(max_rounds, max_num_sampled // len(parts), *map(_num_alike, parts))


def _only_samples(part: Scheduled) -> bool:
    """Whether a step computes one token of a sequence and samples the next, and says no more about it than its id.

    Outputs that have not parted have a row each, and a beam has logprobs. A block that the step copies may be written
    by whom it is left to: a later round's tokens there would be copied if the step were run again.
    """
    request = part.sequence.request
    has_one_row = part.num_sampled_rows == 1 and part.num_target_rows == 0 and part.num_tokens == 1
    return has_one_row and part.copy is None and request.num_logprobs < 0 and request.num_draft_tokens == 0


def _num_alike(part: Scheduled) -> int:
    """How often a sequence can go one token further as in this step: until it is full, or may be stopped."""
    request = part.sequence.request
    num_output_tokens = part.end - request.num_prompt_tokens
    num_left = request.max_num_tokens - part.end
    num_banned = request.sampling.min_tokens - num_output_tokens  # tokens during which nothing may end the output
    return min(num_left, num_banned) if num_banned > 0 else num_left


def _num_missing(batch: Batch, pool: Pool, num_rounds: int) -> int:
    return sum(pool.num_missing(part.sequence, part.num_to_come(num_rounds)) for part in batch.parts.values())
