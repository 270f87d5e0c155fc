"""/v1/chat/completions and the tokenizer's endpoints in front of a scripted scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pagedserve.contract.messages import Generate, SequenceTokens, TokenLogprobs, unpack_ids
from tests.api_server import events, http, serving
from tests.fake_scheduler import FakeScheduler, byte_steps

MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
RENDERED = "Be kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def script(message: Generate) -> list[list[SequenceTokens]]:
    """ "Oh!" one byte a step, each with logprob -0.5 if one is asked for."""
    steps = byte_steps(b"Oh!", finish_reason="stop")(message)
    if message.sampling.logprobs is None:
        return steps
    entry = TokenLogprobs(logprob=-0.5, rank=1)
    return [
        [SequenceTokens(**{**{n: getattr(r, n) for n in r.__struct_fields__}, "logprobs": (entry,)}) for r in records]
        for records in steps
    ]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeScheduler, str]]:
    """The scheduler, and the API's address."""
    with FakeScheduler(tmp_path_factory.mktemp("s") / "s", script) as fake, serving(fake.endpoint) as url:
        yield fake, url


@pytest.fixture
def post(server: tuple[FakeScheduler, str]) -> Any:
    """Posts a body; the response."""
    return lambda **body: http.post(f"{server[1]}/v1/chat/completions", json={"messages": MESSAGES, **body})


def last_prompt(server: tuple[FakeScheduler, str]) -> str:
    """The prompt that reached the scheduler, its control tokens by name."""
    names = {256: "<|im_start|>", 257: "<|im_end|>"}
    message = server[0].of_kind(Generate)[-1]
    assert isinstance(message, Generate)
    return "".join(names.get(i) or chr(i) for i in unpack_ids(message.prompt_token_ids).tolist())


def test_the_answer_is_openais_object(post: Any) -> None:
    answer = post().json()
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "object": "chat.completion",
        "model": "demo",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Oh!", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 39,
            "completion_tokens": 3,
            "total_tokens": 42,
            "prompt_tokens_details": {"cached_tokens": 16},
        },
    }


def test_a_stream_begins_with_the_role_and_ends_with_one_finish_reason(post: Any) -> None:
    chunks = events(post(stream=True).text)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "O"},
        {"content": "h"},
        {"content": "!"},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, None, "stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all(chunk["created"] == chunks[0]["created"] and chunk["id"] == chunks[0]["id"] for chunk in chunks)


def test_a_stream_ends_with_its_usage_if_asked(post: Any) -> None:
    *chunks, last = events(post(stream=True, stream_options={"include_usage": True}).text)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 42


def test_n_answers_have_a_role_and_an_end_each(post: Any) -> None:
    choices = [chunk["choices"][0] for chunk in events(post(stream=True, n=2).text)]
    for index in (0, 1):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in own) == "Oh!"
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["stop"]
    assert [choice["message"]["content"] for choice in post(n=2).json()["choices"]] == ["Oh!", "Oh!"]


def test_the_prompt_is_the_models_template(server: tuple[FakeScheduler, str], post: Any) -> None:
    post()
    assert last_prompt(server) == "<|im_start|>system\n" + RENDERED
    post(add_generation_prompt=False)
    assert last_prompt(server).endswith("hi<|im_end|>\n")


def test_content_may_be_text_parts(server: tuple[FakeScheduler, str], post: Any) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    post(messages=[MESSAGES[0], {"role": "user", "content": parts}])
    assert last_prompt(server) == "<|im_start|>system\n" + RENDERED


def test_a_message_cannot_write_control_tokens(server: tuple[FakeScheduler, str], post: Any) -> None:
    post(messages=[{"role": "user", "content": "<|im_end|>"}])
    assert server[0].of_kind(Generate)[-1].prompt_token_ids.count((257).to_bytes(4, "little")) == 1  # type: ignore[attr-defined]


def test_logprobs_have_token_bytes_and_alternatives(post: Any) -> None:
    entry = {"token": "O", "logprob": -0.5, "bytes": [79], "top_logprobs": []}
    content = post(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    assert content[0] == entry
    chunks = events(post(logprobs=True, stream=True).text)
    streamed = [e for chunk in chunks for e in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == content


def test_return_token_ids_gives_the_prompts_once(post: Any) -> None:
    answer = post(return_token_ids=True).json()
    assert answer["choices"][0]["token_ids"] == list(b"Oh!")
    assert len(answer["prompt_token_ids"]) == 39
    chunks = events(post(return_token_ids=True, stream=True).text)
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", ())] == list(b"Oh!")
    assert [len(chunk.get("prompt_token_ids", ())) for chunk in chunks] == [39, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "wizard", "content": "x"}], "messages"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages"),
        ("x", "messages"),
    ],
)
def test_messages_that_cannot_be_read_are_named(post: Any, messages: Any, param: str) -> None:
    response = post(messages=messages)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_tokenize_and_detokenize_are_inverse(server: tuple[FakeScheduler, str]) -> None:
    url = server[1]
    answer = http.post(f"{url}/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
    assert answer == {
        "count": 3,
        "max_model_len": 4096,
        "tokens": [104, 195, 169],
        "token_strs": ["h", "\ufffd", "\ufffd"],
    }
    assert http.post(f"{url}/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "hé"}


def test_tokenizer_info_names_the_ends_of_a_text_or_null(server: tuple[FakeScheduler, str]) -> None:
    assert http.get(f"{server[1]}/tokenizer_info").json() == {
        "tokenizer_class": "Tokenizer",
        "vocab_size": 259,
        "bos_token": None,
        "eos_token": None,
    }


def test_tokenize_applies_the_chat_template(server: tuple[FakeScheduler, str]) -> None:
    answer = http.post(f"{server[1]}/tokenize", json={"messages": MESSAGES}).json()
    text = http.post(f"{server[1]}/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"]
    assert text == "<|im_start|>system\n" + RENDERED


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("detokenize", {"tokens": [259]}, "tokens"),
        ("detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
def test_the_tokenizers_endpoints_refuse_by_field(
    server: tuple[FakeScheduler, str], path: str, body: dict[str, Any], param: str
) -> None:
    response = http.post(f"{server[1]}/{path}", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
