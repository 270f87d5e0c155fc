"""/v1/chat/completions: a conversation in, its next message out; streamed or whole."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from pagedserve.api import answers
from pagedserve.api.answers import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
)
from pagedserve.api.backend import tokenized
from pagedserve.api.generation import Generation
from pagedserve.api.logprobs import chat_logprobs, prompt_logprobs
from pagedserve.api.schemas import ChatRequest, plain_messages
from pagedserve.api.start import Answering, answering, server_of, start
from pagedserve.api.streaming import events, respond
from pagedserve.client import Delta, Output
from pagedserve.text.load import TextModel

router = APIRouter()


@router.post("/v1/chat/completions", summary="Answer a conversation")
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """OpenAI's chat completion, with vLLM's further fields."""
    server = server_of(request)
    text = server.backend.text
    sampling = body.sampling(text.generation)
    prompt = await chat_prompt(text, body)
    stop = (*body.stop_strings, *text.template.stop_strings)
    generation = await start(server, body, [prompt], sampling, stop, "messages")
    writer = _Writer(answering(request, "chatcmpl"), body, prompt, generation, text)
    return await respond(request, generation, writer, stream=bool(body.stream))


async def chat_prompt(text: TextModel, body: ChatRequest) -> list[int]:
    """The token ids of a conversation."""
    messages = plain_messages(body.messages)
    return await tokenized(
        [str(message.get("content")) for message in messages],
        lambda: text.chat_prompt(messages, add_generation_prompt=body.add_generation_prompt is not False),
    )


class _Writer:
    """The answer of one request, as one object or as chunks: the role first, then text, the finish_reason last."""

    def __init__(
        self,
        answer: Answering,
        body: ChatRequest,
        prompt: Sequence[int],
        generation: Generation,
        text: TextModel,
    ) -> None:
        self._answer = answer
        self._body = body
        self._prompt = tuple(prompt)
        self._generation = generation
        self._text = text

    async def whole(self) -> bytes:
        """The answer once everything has ended."""
        (stream,) = self._generation.streams
        completion = await stream.result()
        answer = ChatCompletion(
            id=self._answer.id,
            created=self._answer.created,
            model=self._answer.model,
            choices=[
                ChatChoice(
                    index=output.index,
                    message=AssistantMessage("assistant", output.text),
                    logprobs=self._logprobs(output),
                    finish_reason=output.finish_reason,
                    stop_reason=self._answer.stop_reason(output),
                    token_ids=output.token_ids if self._body.return_token_ids else UNSET,
                )
                for output in completion.outputs
            ],
            usage=self._generation.usage(),
        )
        if self._body.return_token_ids:
            answer.prompt_token_ids = self._prompt
        if self._body.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(
                self._text.tokenizer, self._prompt, completion.prompt_logprobs or ()
            )
        return answers.encode(answer)

    async def bodies(self) -> AsyncIterator[bytes]:
        """The chunks of a stream, as bodies of events."""
        roles = [self._chunk(index, ChatDelta("assistant", "")) for index in range(self._body.n or 1)]
        if self._body.return_token_ids:
            roles[0].prompt_token_ids = self._prompt
        first = events(roles)
        async for _, deltas in self._generation.batches():
            yield first + events(chunk for delta in deltas for chunk in self._chunks(delta))
            first = b""
        if self._body.wants_usage:
            yield events([self._object([], self._generation.usage())])

    def _chunks(self, delta: Delta) -> Iterator[ChatChunk]:
        """What is new of one answer; its end is a chunk of its own."""
        if delta.text or delta.token_ids:
            chunk = self._chunk(delta.index, ChatDelta(content=delta.text))
            chunk.choices[0].logprobs = self._logprobs(delta)
            if self._body.return_token_ids:
                chunk.choices[0].token_ids = delta.token_ids
            yield chunk
        if delta.finish_reason is not None:
            chunk = self._chunk(delta.index, ChatDelta())
            chunk.choices[0].finish_reason = delta.finish_reason
            chunk.choices[0].stop_reason = self._answer.stop_reason(delta)
            yield chunk

    def _chunk(self, index: int, delta: ChatDelta) -> ChatChunk:
        return self._object([ChatChunkChoice(index=index, delta=delta)], None if self._body.wants_usage else UNSET)

    def _object(self, choices: list[ChatChunkChoice], usage: answers.Usage | UnsetType | None) -> ChatChunk:
        answer = self._answer
        return ChatChunk(id=answer.id, created=answer.created, model=answer.model, choices=choices, usage=usage)

    def _logprobs(self, part: Delta | Output) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(self._text.tokenizer, part.token_ids, part.logprobs)
