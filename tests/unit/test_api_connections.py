"""Clients that go away, clients that read slowly, schedulers that come and go."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from pagedserve.api.backend import tokenized
from pagedserve.contract.messages import Abort, Generate, SequenceTokens
from tests.api_server import events, http, serving
from tests.fake_scheduler import FakeScheduler, byte_steps
from tests.server import eventually


def send(url: str, body: dict[str, object], receive_buffer_bytes: int = 65536) -> socket.socket:
    """A connection over which a completion was asked for."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    connection.connect((host, int(port)))
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_client_that_goes_away_has_its_request_aborted_within_a_second(
    tmp_path: Path, stream: bool, num_steps: int
) -> None:
    with (
        FakeScheduler(tmp_path / "s", byte_steps(b"abcd"), hold_after=num_steps) as scheduler,
        serving(scheduler.endpoint) as url,
    ):
        connection = send(url, {"prompt": ["a", "b"], "stream": stream})
        assert eventually(lambda: len(scheduler.of_kind(Generate)) == 2, 5)
        time.sleep(0.1)
        assert scheduler.of_kind(Abort) == []
        connection.close()
        assert eventually(lambda: len(scheduler.of_kind(Abort)) == 2, 1.0)


def test_a_request_that_ends_by_itself_is_not_aborted(tmp_path: Path) -> None:
    with FakeScheduler(tmp_path / "s", byte_steps(b"abcd")) as scheduler, serving(scheduler.endpoint) as url:
        for stream in (False, True):
            assert http.post(f"{url}/v1/completions", json={"prompt": "a", "stream": stream}).status_code == 200
        assert scheduler.of_kind(Abort) == []


def test_a_reader_who_stands_still_holds_up_nobody(tmp_path: Path) -> None:
    """Its events fill every buffer on the way; another stream goes through meanwhile."""

    def script(message: Generate) -> list[list[SequenceTokens]]:
        return byte_steps(b"x" * (3000 if message.sampling.n == 2 else 20))(message)

    with (
        FakeScheduler(tmp_path / "s", script) as scheduler,
        serving(scheduler.endpoint, send_buffer_bytes=4096) as url,
    ):
        lazy = send(url, {"prompt": "a", "stream": True, "n": 2}, receive_buffer_bytes=4096)
        assert eventually(lambda: len(scheduler.of_kind(Generate)) == 1, 5)
        time.sleep(0.5)
        body = http.post(f"{url}/v1/completions", json={"prompt": "a", "stream": True}).text
        assert len(events(body)) == 20
        answer = lazy.makefile("rb").read(2_000_000)  # at last
        assert answer.count(b'"text":"x"') == 6000


def test_a_long_text_is_tokenised_outside_the_event_loop() -> None:
    async def run() -> bool:
        done = threading.Event()
        asyncio.get_running_loop().call_later(0.05, done.set)  # only a loop that is free gets there
        return await tokenized(["x" * 10_000], lambda: done.wait(5))

    assert asyncio.run(run())


def test_before_there_is_a_scheduler_the_api_says_unavailable_and_then_serves(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with serving(f"ipc://{path}", wait=False) as url:
        assert http.get(f"{url}/health").status_code == 503
        response = http.post(f"{url}/v1/completions", json={"prompt": "a"})
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["type"] == "server_error"
        assert http.get(f"{url}/metrics").status_code == 200
        assert http.get(f"{url}/").status_code == 200
        with FakeScheduler(path, byte_steps(b"ab")) as scheduler:
            assert eventually(lambda: http.get(f"{url}/health").status_code == 200, 5)
            scheduler.ready = False
            assert http.get(f"{url}/health").status_code == 503


def test_a_scheduler_that_was_restarted_unnoticed_serves_the_next_requests(tmp_path: Path) -> None:
    path = tmp_path / "s"

    async def many(url: str) -> list[int]:
        async with httpx.AsyncClient(base_url=url) as client:
            bodies = [client.post("/v1/completions", json={"prompt": f"a{i}"}) for i in range(20)]
            return [response.status_code for response in await asyncio.gather(*bodies)]

    with FakeScheduler(path, byte_steps(b"ab")) as first, serving(first.endpoint) as url:
        assert http.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 200
        first.close()
        with FakeScheduler(path, byte_steps(b"ab"), scheduler_id="two"):
            assert asyncio.run(many(url)) == [200] * 20


@pytest.fixture
def paced(tmp_path: Path) -> Iterator[FakeScheduler]:
    """Answers one byte every 50 ms."""
    with FakeScheduler(tmp_path / "s", byte_steps(b"0123456789"), step_s=0.05) as scheduler:
        yield scheduler


def test_events_come_as_the_tokens_do(tmp_path: Path) -> None:
    with (
        FakeScheduler(tmp_path / "s", byte_steps(b"abcd"), hold_after=3) as scheduler,
        serving(scheduler.endpoint) as url,
        http.stream("POST", f"{url}/v1/completions", json={"prompt": "a", "stream": True}) as response,
    ):
        lines = (line for line in response.iter_lines() if line)
        assert [json.loads(next(lines)[6:])["choices"][0]["text"] for _ in range(3)] == ["a", "b", "c"]


def test_when_the_server_ends_its_answers_end_with_an_error(paced: FakeScheduler) -> None:
    with serving(paced.endpoint) as url:
        streaming, whole = (send(url, {"prompt": "a", "stream": stream}) for stream in (True, False))
        assert eventually(lambda: len(paced.of_kind(Generate)) == 2, 5)
        time.sleep(0.15)
    assert b'"code":"unavailable"' in streaming.makefile("rb").read()
    answer = whole.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 503 ") and b'"code":"unavailable"' in answer
