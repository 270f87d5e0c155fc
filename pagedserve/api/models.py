"""The small endpoints: the model, its tokenizer, the server's health, version, metrics and live state."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

import pagedserve
from pagedserve.api.backend import tokenized
from pagedserve.api.errors import HttpError, error_response
from pagedserve.api.metrics import CONTENT_TYPE
from pagedserve.api.schemas import DetokenizeRequest, TokenizeRequest, plain_messages
from pagedserve.api.start import server_of
from pagedserve.contract.errors import RequestError, ServerUnavailableError
from pagedserve.contract.messages import ModelInfo

router = APIRouter()


@router.get("/v1/models", summary="The model that is served")
async def list_models(request: Request) -> dict[str, Any]:
    """A list of one."""
    return {"object": "list", "data": [_card(request, server_of(request).backend.client.model)]}


@router.get("/v1/models/{name:path}", summary="The model, by name")
async def get_model(name: str, request: Request) -> dict[str, Any]:
    """The model's card, or 404."""
    model = server_of(request).backend.client.model
    if name != model.name:
        raise HttpError(404, "model_not_found", f"the model {name!r} is not here, {model.name!r} is", param="model")
    return _card(request, model)


@router.post("/tokenize", summary="Text to token ids")
async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
    """The ids of a prompt, or of a conversation by the chat template."""
    server = server_of(request)
    text, model = server.backend.text, server.backend.client.model
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("prompt: expected either prompt or messages", param="prompt")
    if body.messages is not None:
        messages = plain_messages(body.messages)
        ids = await tokenized(
            [str(message.get("content")) for message in messages],
            lambda: text.chat_prompt(messages, add_generation_prompt=body.add_generation_prompt),
        )
    else:
        prompt = body.prompt or ""
        encode = text.prompt if body.add_special_tokens else text.tokenizer.encode
        ids = await tokenized([prompt], lambda: encode(prompt))
    answer = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [text.tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    return answer


@router.post("/detokenize", summary="Token ids to text")
async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, Any]:
    """The text of token ids, control tokens by their names."""
    text = server_of(request).backend.text
    vocab_size = text.tokenizer.vocab_size
    if any(not 0 <= token_id < vocab_size for token_id in body.tokens):
        raise RequestError(f"tokens: expected token ids from 0 to {vocab_size - 1}", param="tokens")
    return {"prompt": text.tokenizer.decode(body.tokens, skip_special_tokens=False)}


@router.get("/tokenizer_info", summary="What clients ask of a tokenizer")
async def tokenizer_info(request: Request) -> dict[str, Any]:
    """The texts of the tokens that begin and end a text, or null, in vLLM's shape."""
    tokenizer = server_of(request).backend.text.tokenizer

    def name(token_id: int | None) -> str | None:
        if token_id is None:
            return None
        return tokenizer.token_bytes(token_id, skip_special_tokens=False).decode(errors="replace")

    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": tokenizer.vocab_size,
        "bos_token": name(tokenizer.bos_token_id),
        "eos_token": name(tokenizer.eos_token_id),
    }


@router.get("/health", summary="200 when requests are served, else 503")
async def health(request: Request) -> Response:
    """No body when all is well."""
    if await server_of(request).backend.ready():
        return Response(status_code=200)
    return error_response(HttpError(503, "unavailable", "the team of workers cannot serve now"))


@router.get("/version", summary="The version of PagedServe")
async def version() -> dict[str, str]:
    """In vLLM's shape."""
    return {"version": pagedserve.__version__}


@router.get("/metrics", summary="Figures for Prometheus")
async def metrics(request: Request) -> Response:
    """Names and meanings are vLLM's."""
    server = server_of(request)
    try:
        status = await server.backend.status()
    except ServerUnavailableError:
        status = None
    return Response(server.metrics.render(status), media_type=CONTENT_TYPE)


@router.get("/status", summary="The server at this moment")
async def status(request: Request, blocks: bool = False, since: float = 0.0) -> Response:
    """The scheduler's own account; with `blocks` a digit for each block of the pool: 0 free, 1 cached, 2 private,
    3 shared. `ttft` are [Unix time, seconds] of the requests through HTTP after `since`."""
    server = server_of(request)
    now = await server.backend.status(blocks=blocks)
    values = msgspec.to_builtins(now, builtin_types=(bytes,))
    values["block_states"] = bytes(state + ord("0") for state in now.block_states).decode()
    values["ttft"] = [sample for sample in server.metrics.recent_ttft if sample[0] > since]
    return Response(msgspec.json.encode(values), media_type="application/json")


def _card(request: Request, model: ModelInfo) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": request.app.state.created,
        "owned_by": "pagedserve",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
    }
