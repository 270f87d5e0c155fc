"""/v1/completions in front of a scripted scheduler: OpenAI's shapes, to the field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pagedserve.contract.messages import Generate, SequenceTokens, TokenLogprobs, pack_ids, unpack_ids
from tests.api_server import events, http, serving
from tests.fake_scheduler import FakeScheduler, byte_steps

TEXT = "Grüße!"


def script(message: Generate) -> list[list[SequenceTokens]]:
    """TEXT one byte a step, with logprobs -(byte)/8 where they are asked for; a scored prompt has -1 for each token."""
    steps = byte_steps(TEXT.encode()[: message.sampling.max_tokens or None])(message)
    if message.sampling.max_tokens == 0:
        steps = [[SequenceTokens(request_id=message.request_id, finish_reason="length", finished=True)]]
    records = [[with_logprobs(record, message) for record in step] for step in steps]
    if message.sampling.prompt_logprobs is not None:
        num = len(message.prompt_token_ids) // 4
        scored = (None, *[TokenLogprobs(logprob=-1.0, rank=2, **top(120, -0.5)) for _ in range(num - 1)])
        records[0][0] = with_logprobs(records[0][0], message, prompt_logprobs=scored)
    return records


def top(token_id: int, logprob: float) -> dict[str, bytes]:
    """The columns of one likely token."""
    return {"top_token_ids": pack_ids([token_id]), "top_logprobs": np.float32([logprob]).tobytes()}


def with_logprobs(record: SequenceTokens, message: Generate, **changes: Any) -> SequenceTokens:
    """The record with an entry for each token."""
    values = {name: getattr(record, name) for name in record.__struct_fields__} | changes
    if message.sampling.logprobs is not None:
        values["logprobs"] = tuple(
            TokenLogprobs(logprob=-i / 8, rank=1, **top(i, -i / 8)) for i in unpack_ids(record.token_ids).tolist()
        )
    return SequenceTokens(**values)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeScheduler, str]]:
    """The scheduler, and the API's address."""
    with FakeScheduler(tmp_path_factory.mktemp("s") / "s", script) as fake, serving(fake.endpoint) as url:
        yield fake, url


@pytest.fixture
def post(server: tuple[FakeScheduler, str]) -> Any:
    """Posts a body; the response."""
    return lambda **body: http.post(f"{server[1]}/v1/completions", json=body)


def test_the_answer_is_openais_object(post: Any) -> None:
    response = post(prompt="hi", model="any")
    answer = response.json()
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "object": "text_completion",
        "model": "demo",
        "choices": [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "length", "stop_reason": None}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 8,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 16},
        },
    }
    assert response.headers["content-type"] == "application/json"


