"""From a request's prompts to running streams: the length check and the client's calls. Makes no answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastapi import Request

from pagedserve.api.backend import Backend
from pagedserve.api.generation import Generation
from pagedserve.api.metrics import Metrics
from pagedserve.api.schemas import GenerationRequest
from pagedserve.client import AsyncStream, Delta, Output
from pagedserve.contract.errors import RequestError
from pagedserve.contract.sampling import SamplingParams

MAX_PROMPTS = 2048


@dataclass(frozen=True)
class Server:
    """What the endpoints share; app.state.server."""

    backend: Backend
    metrics: Metrics
    timeout_s: float


def server_of(request: Request) -> Server:
    """The server that a request came to."""
    server = request.app.state.server
    assert isinstance(server, Server)
    return server


@dataclass(frozen=True)
class Answering:
    """What all parts of one answer repeat."""

    id: str
    model: str
    eos_token_ids: tuple[int, ...]
    created: int = field(default_factory=lambda: int(time.time()))

    def stop_reason(self, part: Delta | Output) -> str | int | None:
        """The stop string or token that ended an output; None for the model's own end of text, as in vLLM."""
        return None if part.stop in self.eos_token_ids else part.stop


def answering(request: Request, prefix: str) -> Answering:
    """The names of a new answer; its id is made of the request's X-Request-Id."""
    model = server_of(request).backend.client.model
    return Answering(f"{prefix}-{request.state.request_id}", model.name, model.eos_token_ids)


async def start(
    server: Server,
    body: GenerationRequest,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    stop: Sequence[str],
    field_name: str,
) -> Generation:
    """Start one stream for each prompt. RequestError, naming `field_name` for what is wrong with a prompt."""
    client = server.backend.client
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(
            f"{field_name}: at most {MAX_PROMPTS} prompts in one request, got {len(prompts)}", param=field_name
        )
    for prompt in prompts:
        _check_length(len(prompt), sampling, client.model.max_model_len, field_name)
    streams: list[AsyncStream] = []
    try:
        for prompt in prompts:
            stream = await client.generate(
                prompt,
                sampling=sampling,
                stop=stop,
                include_stop_str=bool(body.include_stop_str_in_output),
                skip_special_tokens=body.skip_special_tokens is not False,
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
            )
            streams.append(stream)
    except BaseException:
        for stream in streams:
            stream.abort()
        raise
    return Generation(streams, server.metrics.of_requests(client.model.name), server.timeout_s, field_name)


def _check_length(num_prompt_tokens: int, sampling: SamplingParams, max_model_len: int, field_name: str) -> None:
    """Here, so that a prompt of a million tokens is not sent to the scheduler to be refused there."""
    if num_prompt_tokens == 0:
        raise RequestError(f"{field_name}: expected at least one token", param=field_name)
    max_tokens = 1 if sampling.max_tokens is None else sampling.max_tokens
    if num_prompt_tokens + max_tokens > max_model_len:
        output = f"{max_tokens} in the output" if sampling.max_tokens is not None else "at least one in the output"
        raise RequestError(
            f"This model's maximum context length is {max_model_len} tokens, but {num_prompt_tokens + max_tokens} were "
            f"requested ({num_prompt_tokens} in the {field_name}, {output}). Please reduce their number.",
            code="context_length_exceeded",
            param=field_name,
        )
