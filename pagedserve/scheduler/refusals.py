"""What is refused when it arrives: every RequestError of the scheduler, so that whatever is accepted can be served."""

from __future__ import annotations

from pagedserve.contract.errors import ProtocolError, RequestError
from pagedserve.contract.messages import Generate, Int32, unpack_ids
from pagedserve.contract.sampling import SamplingParams
from pagedserve.scheduler.limits import Limits


def check_generate(message: Generate, limits: Limits) -> Int32:
    """The prompt of a request that can be served; RequestError says why another cannot, with both numbers."""
    sampling = message.sampling.validate()
    prompt = _check_prompt(message, limits)
    _check_ids("stop_token_ids", sampling.stop_token_ids, limits)
    _check_ids("logit_bias", tuple(sampling.logit_bias), limits)
    _check_combinations(sampling, limits)
    _check_length(sampling, len(prompt), limits)
    return prompt


def check_queue(num_waiting: int, limits: Limits) -> None:
    """RequestError when one more request would be one too many."""
    if num_waiting >= limits.max_waiting:
        raise RequestError(
            f"the queue is full: {num_waiting} sequences wait, at most {limits.max_waiting} may; try again later",
            code="queue_full",
        )


def _check_prompt(message: Generate, limits: Limits) -> Int32:
    try:
        prompt = unpack_ids(message.prompt_token_ids)
    except ProtocolError as error:
        raise RequestError(f"prompt_token_ids: {error}", param="prompt_token_ids") from None
    if len(prompt) == 0:
        raise RequestError("prompt_token_ids: expected at least one token", param="prompt_token_ids")
    if int(prompt.min()) < 0 or int(prompt.max()) >= limits.vocab_size:
        wrong = int(prompt[(prompt < 0) | (prompt >= limits.vocab_size)][0])
        raise RequestError(
            f"prompt_token_ids must be within [0, {limits.vocab_size - 1}], got {wrong}", param="prompt_token_ids"
        )
    return prompt


def _check_ids(name: str, token_ids: tuple[int, ...], limits: Limits) -> None:
    for token_id in token_ids:
        if token_id >= limits.vocab_size:
            raise RequestError(f"{name} must be within [0, {limits.vocab_size - 1}], got {token_id}", param=name)


def _check_combinations(sampling: SamplingParams, limits: Limits) -> None:
    for name in ("n", "best_of", "beam_width"):
        value = getattr(sampling, name)
        if value is not None and value > limits.max_num_seqs:
            raise RequestError(f"{name} must be at most max_num_seqs ({limits.max_num_seqs}), got {value}", param=name)
    if sampling.beam_width == 1:
        return
    neutral = SamplingParams()
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"):
        if getattr(sampling, name) != getattr(neutral, name):
            raise RequestError(f"{name} cannot be combined with beam_width > 1", param=name)
    if 2 * sampling.beam_width > limits.vocab_size:
        raise RequestError(
            f"beam_width must be at most half the vocabulary ({limits.vocab_size}), got {sampling.beam_width}",
            param="beam_width",
        )
    num_stops = len({*sampling.stop_token_ids, *limits.eos_token_ids})
    if sampling.min_tokens and num_stops >= 2 * sampling.beam_width:
        raise RequestError(
            f"min_tokens with beam_width {sampling.beam_width} allows at most {2 * sampling.beam_width - 1} stop "
            f"tokens, got {num_stops}: a beam goes on with one of its 2 * beam_width likeliest tokens",
            param="min_tokens",
        )


def _check_length(sampling: SamplingParams, num_prompt_tokens: int, limits: Limits) -> None:
    """A prompt may fill the context only when no output is asked."""
    max_tokens = 1 if sampling.max_tokens is None else sampling.max_tokens
    if num_prompt_tokens + max_tokens > limits.max_model_len:
        asked = f"{num_prompt_tokens} tokens of prompt"
        if sampling.max_tokens is not None:
            asked += f" and {sampling.max_tokens} of max_tokens"
        raise RequestError(
            f"the model's context is {limits.max_model_len} tokens, but {num_prompt_tokens + max_tokens} are needed: "
            f"{asked}" + ("" if sampling.max_tokens is not None else " and at least one of output"),
            code="context_length_exceeded",
            param="prompt_token_ids",
        )
    num_stored_tokens = max(num_prompt_tokens, num_prompt_tokens + max_tokens - 1)  # the last needs no K and V
    num_blocks = limits.max_blocks_at_once(num_stored_tokens)
    if num_blocks > limits.num_blocks:
        raise RequestError(
            f"the pool has {limits.num_blocks} blocks of {limits.block_size} tokens, but this request needs "
            f"{num_blocks} for {num_stored_tokens} tokens",
            code="pool_exceeded",
            param="prompt_token_ids",
        )
