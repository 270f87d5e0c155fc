"""Request and Sequence: what a client asked for, and the lines of tokens that answer it. State only; no decisions.

A request has one sequence per output (n, best_of, beams); before its prompt is computed it has one for all of them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pagedserve.contract.messages import Generate, Int32, TokenLogprobs
from pagedserve.contract.sampling import SamplingParams
from pagedserve.scheduler.column import Int32Column
from pagedserve.scheduler.limits import Limits

if TYPE_CHECKING:
    from pagedserve.scheduler.beam import BeamSearch

_MASK = 2**64 - 1


class State(Enum):
    """Where a sequence is. WAITING → RUNNING → FINISHED; preemption leads from RUNNING back to WAITING."""

    WAITING = "waiting"  # in the queue, holds no blocks
    RUNNING = "running"  # holds blocks
    PARKED = "parked"  # preempted with nothing left to compute until its sibling beams have caught up; in no queue
    FINISHED = "finished"  # its request needs it no more; it holds blocks only while steps with it are in flight


@dataclass(slots=True, eq=False)
class Sequence:
    """One line of tokens and the blocks that hold its K and V.

    The next step computes tokens[num_computed_tokens:]; positions below num_computed_tokens are in `table`'s blocks.
    """

    request: Request
    index: int
    seed: int
    tokens: Int32Column
    table: Int32Column = field(default_factory=Int32Column)  # block ids; -1 where a sliding window has left the block
    state: State = State.WAITING
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)  # of the leading full blocks of tokens, computed or not
    num_published_blocks: int = 0  # leading blocks that the prefix cache knows
    num_left_blocks: int = 0  # leading blocks that the sliding window has left
    num_steps_in_flight: int = 0  # steps with it that have not been answered
    num_preemptions: int = 0
    num_bypasses: int = 0  # later requests that were admitted while this one did not fit
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of its output, kept when the request holds its output
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_token_id: int | None = None
    candidates: TokenLogprobs | None = None  # a beam's most likely next tokens, while its siblings are computed
    num_draft_tokens: int = 0  # not reported yet
    num_accepted_tokens: int = 0  # not reported yet

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt's and the output's."""
        return self.tokens.length

    @property
    def num_output_tokens(self) -> int:
        """Known tokens after the prompt."""
        return self.tokens.length - self.request.num_prompt_tokens

    @property
    def num_behind(self) -> int:
        """Known tokens that are still to be computed; 0 for a beam that waits for its siblings."""
        return 0 if self.candidates is not None else self.tokens.length - self.num_computed_tokens

    @property
    def order(self) -> tuple[int, int, int]:
        """Who comes first: priority, then arrival, then index. The last of the running is the first to give way."""
        return (self.request.priority, self.request.arrival, self.index)

    @property
    def num_seats(self) -> int:
        """Of max_num_seqs, how many this sequence takes: its request's all until they have parted."""
        return 1 if self.request.has_parted else self.request.num_sequences

    def output_token_ids(self) -> Int32:
        """The tokens after the prompt."""
        return self.tokens.view(self.request.num_prompt_tokens)


