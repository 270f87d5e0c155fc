"""A request as its client sees it: token records in, deltas of text out, totals at the end. No I/O, no clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pagedserve.client.results import Completion, Delta, Output, PromptLogprobs, Timing, Usage
from pagedserve.contract.errors import PagedServeError, RequestError
from pagedserve.contract.messages import Generate, SequenceTokens, TokenLogprobs, unpack_ids
from pagedserve.text.stream import TextStream


@dataclass(frozen=True)
class TextOptions:
    """How tokens become text. `stop` strings end a sequence; `detokenize` False gives token ids only."""

    stop: tuple[str, ...] = ()
    include_stop_str: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True


class _Sequence:
    """One of a request's sequences: what has arrived, and how far its text is."""

    def __init__(self, index: int, text: TextStream | None, options: TextOptions, min_tokens: int) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.pieces: list[str] = []
        self.finish_reason: str | None = None
        self.stop: str | int | None = None
        self.cumulative_logprob: float | None = None
        self.num_replayed = 0  # tokens still to be dropped, since they arrived before the scheduler was restarted
        self._text = text
        self._include_stop_str = options.include_stop_str
        self._min_tokens = min_tokens

    def feed(self, record: SequenceTokens) -> Delta | None:
        """Take the next tokens; None when they bring no news."""
        if self.finish_reason is not None:  # a stop string ended it here; the scheduler does not know yet
            return None
        token_ids: list[int] = unpack_ids(record.token_ids).tolist()
        logprobs = record.logprobs
        if self.num_replayed:
            known = min(self.num_replayed, len(token_ids))
            self.num_replayed -= known
            token_ids, logprobs = token_ids[known:], logprobs[known:]
        if not token_ids and record.finish_reason is None:
            return None
        self.cumulative_logprob = record.cumulative_logprob
        text, num_tokens = self._to_text(token_ids, record)
        token_ids, logprobs = token_ids[:num_tokens], logprobs[:num_tokens]
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.pieces.append(text)
        return Delta(self.index, text, tuple(token_ids), logprobs, self.finish_reason, self.stop)

    def _to_text(self, token_ids: list[int], record: SequenceTokens) -> tuple[str, int]:
        """The new text, and how many of the tokens it took until a stop string was complete."""
        text = ""
        if self._text is not None:
            hidden = record.finish_reason == "stop" and record.stop_token_id is not None and not self._include_stop_str
            shown = token_ids[:-1] if hidden else token_ids
            for count, token_id in enumerate(shown, 1):
                may_stop = len(self.token_ids) + count > self._min_tokens
                text += self._text.push(token_id, may_stop=may_stop)
                if self._text.matched is not None:
                    self.finish_reason, self.stop = "stop", self._text.matched
                    return text, count
            if record.finish_reason is not None:
                text += self._text.finish()
                if self._text.matched is not None:
                    self.finish_reason, self.stop = "stop", self._text.matched
                    return text, len(token_ids)
        self.finish_reason, self.stop = record.finish_reason, record.stop_token_id
        return text, len(token_ids)


class LiveRequest:
    """One request from Generate to its last token. The shell that owns the socket takes `deltas` and reads `error`."""

    def __init__(self, message: Generate, texts: list[TextStream | None], options: TextOptions, now: float) -> None:
        self.message = message
        self.deltas: deque[Delta] = deque()
        self.error: PagedServeError | None = None
        self.finished = False
        self.aborting = False  # Abort was sent
        self.prompt_logprobs: PromptLogprobs | None = None
        self.num_cached_tokens = 0
        min_tokens = message.sampling.min_tokens
        self._sequences = [_Sequence(index, text, options, min_tokens) for index, text in enumerate(texts)]
        self._num_prompt_tokens = len(message.prompt_token_ids) // 4
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0
        self._queue_s = 0.0
        self._sent = now
        self._first_token: float | None = None
        self._last_token = now

    @property
    def request_id(self) -> str:
        """The id on the wire."""
        return self.message.request_id

    @property
    def must_abort(self) -> bool:
        """Whether stop strings ended every sequence while the scheduler still runs them."""
        return not self.finished and all(sequence.finish_reason is not None for sequence in self._sequences)

    def feed(self, record: SequenceTokens, now: float) -> None:
        """Take one record of this request."""
        if record.error is not None:
            self.fail(RequestError(record.error, code="unavailable"))
            return
        if record.num_cached_tokens:
            self.num_cached_tokens = record.num_cached_tokens
        if record.prompt_logprobs is not None:
            self.prompt_logprobs = record.prompt_logprobs
        if record.queue_time_s:
            self._queue_s = record.queue_time_s
        self._num_draft_tokens += record.num_draft_tokens
        self._num_accepted_tokens += record.num_accepted_tokens
        delta = self._sequences[record.index].feed(record) if record.index < len(self._sequences) else None
        if delta is not None:
            self.deltas.append(delta)
            if delta.token_ids:
                self._first_token = now if self._first_token is None else self._first_token
                self._last_token = now
        if record.finished:
            self.finished = True

    def fail(self, error: PagedServeError) -> None:
        """End with an error."""
        self.error = error
        self.finished = True

    def end_aborted(self) -> None:
        """End as an abort would, when the scheduler that was to confirm it is gone."""
        for sequence in self._sequences:
            delta = sequence.feed(
                SequenceTokens(request_id=self.request_id, index=sequence.index, finish_reason="abort")
            )
            if delta is not None:
                self.deltas.append(delta)
        self.finished = True

    def rewind(self) -> None:
        """Prepare for being computed once more: the tokens will be the same, and the known ones are dropped."""
        for sequence in self._sequences:
            sequence.num_replayed = len(sequence.token_ids)

    def usage(self) -> Usage:
        """Counts so far."""
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=sum(len(sequence.token_ids) for sequence in self._sequences),
            cached_tokens=self.num_cached_tokens,
            draft_tokens=self._num_draft_tokens,
            accepted_tokens=self._num_accepted_tokens,
        )

    def timing(self) -> Timing:
        """Durations so far."""
        rate = None
        if self._first_token is not None and self._last_token > self._first_token:
            rate = (self.usage().completion_tokens - 1) / (self._last_token - self._first_token)
        ttft = None if self._first_token is None else self._first_token - self._sent
        return Timing(self._queue_s, ttft, self._last_token - self._sent, rate)

    def completion(self) -> Completion:
        """The result; only when finished without error."""
        assert self.finished and self.error is None
        outputs = [
            Output(
                sequence.index,
                "".join(sequence.pieces),
                tuple(sequence.token_ids),
                tuple(sequence.logprobs),
                sequence.finish_reason or "abort",
                sequence.stop,
                sequence.cumulative_logprob,
            )
            for sequence in self._sequences
        ]
        return Completion(
            request_id=self.request_id,
            prompt_token_ids=tuple(unpack_ids(self.message.prompt_token_ids).tolist()),
            outputs=tuple(outputs),
            usage=self.usage(),
            timing=self.timing(),
            prompt_logprobs=self.prompt_logprobs,
        )
