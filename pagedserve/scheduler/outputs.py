"""Outputs: the records that go to clients. What is in the first and in the last record of a request is decided here."""

from __future__ import annotations

from typing import Any

from pagedserve.contract.messages import SequenceTokens, TokenLogprobs, pack_ids
from pagedserve.scheduler.counters import Counters
from pagedserve.scheduler.request import Request, Sequence

Output = tuple[bytes, SequenceTokens]  # (client, record)


class Outputs:
    """Collects the records of one event."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self.records: list[Output] = []

    def deliver(self, sequence: Sequence, token_ids: list[int], logprobs: list[TokenLogprobs]) -> None:
        """New tokens of a sequence; they wait in it when the request's best sequences are chosen at the end."""
        request = sequence.request
        for entry in logprobs:
            sequence.cumulative_logprob += entry.logprob
        is_last = sequence.finish_reason is not None and all(s.finish_reason for s in request.sequences)
        if not request.holds_output:
            self._emit_tokens(sequence, sequence.index, token_ids, logprobs, is_last)
            return
        sequence.logprobs += logprobs
        if is_last:
            best = sorted(request.sequences, key=lambda s: (-s.cumulative_logprob / s.num_output_tokens, s.index))
            best = best[: request.sampling.n]
            for index, chosen in enumerate(best):
                tokens = chosen.output_token_ids().tolist()
                self._emit_tokens(chosen, index, tokens, chosen.logprobs, is_last=index == len(best) - 1)

    def deliver_beams(self, request: Request) -> None:
        """The best outputs of a beam search that is over."""
        assert request.beam is not None
        best = request.beam.hypotheses[: request.sampling.n]
        for index, hypothesis in enumerate(best):
            self._emit(
                request,
                index,
                is_last=index == len(best) - 1,
                token_ids=pack_ids(hypothesis.token_ids),
                logprobs=hypothesis.logprobs if request.sampling.logprobs is not None else (),
                finish_reason=hypothesis.finish_reason,
                stop_token_id=hypothesis.stop_token_id,
                cumulative_logprob=hypothesis.cumulative_logprob,
            )

    def end(self, request: Request, finish_reason: str) -> None:
        """The last records of a request that ends without another token: one for each output that has not ended."""
        if request.has_parted and not request.holds_output:
            indices = [sequence.index for sequence in request.sequences if sequence.finish_reason is None]
        else:
            indices = list(range(request.sampling.n))
        for index in indices:
            self._emit(request, index, is_last=index == indices[-1], finish_reason=finish_reason)

    def _emit_tokens(
        self, sequence: Sequence, index: int, token_ids: list[int], logprobs: list[TokenLogprobs], is_last: bool
    ) -> None:
        request = sequence.request
        tells_sum = sequence.finish_reason is not None and request.num_logprobs >= 0
        self._emit(
            request,
            index,
            is_last,
            token_ids=pack_ids(token_ids),
            logprobs=tuple(logprobs) if request.sampling.logprobs is not None else (),
            finish_reason=sequence.finish_reason,
            stop_token_id=sequence.stop_token_id,
            cumulative_logprob=sequence.cumulative_logprob if tells_sum else None,
            num_draft_tokens=sequence.num_draft_tokens,
            num_accepted_tokens=sequence.num_accepted_tokens,
        )
        sequence.num_draft_tokens = sequence.num_accepted_tokens = 0

    def _emit(self, request: Request, index: int, is_last: bool, **fields: Any) -> None:
        """Add a record; the first one of a request also tells what is known once its prompt is computed."""
        if not request.is_reported:
            request.is_reported = True
            fields["num_cached_tokens"] = request.num_cached_tokens
            if request.first_scheduled_at is not None:
                fields["queue_time_s"] = request.first_scheduled_at - request.added_at
            if request.num_prompt_logprobs >= 0:
                fields["prompt_logprobs"] = tuple(request.prompt_logprobs)
        record = SequenceTokens(request_id=request.request_id, index=index, finished=is_last, **fields)
        self.records.append((request.client, record))
        if record.finish_reason is not None:
            finished = self._counters.num_finished
            finished[record.finish_reason] = finished.get(record.finish_reason, 0) + 1
        request.is_over |= is_last
