"""The openai package, which nobody here wrote, against a real server: sync, async, streaming, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

MODEL = "demo"
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture
def client(api_url: str) -> Iterator[openai.OpenAI]:
    """The package's client."""
    with openai.OpenAI(base_url=f"{api_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"


def test_a_streamed_completion_is_the_whole_one(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="abc", **GREEDY)  # type: ignore[call-overload]
    assert whole.usage.completion_tokens == 12
    stream = client.completions.create(model=MODEL, prompt="abc", stream=True, **GREEDY)  # type: ignore[call-overload]
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks][-1] == whole.choices[0].finish_reason == "length"


def test_a_streamed_chat_is_the_whole_one(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, **GREEDY)  # type: ignore[call-overload]
    *chunks, last = client.chat.completions.create(  # type: ignore[call-overload]
        model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_the_packages_own_stream_accumulator_understands_us(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], **GREEDY}
    whole = client.chat.completions.create(**options, extra_body={"return_token_ids": True})  # type: ignore[call-overload]
    end = whole.choices[0].token_ids[5]
    with client.chat.completions.stream(**options, logprobs=True, extra_body={"stop_token_ids": [end]}) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.done"} <= kinds
    choice = final.choices[0]
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert len(choice.logprobs.content) == whole.choices[0].token_ids.index(end) + 1
    assert whole.choices[0].message.content.startswith(choice.message.content)


def test_logprobs_and_alternatives_are_read(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=4, **GREEDY
    )  # type: ignore[call-overload]
    for entry in chat.choices[0].logprobs.content:
        assert len(entry.top_logprobs) == 4
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy
        assert entry.bytes is not None and len(entry.bytes) >= 1


def test_n_answers_and_seeds(client: openai.OpenAI) -> None:
    def texts(seed: int) -> list[str]:
        completion = client.completions.create(model=MODEL, prompt="abc", n=3, max_tokens=8, seed=seed)
        return [choice.text for choice in completion.choices]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)
    assert len(set(texts(1))) == 3


def test_the_second_request_has_its_prefix_from_the_cache(client: openai.OpenAI) -> None:
    prompt = "A prompt that is a good deal longer than two blocks of sixteen tokens."
    for cached in (0, 64):
        completion = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1, extra_body={"cache_salt": "t"})
        assert completion.usage is not None and completion.usage.prompt_tokens_details is not None
        assert completion.usage.prompt_tokens_details.cached_tokens == cached


def test_many_async_requests_each_get_their_own_answer(api_url: str) -> None:
    async def run() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{api_url}/v1", api_key="none", max_retries=0) as client:

            async def streamed(prompt: str) -> str:
                stream = await client.completions.create(
                    model=MODEL, prompt=prompt, stream=True, temperature=0, max_tokens=12
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            prompts = [f"prompt {i}" for i in range(16)]
            together = list(await asyncio.gather(*map(streamed, prompts)))
            alone = [await streamed(prompt) for prompt in prompts]
            return together, alone

    together, alone = asyncio.run(run())
    assert together == alone


@pytest.mark.parametrize(
    ("error", "code", "param", "body"),
    [
        (openai.BadRequestError, "invalid_value", "temperature", {"temperature": -1}),
        (openai.BadRequestError, "context_length_exceeded", "messages", {"max_tokens": 5000}),
        (openai.BadRequestError, "invalid_value", "top_logprobs", {"logprobs": True, "top_logprobs": 99}),
        (openai.BadRequestError, "invalid_value", "stop_token_ids", {"extra_body": {"stop_token_ids": [70000]}}),
        (openai.BadRequestError, "invalid_value", "messages", {"messages": []}),
    ],
)
def test_errors_are_the_packages_own(
    client: openai.OpenAI, error: type[openai.APIStatusError], code: str, param: str, body: dict[str, object]
) -> None:
    for stream in (False, True):
        with pytest.raises(error) as caught:
            client.chat.completions.create(  # type: ignore[call-overload]
                **{"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": stream, **body}
            )
        assert (caught.value.code, caught.value.param) == (code, param)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
