"""What a client gives its caller: deltas while a request runs, a Completion when it is done. Plain records only."""

from __future__ import annotations

from dataclasses import dataclass

from pagedserve.contract.messages import TokenLogprobs

PromptLogprobs = tuple[TokenLogprobs | None, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens and new text of sequence `index` of a request.

    Text may lag behind the tokens: half a character, or what could be the beginning of a stop string, is held back.
    The last delta of a sequence has a finish_reason (stop, length, abort); `stop` is then the stop string or the token
    id that ended it, if one did.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop: str | int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request: completion_tokens over all its sequences, cached_tokens of the prompt's."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    draft_tokens: int
    accepted_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds as the client saw them; queue_s is the scheduler's. Values that do not exist yet are None."""

    queue_s: float
    ttft_s: float | None
    total_s: float
    tokens_per_s: float | None  # after the first token


@dataclass(frozen=True, slots=True)
class Output:
    """One finished sequence. The text excludes the stop string or stop token unless they were asked for."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: str
    stop: str | int | None
    cumulative_logprob: float | None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request: its outputs by index."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Output, ...]
    usage: Usage
    timing: Timing
    prompt_logprobs: PromptLogprobs | None

    @property
    def text(self) -> str:
        """The text of the first output."""
        return self.outputs[0].text
