"""Batch: the sequences of one step, what is left of the step's budget, and the step as a StepPlan."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pagedserve.contract.messages import Ids, Int32, StepPlan, pack_ids, pack_sample_row
from pagedserve.scheduler.limits import Limits
from pagedserve.scheduler.request import Request, Sequence, sequence_seed

MAX_CHUNK_COST = 4.0  # of a step of prompts alone, in max_num_batched_tokens without context: nobody waits longer
_NO_TOKENS: Int32 = np.empty(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class Scheduled:
    """One sequence's part of a step: `num_tokens` tokens, then drafts; rows of prompt logprobs, then sampling.

    In a batch of several rounds: its part of the first.
    """

    sequence: Sequence
    start: int  # position of its first token
    num_tokens: int
    num_target_rows: int
    num_sampled_rows: int  # 1, or one for each output of a request whose prompt ends here; drafts add one each
    copy: tuple[int, int] | None
    drafts: Int32 = field(default_factory=lambda: _NO_TOKENS)
    unknown: Int32 = field(default_factory=lambda: _NO_TOKENS)  # ids of the step in flight; its token is the last one
    first_row: int = 0

    @property
    def end(self) -> int:
        """Position behind its tokens, where the first sampled one will be."""
        return self.start + self.num_tokens

    @property
    def num_written(self) -> int:
        """Tokens that the step's first round writes K and V of."""
        return self.num_tokens + len(self.drafts)

    def num_to_come(self, num_rounds: int = 1) -> int:
        """Tokens from the sequence's first that no answered step has computed to the one of its last round."""
        return self.end + num_rounds - 1 - self.sequence.num_computed_tokens

    def token_ids(self) -> Int32:
        """Its tokens, as StepPlan has them."""
        if len(self.unknown):
            return self.unknown[-1:]
        return self.sequence.tokens.values[self.start : self.end]


class Batch:
    """Collects sequences within the limits of a step."""

    def __init__(self, limits: Limits) -> None:
        self.parts: dict[Sequence, Scheduled] = {}
        self.num_rounds = 1
        self.num_tokens_left = limits.max_num_batched_tokens
        self.num_rows_left = limits.max_num_rows
        self._limits = limits
        self._chunk_budget = MAX_CHUNK_COST * limits.max_num_batched_tokens  # for sequences further behind than one
        self.hashes: set[bytes] = set()  # blocks that this step computes (or begins to): nobody else need do it

    def limit_chunks(self, cost: float) -> None:
        """From here on tokens of this cost at most for sequences that are more than one token behind."""
        self._chunk_budget = cost

    def room_for_chunk(self, context: int = 0) -> int:
        """Tokens that a sequence more than one token behind, with `context` computed, can have now."""
        if self._chunk_budget < 1.0:
            return 0
        return min(self.num_tokens_left, max(1, int(self._chunk_budget / self._limits.prompt_token_cost(context))))

    def add(self, part: Scheduled, is_chunk: bool) -> None:
        """Take a sequence's part in."""
        self.parts[part.sequence] = part
        self.num_tokens_left -= part.num_tokens
        self.num_rows_left -= part.num_target_rows + part.num_sampled_rows
        if is_chunk:
            cost = self._limits.prompt_token_cost(part.sequence.num_computed_tokens)
            self._chunk_budget -= part.num_tokens * cost

    def add_drafts(self, part: Scheduled, drafts: Int32) -> None:
        """Let the step verify drafts after a part's last token."""
        part.drafts = drafts
        self.num_tokens_left -= len(drafts)
        self.num_rows_left -= len(drafts)

    def remove(self, sequence: Sequence) -> None:
        """Take a preempted sequence out again, if it is in."""
        part = self.parts.pop(sequence, None)
        if part is not None:
            self.num_tokens_left += part.num_tokens
            self.num_rows_left += part.num_target_rows + part.num_sampled_rows

    def plan(self, step_id: int) -> tuple[StepPlan, list[int]]:
        """The step for the team (whose names are still missing) and num_logprobs of each of its rows."""
        tokens: list[Int32] = []
        tables: list[Int32] = []
        starts, table_starts = [0], [0]
        computed: list[int] = []
        copies: list[int] = []
        rows = _Rows(self.num_rounds)
        for sequence, part in self.parts.items():
            rows.add(part, starts[-1])
            tokens += [part.token_ids(), part.drafts]
            tables.append(sequence.table.view())
            starts.append(starts[-1] + part.num_written)
            table_starts.append(table_starts[-1] + sequence.table.length)
            computed.append(part.start)
            if part.copy is not None:
                copies.extend(part.copy)
        plan = StepPlan(
            step_id=step_id,
            team=(),
            token_ids=_join(tokens),
            query_start_loc=pack_ids(starts),
            num_computed_tokens=pack_ids(computed),
            block_tables=_join(tables),
            block_table_start=pack_ids(table_starts),
            copies=pack_ids(copies),
            rows=b"".join(rows.packed),
            history=_join(rows.history),
            bias_token_ids=_join(rows.bias_token_ids),
            bias_values=b"".join(values.data for values in rows.bias_values),
            num_rounds=self.num_rounds,
        )
        return plan, rows.num_logprobs


