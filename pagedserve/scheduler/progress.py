"""Progress: what a step's results do to its sequences: tokens appended, outputs parted, beams branched, ends found."""

from __future__ import annotations

from pagedserve.contract.messages import TokenLogprobs
from pagedserve.scheduler import speculation
from pagedserve.scheduler.batch import Batch, Scheduled
from pagedserve.scheduler.beam import Branch
from pagedserve.scheduler.column import Int32Column
from pagedserve.scheduler.counters import Counters
from pagedserve.scheduler.limits import Limits
from pagedserve.scheduler.outputs import Output, Outputs
from pagedserve.scheduler.pool import Pool
from pagedserve.scheduler.queues import Queues
from pagedserve.scheduler.request import Request, Sequence, State, sequence_seed
from pagedserve.scheduler.results import Results


class Progress:
    """Applies results; which sequences were in the step was the Planner's choice."""

    def __init__(self, limits: Limits, pool: Pool, queues: Queues, counters: Counters) -> None:
        self._limits = limits
        self._pool = pool
        self._queues = queues
        self._counters = counters

    def apply(self, batch: Batch, results: Results) -> list[Output]:
        """The records for the clients of a step that every worker has finished."""
        outputs = Outputs(self._counters)
        self._pool.settle()
        for sequence in batch.parts:
            sequence.num_steps_in_flight -= 1
        for sequence, part in batch.parts.items():
            if sequence.state is State.FINISHED:  # ended while it was computed: the result is good for others
                self._compute(sequence, min(part.num_tokens, sequence.num_behind))  # its token may be unknown
                self._release(sequence)
                continue
            self._collect_prompt_logprobs(part, results)
            if part.num_sampled_rows == 0:
                self._compute(sequence, part.num_tokens)
                if sequence.num_behind == 0:  # max_tokens is 0
                    outputs.end(sequence.request, "length")
                    self._finish(sequence, "length")
            elif sequence.request.beam is not None:
                self._branch(sequence, part, results, outputs)
            elif not sequence.request.has_parted:
                self._part(sequence, part, results, outputs)
            else:
                self._extend(sequence, part, results, outputs)
        return outputs.records

    def _compute(self, sequence: Sequence, num_tokens: int) -> None:
        """K and V of `num_tokens` more known tokens are in the pool."""
        sequence.num_computed_tokens += num_tokens
        self._pool.publish(sequence)
        self._pool.leave_window(sequence)

    def _collect_prompt_logprobs(self, part: Scheduled, results: Results) -> None:
        for row in range(part.first_row, part.first_row + part.num_target_rows):
            part.sequence.request.prompt_logprobs.append(results.logprobs(row))

    # ---- one sequence -----------------------------------------------------------------------------------------------

    def _extend(self, sequence: Sequence, part: Scheduled, results: Results, outputs: Outputs) -> None:
        """Append the sampled token, and behind it those of later rounds, or sampled after drafts that were right."""
        num_drafts, num_accepted = len(part.drafts), 0
        row = part.first_row + part.num_target_rows
        if num_drafts:
            sampled = results.token_ids[row : row + 1 + num_drafts]
            num_accepted = speculation.num_accepted(part.drafts, sampled)
            token_ids = self._append(sequence, sampled[: num_accepted + 1])
        else:
            token_ids = self._append(sequence, results.of_rounds(row))
        self._compute(sequence, part.num_tokens + len(token_ids) - 1)
        if num_drafts:
            self._count_drafts(sequence, num_drafts, num_accepted)
            self._pool.trim(sequence)
        self._deliver(sequence, token_ids, row, results, outputs)

    def _append(self, sequence: Sequence, token_ids: list[int]) -> list[int]:
        """Append tokens up to the one that ends the sequence; those appended."""
        request = sequence.request
        for count, token_id in enumerate(token_ids, start=1):
            sequence.tokens.append(token_id)
            if token_id in request.stop_token_ids:  # never before min_tokens: they are banned until then
                sequence.finish_reason, sequence.stop_token_id = "stop", token_id
            elif sequence.num_tokens == request.max_num_tokens:
                sequence.finish_reason = "length"
            if sequence.finish_reason is not None:
                return token_ids[:count]
        return token_ids

    def _deliver(self, sequence: Sequence, token_ids: list[int], row: int, results: Results, outputs: Outputs) -> None:
        self._counters.num_generation_tokens += len(token_ids)
        logprobs: list[TokenLogprobs] = []
        if sequence.request.num_logprobs >= 0:
            logprobs = [results.logprobs(row + place) for place in range(len(token_ids))]
        if sequence.finish_reason is not None:
            self._finish(sequence, sequence.finish_reason)
        outputs.deliver(sequence, token_ids, logprobs)

    def _finish(self, sequence: Sequence, finish_reason: str) -> None:
        """The sequence needs its blocks no more; full ones stay in the cache."""
        sequence.finish_reason = finish_reason
        self._queues.leave(sequence, State.FINISHED)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Give its blocks back, unless a step in flight still writes to them."""
        if sequence.num_steps_in_flight == 0:
            self._pool.release(sequence)

    def _count_drafts(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        sequence.num_draft_tokens += num_drafts
        sequence.num_accepted_tokens += num_accepted
        self._counters.num_draft_tokens += num_drafts
        self._counters.num_accepted_tokens += num_accepted

    # ---- several outputs --------------------------------------------------------------------------------------------

    def _part(self, sequence: Sequence, part: Scheduled, results: Results, outputs: Outputs) -> None:
        """The prompt is computed: each output becomes a sequence of its own, and all share the prompt's blocks."""
        request = sequence.request
        self._compute(sequence, part.num_tokens)
        for index in range(1, request.num_sequences):
            output = Sequence(request, index, sequence_seed(sequence.seed, index), Int32Column())
            self.fork(sequence, output, shares=True)
            request.sequences.append(output)
        request.has_parted = True
        row = part.first_row + part.num_target_rows
        for place, output in enumerate(request.sequences, start=row):
            self._deliver(output, self._append(output, [results.token_ids[place]]), place, results, outputs)

    def fork(self, parent: Sequence, child: Sequence, shares: bool) -> None:
        """Make `child` a copy of `parent`: one that runs and shares all its blocks, or one that waits and has none."""
        child.tokens = parent.tokens.copy()
        if shares:
            self._pool.fork(parent, child)
            self._queues.run(child)
        else:
            child.block_hashes = list(parent.block_hashes)
            self._queues.wait(child)

    # ---- beams ------------------------------------------------------------------------------------------------------

    def _branch(self, sequence: Sequence, part: Scheduled, results: Results, outputs: Outputs) -> None:
        """Keep a beam's candidates; when the last beam has its own, go on with the best branches."""
        request = sequence.request
        self._compute(sequence, part.num_tokens)
        sequence.candidates = results.logprobs(part.first_row + part.num_target_rows)
        if any(beam.candidates is None for beam in request.sequences):
            return
        assert request.beam is not None
        beams = request.sequences
        branches = request.beam.advance(beams)
        request.has_parted = True
        if branches:
            self._grow(request, beams, branches)
            return
        for beam in beams:
            self._finish(beam, "beam search is over")
        self._counters.num_generation_tokens += sum(len(h.token_ids) for h in request.beam.hypotheses)
        outputs.deliver_beams(request)

    def _grow(self, request: Request, beams: list[Sequence], branches: list[Branch]) -> None:
        """Each beam goes on as the first of its branches; the others are forked from it; beams without any end."""
        next_index = 1 + max(beam.index for beam in beams)
        chosen: list[Sequence] = []
        for branch in branches:
            parent = beams[branch.parent]
            if parent not in chosen:
                chosen.append(parent)
                continue
            child = Sequence(request, next_index, parent.seed, Int32Column(), logprobs=list(parent.logprobs))
            next_index += 1
            self.fork(parent, child, shares=parent.state is State.RUNNING)
            chosen.append(child)
        for beam in beams:
            if beam not in chosen:
                self._finish(beam, "no branch")
        for beam, branch in zip(chosen, branches, strict=True):
            beam.tokens.append(branch.token_id)
            beam.logprobs.append(branch.logprobs)
            beam.cumulative_logprob = branch.cumulative_logprob
            beam.candidates = None
            if beam.state is State.PARKED:
                self._queues.wait(beam)
        request.sequences = chosen
