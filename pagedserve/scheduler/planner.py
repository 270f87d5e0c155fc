"""Planner: which sequences are in the next step, with how many tokens each, and who gives way when the pool is full.

The order of decisions: sequences one token behind (their clients wait for the next token), then the running ones
further behind, then the queue, then drafts from what is left of the budget.
"""

from __future__ import annotations

from pagedserve.scheduler import speculation
from pagedserve.scheduler.batch import Batch, Scheduled
from pagedserve.scheduler.counters import Counters
from pagedserve.scheduler.limits import Limits
from pagedserve.scheduler.pool import Pool
from pagedserve.scheduler.queues import Queues
from pagedserve.scheduler.request import Sequence, State

MAX_BYPASSES = 32  # admissions past a sequence that does not fit, before room is kept for it
PROMPT_TOKENS_PER_DECODE = 2  # with 20 sequences of SmolLM2 that decode, 64 prompt tokens double a step, 48 add 85 %
MAX_LOOKAHEAD = 32  # sequences that may be found not to fit in one step; bounds the cost of a long queue


class Planner:
    """Moves sequences between the queues and fills a Batch; tokens and results are none of its business."""

    def __init__(self, limits: Limits, pool: Pool, queues: Queues, counters: Counters) -> None:
        self._limits = limits
        self._pool = pool
        self._queues = queues
        self._counters = counters

    def next_batch(self, now: float) -> Batch | None:
        """The next step's sequences, with blocks for all they will write; None when there is nothing to compute."""
        batch = Batch(self._limits)
        self._continue_running(batch)
        self._admit_waiting(batch, now)
        while not batch.parts and self._queues.waiting and self._queues.running:
            self._preempt(self._queues.running[-1], batch)  # only beams that wait for a sibling are left: it needs room
            self._admit_waiting(batch, now)
        self._add_drafts(batch)
        return batch if batch.parts else None

    # ---- running sequences ------------------------------------------------------------------------------------------

    def _continue_running(self, batch: Batch) -> None:
        further_behind = []
        for sequence in tuple(self._queues.running):
            num_behind = sequence.num_behind
            if num_behind > 1:
                further_behind.append(sequence)
            elif num_behind == 1 and sequence.state is State.RUNNING:  # else it has just been preempted
                self._schedule(sequence, 1, batch)
        if batch.parts:
            cost = max(self._limits.min_mixed_prompt_tokens, PROMPT_TOKENS_PER_DECODE * len(batch.parts))
            batch.limit_chunks(cost)
        for sequence in further_behind:
            if sequence.state is State.RUNNING:
                self._take_cached(sequence)
                self._schedule(sequence, self._chunk_length(sequence, batch), batch)

    def _chunk_length(self, sequence: Sequence, batch: Batch) -> int:
        """How far a sequence goes in this step: not into a block that another sequence of the batch computes already,
        since in the next step it can have that block from the cache."""
        num_tokens = min(sequence.num_behind, batch.room_for_chunk(sequence.num_computed_tokens))
        start, block_size = sequence.num_computed_tokens, self._limits.block_size
        if batch.hashes and not sequence.request.lacks_prompt_logprobs:
            end = min(start + num_tokens, sequence.num_tokens - 1)  # the last token is never taken from the cache
            for index in range(start // block_size, -(-end // block_size)):
                is_full = (index + 1) * block_size < sequence.num_tokens
                if is_full and self._pool.block_hash(sequence, index) in batch.hashes:
                    return max(0, index * block_size - start)
        return num_tokens

    def _schedule(self, sequence: Sequence, num_tokens: int, batch: Batch) -> None:
        """Add `num_tokens` tokens of a running sequence to the batch, or fewer, or none, as budget and pool allow."""
        if len(batch.parts) == self._limits.max_num_seqs:
            return
        is_chunk = sequence.num_behind > 1
        num_tokens = min(num_tokens, batch.num_tokens_left)
        num_target_rows = num_sampled_rows = 0
        while num_tokens > 0:
            num_target_rows, num_sampled_rows = self._num_rows(sequence, num_tokens)
            if num_target_rows + num_sampled_rows <= batch.num_rows_left:
                break
            num_tokens -= max(1, num_target_rows - batch.num_rows_left)
        if num_tokens <= 0 or not self._make_room(sequence, num_tokens, batch):
            return
        copy = self._pool.extend(sequence, num_tokens)
        start = sequence.num_computed_tokens
        batch.add(Scheduled(sequence, start, num_tokens, num_target_rows, num_sampled_rows, copy), is_chunk)
        if is_chunk and self._limits.enable_prefix_caching:
            end = min(sequence.num_computed_tokens + num_tokens, sequence.num_tokens)
            block_size = self._limits.block_size
            for index in range(sequence.num_computed_tokens // block_size, -(-end // block_size)):
                if (index + 1) * block_size <= sequence.num_tokens:
                    batch.hashes.add(self._pool.block_hash(sequence, index))

    @staticmethod
    def _num_rows(sequence: Sequence, num_tokens: int) -> tuple[int, int]:
        """Rows of logits that the next `num_tokens` tokens need: for prompt logprobs, and to sample."""
        request = sequence.request
        end = sequence.num_computed_tokens + num_tokens
        num_target_rows = num_sampled_rows = 0
        if request.lacks_prompt_logprobs:
            num_target_rows = max(0, min(end, request.num_prompt_tokens - 1) - len(request.prompt_logprobs) + 1)
        if end == sequence.num_tokens and end < request.max_num_tokens:
            num_sampled_rows = 1 if request.has_parted or request.beam is not None else request.num_sequences
        return num_target_rows, num_sampled_rows

    # ---- preemption -------------------------------------------------------------------------------------------------

    def _make_room(self, sequence: Sequence, num_tokens: int, batch: Batch) -> bool:
        """Preempt until `num_tokens` more tokens have blocks: always the newest of the lowest priority.

        False when that was the sequence itself. The first in order is never reached: alone, it always fits.
        """
        while self._pool.num_missing(sequence, num_tokens) > self._pool.allocator.num_available:
            victim = self._queues.running[-1]
            self._preempt(victim, batch)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence, batch: Batch) -> None:
        """Take all blocks away: it waits, and computes again what the cache has lost by then."""
        batch.remove(sequence)
        self._pool.release(sequence)
        self._queues.leave(sequence, State.PARKED)
        if sequence.candidates is None:
            self._queues.wait(sequence)
        sequence.num_preemptions += 1
        self._counters.num_preemptions += 1

    # ---- admission --------------------------------------------------------------------------------------------------

    def _admit_waiting(self, batch: Batch, now: float) -> None:
        """Admit from the queue in order. One that does not fit lets later ones pass, MAX_BYPASSES times at most."""
        running, limits = self._queues.running, self._limits
        if not self._queues.waiting:
            return
        num_seats_left = limits.max_num_seqs - sum(sequence.num_seats for sequence in running)
        promised = sum(self._num_promised(sequence) for sequence in running)
        first_bypassed = None
        num_looked_at = 0
        for sequence in tuple(self._queues.waiting):
            if num_seats_left <= 0 or min(batch.room_for_chunk(), batch.num_rows_left) <= 0:
                return
            if sequence.num_seats > num_seats_left or not self._fits(sequence, promised):
                first_bypassed = first_bypassed or sequence
                num_looked_at += 1
                if first_bypassed.num_bypasses >= MAX_BYPASSES or num_looked_at == MAX_LOOKAHEAD:
                    return
                continue
            if first_bypassed is not None:
                if first_bypassed.num_bypasses >= MAX_BYPASSES:
                    return
                first_bypassed.num_bypasses += 1
            self._admit(sequence, batch, now)
            num_seats_left -= sequence.num_seats
            promised += self._num_promised(sequence)

    def _num_promised(self, sequence: Sequence) -> int:
        """Blocks that a running sequence still needs for its known tokens."""
        return max(0, self._limits.num_blocks_for(sequence.num_tokens) - sequence.table.length)

    def _fits(self, sequence: Sequence, promised: int) -> bool:
        """Whether the blocks for all known tokens are there, beside those promised to running sequences, with one more
        for each of these so that it need not be preempted at once; with each preemption it waits for twice as many."""
        running, allocator = self._queues.running, self._pool.allocator
        if not running:
            return True
        found = [block_id for block_id in self._pool.find_cached(sequence) if block_id >= 0]
        num_used_by_others = sum(allocator.ref_counts[block_id] > 0 for block_id in found)
        needed = max(0, self._limits.max_blocks_at_once(sequence.num_tokens) - num_used_by_others)
        spare = len(running) << min(sequence.num_preemptions, 16)
        return needed + promised + spare <= allocator.num_available

    def _admit(self, sequence: Sequence, batch: Batch, now: float) -> None:
        request, counters = sequence.request, self._counters
        if request.first_scheduled_at is None:
            request.first_scheduled_at = now
            counters.num_prompt_tokens += request.num_prompt_tokens
            if not request.lacks_prompt_logprobs:
                counters.num_queried_tokens += request.num_prompt_tokens
        self._queues.run(sequence)
        self._take_cached(sequence)
        self._schedule(sequence, self._chunk_length(sequence, batch), batch)

    def _take_cached(self, sequence: Sequence) -> None:
        """Go on with what others have computed meanwhile."""
        found = self._pool.find_cached(sequence)
        if not found:
            return
        before = sequence.num_computed_tokens
        self._pool.take_cached(sequence, found)
        if sequence.num_output_tokens == 0 and sequence.num_preemptions == 0:
            sequence.request.num_cached_tokens += sequence.num_computed_tokens - before
            self._counters.num_cached_tokens += sequence.num_computed_tokens - before

    # ---- speculation ------------------------------------------------------------------------------------------------

    def _add_drafts(self, batch: Batch) -> None:
        """Let sequences that sample verify drafts too, where that preempts nobody."""
        for sequence, part in batch.parts.items():
            request = sequence.request
            if request.num_draft_tokens == 0 or part.num_sampled_rows == 0 or not request.has_parted or request.beam:
                continue
            num_drafts = min(
                request.num_draft_tokens,
                request.max_num_tokens - sequence.num_tokens - 1,
                batch.num_tokens_left,
                batch.num_rows_left,
            )
            if num_drafts <= 0:
                continue
            drafts = speculation.propose(sequence.tokens.view(), num_drafts)
            num_tokens = part.num_tokens + len(drafts)
            if len(drafts) and self._pool.num_missing(sequence, num_tokens) <= self._pool.allocator.num_available:
                self._pool.extend(sequence, num_tokens)
                batch.add_drafts(part, drafts)
