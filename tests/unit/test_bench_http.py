"""The benchmark's HTTP client against servers that cut their answers in every way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from bench.http_target import HttpTarget
from bench.measures import RequestTimes

_EVENTS = [
    {"choices": [{"text": "He"}]},
    {"choices": [{"text": "llo"}]},
    {
        "choices": [],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}},
    },
]


def _stream(events: Sequence[Any]) -> bytes:
    return b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"


class _Server:
    """Answers each request with the next of some raw answers; keeps the requests."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []

    async def __aenter__(self) -> _Server:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
        self.requests.append(head + await reader.readexactly(length))
        writer.write(self.answers.pop(0))
        writer.close()


def _plain(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode() + body


def _chunked(body: bytes, size: int) -> bytes:
    pieces = [body[i : i + size] for i in range(0, len(body), size)] + [b""]
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(
        b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces
    )


_MODELS = _plain(b'{"data": [{"id": "small"}]}')


def _complete(*answers: bytes, path: str = "", **options: Any) -> tuple[RequestTimes, list[bytes]]:
    async def run() -> tuple[RequestTimes, list[bytes]]:
        async with _Server(_MODELS, *answers) as server:
            target = HttpTarget(server.url + path, **options)
            await target.connect()
            request = RequestTimes(0.0, 3)
            await target.complete([1, 2, 3], 5, request)
            return request, server.requests

    return asyncio.run(run())


@pytest.mark.parametrize("answer", [_plain(_stream(_EVENTS)), *(_chunked(_stream(_EVENTS), n) for n in (1, 7, 4096))])
def test_an_answer_is_read_however_it_is_cut(answer: bytes) -> None:
    request, _ = _complete(answer)
    assert len(request.arrivals_s) == 2
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_cached_tokens) == (3, 4, 2)


def test_without_usage_pieces_count_as_tokens() -> None:
    request, _ = _complete(_plain(_stream(_EVENTS[:2])))
    assert request.num_output_tokens == 2


def test_a_request_names_the_model_and_carries_extra_fields_and_the_key() -> None:
    _, (first, second) = _complete(
        _plain(_stream(_EVENTS)), path="/base/v1", api_key="secret", extra_body={"cache_prompt": False}
    )
    assert first.startswith(b"GET /base/v1/models HTTP/1.1\r\n")
    head, body = second.split(b"\r\n\r\n")
    assert head.startswith(b"POST /base/v1/completions HTTP/1.1\r\n")
    assert b"Authorization: Bearer secret" in head
    assert json.loads(body) == {
        "model": "small",
        "prompt": [1, 2, 3],
        "max_tokens": 5,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_prompt": False,
    }


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (_plain(b'{"error": "too long"}', "400 Bad Request"), "too long"),
        (_plain(_stream([{"choices": [], "error": {"message": "engine died"}}])), "engine died"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\ndata", "closed the connection"),
    ],
)
def test_an_error_is_told_in_the_servers_words(answer: bytes, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        _complete(answer)