@dataclass(slots=True, eq=False)
class Request:
    """What a client asked for, with everything that is the same for all its sequences and steps worked out once."""

    client: bytes
    request_id: str
    sampling: SamplingParams
    priority: int
    cache_salt: str
    arrival: int  # number of this request among all
    added_at: float
    num_prompt_tokens: int
    max_num_tokens: int  # prompt and output
    num_draft_tokens: int  # speculation: drafts a step
    stop_token_ids: frozenset[int]  # end-of-sequence tokens included unless ignored
    num_logprobs: int  # of each sampled row: -1 none, else the top k and the sampled token's own
    row_numbers: tuple[float, ...]  # temperature to frequency_penalty of its SAMPLE_ROWs
    num_prompt_logprobs: int  # -1: none asked
    banned_token_ids: Int32  # until min_tokens are there
    bias_token_ids: Int32
    bias_values: npt.NDArray[np.float32]
    sequences: list[Sequence] = field(default_factory=list)
    has_parted: bool = False  # one sequence for each output (from the start, if there is one output)
    beam: BeamSearch | None = None
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    num_cached_tokens: int = 0
    first_scheduled_at: float | None = None
    is_reported: bool = False  # a first record has gone to the client
    is_over: bool = False

    @property
    def num_sequences(self) -> int:
        """Outputs that are computed (n of them are given to the client)."""
        sampling = self.sampling
        return sampling.beam_width if sampling.beam_width > 1 else sampling.best_of or sampling.n

    @property
    def holds_output(self) -> bool:
        """Whether nothing may be sent before all sequences have ended: the best are chosen then."""
        return self.sampling.beam_width > 1 or self.num_sequences > self.sampling.n

    @property
    def needs_history(self) -> bool:
        """Whether penalties need to see earlier tokens."""
        s = self.sampling
        return s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether logprobs of the prompt are still to be computed: such a prompt cannot come from the cache."""
        return self.num_prompt_logprobs >= 0 and len(self.prompt_logprobs) < self.num_prompt_tokens


def new_request(
    client: bytes, message: Generate, prompt_token_ids: Int32, limits: Limits, arrival: int, now: float
) -> Request:
    """A request with its one sequence, from a message that `refusals.check_generate` has let pass."""
    sampling = message.sampling
    num_prompt_tokens = len(prompt_token_ids)
    max_num_tokens = most_tokens(sampling, num_prompt_tokens, limits)
    stop_token_ids = frozenset(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stop_token_ids |= frozenset(limits.eos_token_ids)
    drafts = sampling.num_speculative_tokens
    request = Request(
        client=client,
        request_id=message.request_id,
        sampling=sampling,
        priority=message.priority,
        cache_salt=message.cache_salt,
        arrival=arrival,
        added_at=now,
        num_prompt_tokens=num_prompt_tokens,
        max_num_tokens=max_num_tokens,
        num_draft_tokens=limits.num_speculative_tokens if drafts is None else drafts,
        stop_token_ids=stop_token_ids,
        num_logprobs=_num_logprobs(sampling),
        row_numbers=_row_numbers(sampling),
        num_prompt_logprobs=-1 if sampling.prompt_logprobs is None else sampling.prompt_logprobs,
        banned_token_ids=np.array(sorted(stop_token_ids) if sampling.min_tokens else [], dtype=np.int32),
        bias_token_ids=np.array(list(sampling.logit_bias), dtype=np.int32),
        bias_values=np.array(list(sampling.logit_bias.values()), dtype=np.float32),
    )
    seed = sampling.seed if sampling.seed is not None else _seed_of_name(message.request_id)
    request.sequences.append(Sequence(request, 0, seed & _MASK, Int32Column(prompt_token_ids)))
    request.has_parted = request.num_sequences == 1
    if request.num_prompt_logprobs >= 0:
        request.prompt_logprobs.append(None)  # nothing precedes the first token
    return request


def most_tokens(sampling: SamplingParams, num_prompt_tokens: int, limits: Limits) -> int:
    """Length at which a sequence ends: by max_tokens; without it, where the context or the whole pool is full."""
    if sampling.max_tokens is not None:
        return num_prompt_tokens + sampling.max_tokens
    if limits.max_blocks_at_once(limits.max_model_len) <= limits.num_blocks:
        return limits.max_model_len
    return min(limits.max_model_len, limits.num_blocks * limits.block_size + 1)  # the last token needs no K and V


def sequence_seed(seed: int, index: int) -> int:
    """The seed of output `index`: the request's own for 0, else mixed with the index (splitmix64)."""
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _seed_of_name(request_id: str) -> int:
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "little")


def _num_logprobs(sampling: SamplingParams) -> int:
    asked = -1 if sampling.logprobs is None else sampling.logprobs
    if sampling.beam_width > 1:
        return max(asked, 2 * sampling.beam_width)
    if (sampling.best_of or sampling.n) > sampling.n:
        return max(asked, 0)  # the choice of the best needs the chosen tokens' logprobs
    return asked


def _row_numbers(sampling: SamplingParams) -> tuple[float, ...]:
    return (
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
    )
