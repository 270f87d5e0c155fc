"""/v1/completions: prompts in, continuations out; streamed or whole."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from pagedserve.api import answers
from pagedserve.api.answers import CompletionChoice, CompletionLogprobs, TextCompletion
from pagedserve.api.backend import tokenized
from pagedserve.api.generation import Generation
from pagedserve.api.logprobs import CompletionLogprobsWriter, prompt_logprobs
from pagedserve.api.schemas import CompletionRequest, Prompt
from pagedserve.api.start import Answering, answering, server_of, start
from pagedserve.api.streaming import events, respond
from pagedserve.client import Delta, Output
from pagedserve.text.load import TextModel

router = APIRouter()


@router.post("/v1/completions", summary="Continue prompts")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """OpenAI's text completion, with vLLM's further fields."""
    server = server_of(request)
    text = server.backend.text
    sampling = body.sampling(text.generation)
    prompts = await tokenized(
        [prompt for prompt in body.prompt if isinstance(prompt, str)],
        lambda: [_token_ids(text, prompt, body.add_special_tokens is not False) for prompt in body.prompt],
    )
    generation = await start(server, body, prompts, sampling, body.stop_strings, "prompt")
    writer = _Writer(answering(request, "cmpl"), body, prompts, generation, text)
    return await respond(request, generation, writer, stream=bool(body.stream))


def _token_ids(text: TextModel, prompt: Prompt, add_special_tokens: bool) -> list[int]:
    if isinstance(prompt, str):
        return text.prompt(prompt) if add_special_tokens else text.tokenizer.encode(prompt)
    return prompt


class _Writer:
    """The answer of one request, as one object or as chunks. Output index of a prompt is choice prompt * n + index."""

    def __init__(
        self,
        answer: Answering,
        body: CompletionRequest,
        prompts: Sequence[Sequence[int]],
        generation: Generation,
        text: TextModel,
    ) -> None:
        self._answer = answer
        self._body = body
        self._prompts = prompts
        self._generation = generation
        self._text = text
        self._n = body.n or 1
        self._logprobs = [CompletionLogprobsWriter(text.tokenizer) for _ in range(len(prompts) * self._n)]
        self._begun: set[int] = set()

    async def whole(self) -> bytes:
        """The answer once everything has ended."""
        choices = []
        for prompt, stream in enumerate(self._generation.streams):
            completion = await stream.result()
            choices += [self._choice(prompt, output) for output in completion.outputs]
        return answers.encode(self._object(choices, self._generation.usage()))

    async def bodies(self) -> AsyncIterator[bytes]:
        """The chunks of a stream, as bodies of events."""
        usage = None if self._body.wants_usage else UNSET
        async for prompt, deltas in self._generation.batches():
            yield events(self._object([self._choice(prompt, delta)], usage) for delta in deltas)
        if self._body.wants_usage:
            yield events([self._object([], self._generation.usage())])

    def _object(self, choices: list[CompletionChoice], usage: answers.Usage | UnsetType | None) -> TextCompletion:
        answer = self._answer
        return TextCompletion(id=answer.id, created=answer.created, model=answer.model, choices=choices, usage=usage)

    def _choice(self, prompt: int, part: Delta | Output) -> CompletionChoice:
        """An output, or what is new of one; the first part of an output also has what belongs to its prompt."""
        choice = CompletionChoice(
            index=prompt * self._n + part.index,
            text=part.text,
            finish_reason=part.finish_reason,
            stop_reason=self._answer.stop_reason(part),
        )
        is_first = choice.index not in self._begun
        self._begun.add(choice.index)
        if is_first and self._body.echo:
            choice.text = self._prompt_text(prompt) + choice.text
        if self._body.logprobs is not None:
            choice.logprobs = self._choice_logprobs(prompt, choice.index, part, is_first and bool(self._body.echo))
        if is_first and self._body.prompt_logprobs is not None:
            entries = self._generation.streams[prompt].prompt_logprobs or ()
            choice.prompt_logprobs = prompt_logprobs(self._text.tokenizer, self._prompts[prompt], entries)
        if self._body.return_token_ids:
            choice.token_ids = part.token_ids
            if is_first:
                choice.prompt_token_ids = tuple(self._prompts[prompt])
        return choice

    def _choice_logprobs(self, prompt: int, index: int, part: Delta | Output, with_prompt: bool) -> CompletionLogprobs:
        if not with_prompt:
            return self._logprobs[index].take(part.token_ids, part.logprobs)
        entries = self._generation.streams[prompt].prompt_logprobs or ()
        return self._logprobs[index].take((*self._prompts[prompt], *part.token_ids), (*entries, *part.logprobs))

    def _prompt_text(self, prompt: int) -> str:
        given = self._body.prompt[prompt]
        if isinstance(given, str):
            return given
        return self._text.tokenizer.decode(given, skip_special_tokens=self._body.skip_special_tokens is not False)