def test_a_stream_has_a_chunk_for_each_token_one_finish_reason_and_an_end_mark(post: Any) -> None:
    response = post(prompt="hi", stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    chunks = events(response.text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 7 + ["length"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "text_completion" and "usage" not in chunk for chunk in chunks)


def test_include_usage_adds_one_chunk_without_choices_and_nulls_before(post: Any) -> None:
    *chunks, last = events(post(prompt="hi", stream=True, stream_options={"include_usage": True}).text)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 8
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


def test_prompts_of_all_kinds_become_token_ids(server: tuple[FakeScheduler, str], post: Any) -> None:
    before = len(server[0].of_kind(Generate))
    for prompt in ("ab", ["ab", "c"], [97, 98], [[97], [98, 99]]):
        assert post(prompt=prompt).status_code == 200
    sent = [m.prompt_token_ids for m in server[0].of_kind(Generate)[before:] if isinstance(m, Generate)]
    assert [bytes(unpack_ids(ids).tolist()) for ids in sent] == [b"ab", b"ab", b"c", b"ab", b"a", b"bc"]


@pytest.mark.parametrize("stream", [False, True])
def test_choices_count_prompts_first_then_outputs(post: Any, stream: bool) -> None:
    response = post(prompt=["a", "b", "c"], n=2, stream=stream)
    choices = [c for chunk in events(response.text) for c in chunk["choices"]] if stream else response.json()["choices"]
    texts = {index: "".join(c["text"] for c in choices if c["index"] == index) for index in range(6)}
    assert texts == dict.fromkeys(range(6), TEXT)
    assert len(choices) == (6 * 8 if stream else 6)


def test_usage_counts_each_prompt_once_and_every_output(post: Any) -> None:
    assert post(prompt=["abc", "d"], n=2).json()["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 32,
        "total_tokens": 36,
        "prompt_tokens_details": {"cached_tokens": 32},
    }


def test_logprobs_name_tokens_by_text_or_bytes_and_say_where_they_begin(post: Any) -> None:
    (choice,) = post(prompt="hi", logprobs=1).json()["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["G", "r", "bytes:\\xc3", "bytes:\\xbc", "bytes:\\xc3", "bytes:\\x9f", "e", "!"]
    assert logprobs["token_logprobs"] == [-byte / 8 for byte in TEXT.encode()]
    assert logprobs["top_logprobs"][0] == {"G": -71 / 8}
    assert logprobs["text_offset"] == [0, 1, 2, 2, 3, 3, 4, 5]


def test_streamed_logprobs_are_those_of_the_whole(post: Any) -> None:
    whole = post(prompt="hi", logprobs=1, echo=True).json()["choices"][0]["logprobs"]
    parts = [
        chunk["choices"][0]["logprobs"] for chunk in events(post(prompt="hi", logprobs=1, echo=True, stream=True).text)
    ]
    assert {name: [value for part in parts for value in part[name]] for name in whole} == whole


def test_echo_gives_the_prompt_and_its_scores_the_first_of_which_is_null(post: Any) -> None:
    (choice,) = post(prompt="xyz", logprobs=1, echo=True, max_tokens=2).json()["choices"]
    assert choice["text"] == "xyzGr"
    assert choice["logprobs"]["tokens"] == ["x", "y", "z", "G", "r"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0, -71 / 8, -114 / 8]
    assert choice["logprobs"]["top_logprobs"][:2] == [None, {"x": -0.5, "y": -1.0}]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]


def test_max_tokens_0_with_echo_only_scores_the_prompt(post: Any) -> None:
    (choice,) = post(prompt=[120, 121], logprobs=1, echo=True, max_tokens=0).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("xy", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0]


def test_prompt_logprobs_have_vllms_shape(post: Any) -> None:
    (choice,) = post(prompt="ab", prompt_logprobs=1).json()["choices"]
    assert choice["prompt_logprobs"] == [
        None,
        {
            "98": {"logprob": -1.0, "rank": 2, "decoded_token": "b"},
            "120": {"logprob": -0.5, "rank": 1, "decoded_token": "x"},
        },
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_return_token_ids_gives_the_ids_of_prompt_and_output(post: Any, stream: bool) -> None:
    response = post(prompt="ab", return_token_ids=True, stream=stream)
    choices = [c for chunk in events(response.text) for c in chunk["choices"]] if stream else response.json()["choices"]
    assert [i for choice in choices for i in choice["token_ids"]] == list(TEXT.encode())
    assert [choice.get("prompt_token_ids") for choice in choices] == [[97, 98]] + [None] * (len(choices) - 1)


def test_a_stop_string_ends_the_text_and_is_named(post: Any) -> None:
    (choice,) = post(prompt="hi", stop=["üß"]).json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Gr", "stop", "üß")
    (choice,) = post(prompt="hi", stop="üß", include_stop_str_in_output=True).json()["choices"]
    assert choice["text"] == "Grüß"


def test_priority_and_salt_travel_with_the_request(server: tuple[FakeScheduler, str], post: Any) -> None:
    post(prompt="hi", priority=-3, cache_salt="mine")
    message = server[0].of_kind(Generate)[-1]
    assert isinstance(message, Generate)
    assert (message.priority, message.cache_salt) == (-3, "mine")