def _join(columns: list[Int32]) -> Ids:
    """One column of many, in one copy: int32 arrays are little-endian bytes on every CPU that we run on."""
    return b"".join(column.data for column in columns)


class _Rows:
    """The SAMPLE_ROW column and its ragged neighbours while they grow."""

    def __init__(self, num_rounds: int) -> None:
        self.packed: list[bytes] = []
        self.num_logprobs: list[int] = []
        self.history: list[Int32] = []
        self.bias_token_ids: list[Int32] = []
        self.bias_values: list[np.ndarray[tuple[int], np.dtype[np.float32]]] = []
        self._history_length = 0
        self._history_room: Int32 = np.zeros(num_rounds - 1, dtype=np.int32)  # for what the rounds sample
        self._bias_length = 0

    def add(self, part: Scheduled, first_token: int) -> None:
        """Add a part's rows; its first token is number `first_token` of the step."""
        part.first_row = len(self.packed)
        sequence, request = part.sequence, part.sequence.request
        if part.num_target_rows:
            first = len(request.prompt_logprobs)  # the next prompt token whose logprob is missing
            for position in range(first, first + part.num_target_rows):
                target = int(sequence.tokens.values[position])
                token_index = first_token + position - 1 - part.start
                self._add(request, token_index, position, request.num_prompt_logprobs, target=target)
        if not part.num_sampled_rows:
            return
        last_token = first_token + part.num_tokens - 1
        num_output_tokens = part.end - request.num_prompt_tokens
        span = self._add_history(part) if request.needs_history else (0, 0, 0)
        if not request.has_parted:
            for index in range(part.num_sampled_rows):
                seed = sequence_seed(sequence.seed, index)
                bias = self._add_bias(request, num_output_tokens)
                self._add(request, last_token, part.end, request.num_logprobs, seed, span, bias)
            return
        for num_drafts in range(1 + len(part.drafts)):  # row j samples after j drafts
            self._add(
                request,
                last_token + num_drafts,
                part.end + num_drafts,
                request.num_logprobs,
                sequence.seed,
                (span[0], span[1] + num_drafts, span[2]) if request.needs_history else span,
                self._add_bias(request, num_output_tokens + num_drafts),
            )

    def _add(
        self,
        request: Request,
        token_index: int,
        position: int,
        num_logprobs: int,
        seed: int = 0,
        history_span: tuple[int, int, int] = (0, 0, 0),
        bias_span: tuple[int, int] = (0, 0),
        target: int = -1,
    ) -> None:
        self.num_logprobs.append(num_logprobs)
        ids = (token_index, target, num_logprobs, request.sampling.top_k, seed, position)
        self.packed.append(pack_sample_row(*ids, *request.row_numbers, *history_span, *bias_span))

    def _add_history(self, part: Scheduled) -> tuple[int, int, int]:
        """Put the tokens that penalties see into `history`, drafts and room last; (start, end before those, prompt
        tokens)."""
        sequence, request = part.sequence, part.sequence.request
        sees_prompt = request.sampling.repetition_penalty != 1.0
        known = sequence.tokens.view() if sees_prompt else sequence.output_token_ids()
        self.history += [known, part.unknown, part.drafts, self._history_room]
        start, end = self._history_length, self._history_length + len(known) + len(part.unknown)
        self._history_length = end + len(part.drafts) + len(self._history_room)
        return start, end, request.num_prompt_tokens if sees_prompt else 0

    def _add_bias(self, request: Request, num_output_tokens: int) -> tuple[int, int]:
        """Put logit_bias, and before min_tokens the ban of all tokens that would end the output, into `bias_*`."""
        start = self._bias_length
        if len(request.bias_token_ids):
            self.bias_token_ids.append(request.bias_token_ids)
            self.bias_values.append(request.bias_values)
            self._bias_length += len(request.bias_token_ids)
        if num_output_tokens < request.sampling.min_tokens and len(request.banned_token_ids):
            self.bias_token_ids.append(request.banned_token_ids)
            self.bias_values.append(np.full(len(request.banned_token_ids), -np.inf, dtype=np.float32))
            self._bias_length += len(request.banned_token_ids)
        return start, self._bias_length
