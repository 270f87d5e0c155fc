"""What clients send: the bodies of the endpoints, checked for types here and for ranges by SamplingParams.

Unknown fields are ignored, as OpenAI does; a null is a field that is not given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, field_validator

from pagedserve.contract.errors import RequestError
from pagedserve.contract.sampling import SamplingParams
from pagedserve.models.spec import GenerationDefaults

MAX_STOPS = 64
MAX_TOP_LOGPROBS = 20
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, of the older endpoint
_INT32 = 2**31 - 1

# Fields that SamplingParams has under the same name.
_SAME_NAME = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
    "n",
    "best_of",
    "beam_width",
    "length_penalty",
    "early_stopping",
    "prompt_logprobs",
    "num_speculative_tokens",
)
_OF_THE_MODEL = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

Prompt = str | list[int]


def _as_prompts(value: object) -> tuple[Prompt, ...]:
    """One prompt or several, as several."""
    expected = "expected a text, a list of texts, a list of token ids, or a list of such lists"
    if isinstance(value, str):
        return (_text(value),)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{expected}; not empty")
    try:
        if isinstance(value[0], str):
            return tuple(_text(text) for text in msgspec.convert(value, list[str]))
        if isinstance(value[0], list):
            return tuple(msgspec.convert(value, list[list[int]]))
        return (msgspec.convert(value, list[int]),)
    except msgspec.ValidationError as error:
        raise ValueError(f"{expected}: {error}") from None


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text holds half of a surrogate pair") from None
    return text


_PROMPTS_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}
Prompts = Annotated[tuple[Prompt, ...], PlainValidator(_as_prompts), WithJsonSchema(_PROMPTS_SCHEMA)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class StreamOptions(_Body):
    """What a stream tells besides its tokens."""

    include_usage: bool | None = None


class GenerationRequest(_Body):
    """What both generation endpoints take: OpenAI's fields, then vLLM's, then our own."""

    model: str | None = Field(None, description="any name: the server has one model")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    best_of: int | None = None
    use_beam_search: bool | None = Field(None, description="beam search of width beam_width, else best_of, else n")
    top_k: int | None = Field(None, description="0 or -1: off")
    min_p: float | None = None
    repetition_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int | None, Field(ge=-_INT32, le=_INT32)] = Field(None, description="lower runs first")
    cache_salt: str | None = Field(None, description="prefixes are shared among requests with the same one only")
    beam_width: int | None = None
    num_speculative_tokens: int | None = None

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        if isinstance(stop, list) and len(stop) > MAX_STOPS:
            raise ValueError(f"expected at most {MAX_STOPS} stop strings, got {len(stop)}")
        return stop

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, none, one or several."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def _sampling(
        self, defaults: GenerationDefaults, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        """The checked parameters; what the request leaves open is as the model's makers say."""
        values: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": logprobs}
        width = self.beam_width or (self.best_of or self.n or 1 if self.use_beam_search else 1)
        if width > 1:
            values["temperature"] = 0.0
        else:
            values |= {name: value for name in _OF_THE_MODEL if (value := getattr(defaults, name)) is not None}
        values |= {name: value for name in _SAME_NAME if (value := getattr(self, name)) is not None}
        if self.use_beam_search:
            values["beam_width"] = width
            values.pop("best_of", None)
        if self.top_k is not None:
            values["top_k"] = max(0, self.top_k) if self.top_k >= -1 else self.top_k
        if self.stop_token_ids is not None:
            values["stop_token_ids"] = tuple(self.stop_token_ids)
        if self.logit_bias is not None:
            values["logit_bias"] = _biases(self.logit_bias)
        if prompt_logprobs is not None:
            values["prompt_logprobs"] = max(prompt_logprobs, self.prompt_logprobs or 0)
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options: only with stream = true", param="stream_options")
        return SamplingParams(**values).validate()


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = Field(None, description="not supported: it is refused")
    add_special_tokens: bool | None = Field(None, description="begin a text as the model was trained to (default)")

    def sampling(self, defaults: GenerationDefaults) -> SamplingParams:
        """The checked SamplingParams; RequestError names the field that is wrong."""
        if self.suffix:
            raise RequestError("suffix: filling in the middle is not supported", param="suffix")
        max_tokens = _DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return self._sampling(defaults, max_tokens, self.logprobs, self.logprobs if self.echo else None)


class TextPart(_Body):
    """A part of a message's content."""

    type: str
    text: str | None = None


class ChatMessage(_Body):
    """One message of a conversation; further fields reach the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: str | list[TextPart] | None = None


class ChatRequest(GenerationRequest):
    """Body of /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    response_format: dict[str, Any] | None = Field(None, description='only {"type": "text"}')
    tools: list[Any] | None = Field(None, description="not supported: they are refused")
    functions: list[Any] | None = Field(None, description="not supported: they are refused")

    def sampling(self, defaults: GenerationDefaults) -> SamplingParams:
        """The checked SamplingParams; RequestError names the field that is wrong."""
        for name in ("tools", "functions"):
            if getattr(self, name):
                raise RequestError(f"{name}: calling tools is not supported", param=name)
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise RequestError('response_format: only {"type": "text"} is supported', param="response_format")
        if self.top_logprobs is not None:
            if not self.logprobs:
                raise RequestError("top_logprobs: only with logprobs = true", param="top_logprobs")
            if not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
                raise RequestError(
                    f"top_logprobs must be within [0, {MAX_TOP_LOGPROBS}], got {self.top_logprobs}",
                    param="top_logprobs",
                )
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self._sampling(defaults, max_tokens, logprobs, None)


class TokenizeRequest(_Body):
    """Body of /tokenize: a prompt, or the messages of a conversation."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(_Body):
    """Body of /detokenize."""

    tokens: list[int]


def plain_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as a chat template takes them."""
    return [message.model_dump(exclude_unset=True) for message in messages]


def _biases(logit_bias: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token_id): bias for token_id, bias in logit_bias.items()}
    except ValueError:
        raise RequestError("logit_bias: its keys must be token ids", param="logit_bias") from None
