"""SamplingParams: how a request's tokens are chosen. Token ids only; stop strings belong to the text side."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from pagedserve.contract.errors import RequestError

MAX_LOGPROBS = 64
MAX_N = 64


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How to choose a request's tokens; checked by `validate`, which names the field that is wrong.

    The order of operations on a row of raw logits is: repetition, presence and frequency penalties (over prompt and
    output tokens for the first, output tokens for the others), logit_bias and banned ids, temperature, top_k, top_p,
    min_p, then one draw from a random number that is a function of (seed, index, position). temperature 0 is greedy:
    the largest logit after penalties and bias, the lowest id among equals.

    Fields: temperature >= 0; top_k 0 (off) or more; 0 < top_p <= 1; 0 <= min_p <= 1; repetition_penalty > 0;
    presence_penalty and frequency_penalty within -2..2; logit_bias {token id: -100..100}; seed (None: one is drawn at
    the client); max_tokens >= 0 (None: until the context is full; 0 only scores the prompt); min_tokens <= max_tokens;
    stop_token_ids end the output and are kept in it; ignore_eos; n outputs of the best of `best_of` by mean logprob;
    beam_width > 1 selects beam search with length_penalty and early_stopping (then temperature must be 0); logprobs k:
    the k most likely alternatives of each output token, from raw logits, plus the chosen one; prompt_logprobs the same
    for the prompt; num_speculative_tokens > 0 turns prompt-lookup speculation on for this request (None: the server's
    default).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    best_of: int | None = None
    beam_width: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_speculative_tokens: int | None = None

    def validate(self) -> SamplingParams:
        """Return self; RequestError naming the first field out of range otherwise."""
        _check("temperature", self.temperature, 0.0, 100.0)
        _check("top_k", self.top_k, 0, 2**31 - 1)
        _check("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token_id, bias in self.logit_bias.items():
            if token_id < 0:
                raise RequestError(f"logit_bias: token ids are 0 or more, got {token_id}", param="logit_bias")
            _check("logit_bias", bias, -100.0, 100.0)
        if self.seed is not None:
            _check("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _check("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _check("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}", param="min_tokens"
            )
        for token_id in self.stop_token_ids:
            _check("stop_token_ids", token_id, 0, 2**31 - 1)
        _check("n", self.n, 1, MAX_N)
        if self.best_of is not None:
            _check("best_of", self.best_of, self.n, MAX_N)
        _check("beam_width", self.beam_width, 1, MAX_LOGPROBS // 2)
        if self.beam_width > 1:
            if self.temperature != 0.0:
                raise RequestError(
                    f"temperature must be 0 with beam_width > 1, got {self.temperature}", param="temperature"
                )
            if self.n > self.beam_width:
                raise RequestError(f"n must be at most beam_width ({self.beam_width}), got {self.n}", param="n")
            if self.best_of is not None:
                raise RequestError("best_of cannot be combined with beam_width > 1", param="best_of")
        _check("length_penalty", self.length_penalty, -10.0, 10.0)
        if self.logprobs is not None:
            _check("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.num_speculative_tokens is not None:
            _check("num_speculative_tokens", self.num_speculative_tokens, 0, 16)
        return self


def sampling_params(values: dict[str, Any]) -> SamplingParams:
    """Build checked SamplingParams from a mapping; RequestError names an unknown or wrong field."""
    known = SamplingParams.__struct_fields__
    for name in values:
        if name not in known:
            raise RequestError(f"{name}: unknown sampling parameter, expected one of {', '.join(known)}", param=name)
    for name, value in values.items():
        try:
            msgspec.convert({name: value}, SamplingParams)
        except msgspec.ValidationError as error:
            raise RequestError(f"{name}: {error}".replace(f" - at `$.{name}`", ""), param=name) from None
    return msgspec.convert(values, SamplingParams).validate()


def _check(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    inside = low < value if open_low else low <= value
    if not (math.isfinite(value) and inside and value <= high):
        raise RequestError(
            f"{name} must be within {'(' if open_low else '['}{low}, {high}], got {value}", param=name
        )
