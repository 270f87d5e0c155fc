"""What the API refuses, and in which words: bodies, lengths, keys, queues, time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagedserve.contract.messages import Abort, Failure, Generate
from tests.api_server import events, http, serving
from tests.fake_scheduler import FakeScheduler, byte_steps

COMPLETION = {"prompt": "hi"}


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[FakeScheduler]:
    """Answers everything with "ab"."""
    with FakeScheduler(tmp_path / "s", byte_steps(b"ab")) as fake:
        yield fake


def refusal(response: httpx.Response) -> tuple[int, str, str | None, str]:
    """Status, code, param and type of an error in OpenAI's shape."""
    error = response.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert response.headers["content-type"] == "application/json"
    return response.status_code, error["code"], error["param"], error["type"]


def test_every_error_has_openais_body(scheduler: FakeScheduler) -> None:
    invalid = "invalid_request_error"
    with serving(scheduler.endpoint) as url, httpx.Client(base_url=url) as client:
        path = "/v1/completions"
        json_type = {"Content-Type": "application/json"}
        assert refusal(client.post(path, json={})) == (400, "invalid_value", "prompt", invalid)
        assert refusal(client.post(path, json=[])) == (400, "invalid_value", None, invalid)
        assert refusal(client.post(path, content=b"{", headers=json_type)) == (400, "invalid_json", None, invalid)
        assert refusal(client.post(path, content=b"\xff", headers=json_type))[0] == 400
        assert refusal(client.post(path, data={"prompt": "x"})) == (400, "invalid_value", None, invalid)
        assert refusal(client.post(path, json={**COMPLETION, "top_p": 2})) == (400, "invalid_value", "top_p", invalid)
        assert refusal(client.get("/v1/nothing")) == (404, "not_found", None, invalid)
        assert refusal(client.get("/v1/models/other")) == (404, "model_not_found", "model", invalid)
        assert refusal(client.get(path)) == (405, "method_not_allowed", None, invalid)
        assert scheduler.of_kind(Generate) == []


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(scheduler: FakeScheduler) -> None:
    with serving(scheduler.endpoint) as url:
        response = http.post(f"{url}/v1/completions", json={"prompt": "x" * 4090, "max_tokens": 7})
        assert refusal(response) == (400, "context_length_exceeded", "prompt", "invalid_request_error")
        message = response.json()["error"]["message"]
        assert "maximum context length is 4096 tokens" in message
        assert "4097 were requested (4090 in the prompt, 7 in the output)" in message
        assert http.post(f"{url}/v1/completions", json={"prompt": "x" * 4090, "max_tokens": 6}).status_code == 200
        messages = [{"role": "user", "content": "x" * 5000}]
        response = http.post(f"{url}/v1/chat/completions", json={"messages": messages})
        assert refusal(response)[:3] == (400, "context_length_exceeded", "messages")
        assert len(scheduler.of_kind(Generate)) == 1


def test_a_million_characters_are_refused_in_under_two_seconds(scheduler: FakeScheduler) -> None:
    with serving(scheduler.endpoint) as url:
        started = time.monotonic()
        response = http.post(f"{url}/v1/completions", json={"prompt": "a b\n" * 250_000})
        assert refusal(response)[1] == "context_length_exceeded"
        assert "1000000 in the prompt" in response.json()["error"]["message"]
        assert time.monotonic() - started < 2


def test_a_body_beyond_the_limit_is_refused_announced_or_not(scheduler: FakeScheduler) -> None:
    def chunks() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(100):
            yield b"x" * 1000

    with serving(scheduler.endpoint, http_max_body_bytes=50_000) as url:
        expected = (413, "body_too_large", None, "invalid_request_error")
        assert refusal(http.post(f"{url}/v1/completions", json={"prompt": "x" * 60_000})) == expected
        headers = {"Content-Type": "application/json"}
        assert refusal(http.post(f"{url}/v1/completions", content=chunks(), headers=headers)) == expected
        assert http.post(f"{url}/v1/completions", json=COMPLETION).status_code == 200


def test_a_full_queue_is_429_and_says_when_to_come_back(scheduler: FakeScheduler) -> None:
    scheduler.refusal = Failure(code="queue_full", message="the queue is full", request_id="r0")
    with serving(scheduler.endpoint) as url:
        response = http.post(f"{url}/v1/completions", json={**COMPLETION, "stream": True})
        assert refusal(response) == (429, "queue_full", None, "rate_limit_error")
        assert response.headers["retry-after"] == "1"


def test_a_refusal_by_the_scheduler_names_the_field_as_the_client_knows_it(scheduler: FakeScheduler) -> None:
    text = "prompt_token_ids must be within [0, 258], got 300"
    scheduler.refusal = Failure(code="invalid_value", message=text, request_id="r0", param="prompt_token_ids")
    with serving(scheduler.endpoint) as url:
        response = http.post(f"{url}/v1/completions", json={"prompt": [300]})
        assert refusal(response)[:3] == (400, "invalid_value", "prompt")
        assert response.json()["error"]["message"] == "prompt must be within [0, 258], got 300"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_ended(tmp_path: Path, stream: bool) -> None:
    with (
        FakeScheduler(tmp_path / "s", byte_steps(b"abc"), hold_after=1) as scheduler,
        serving(scheduler.endpoint, http_request_timeout_s=1) as url,
    ):
        response = http.post(f"{url}/v1/completions", json={**COMPLETION, "stream": stream})
        assert len(scheduler.of_kind(Abort)) == 1
        if stream:
            assert response.status_code == 200
            *_, last = events(response.text)
            assert last["error"]["code"] == "timeout"
        else:
            assert refusal(response) == (504, "timeout", None, "server_error")


def test_with_a_key_everything_but_health_needs_it(scheduler: FakeScheduler) -> None:
    with serving(scheduler.endpoint, http_api_key="s3cret:ü") as url, httpx.Client(base_url=url) as client:
        assert client.get("/health").status_code == 200
        for path in ("/", "/metrics", "/v1/models", "/status", "/docs", "/openapi.json", "/page/main.js", "/health/x"):
            assert refusal(client.get(path)) == (401, "invalid_api_key", None, "invalid_request_error")
        for wrong in ("Bearer s3cret", "Basic s3cret", "Basic ++", "s3cret:ü", "Bearer"):
            headers = {"Authorization": wrong.encode()}
            assert client.post("/v1/completions", json=COMPLETION, headers=headers).status_code == 401
        headers = {"Authorization": "Bearer s3cret:ü".encode()}
        assert client.post("/v1/completions", json=COMPLETION, headers=headers).status_code == 200
        assert client.get("/", auth=("anybody", "s3cret:ü")).status_code == 200
        assert scheduler.of_kind(Generate) != []


def test_cors_is_off_unless_configured(scheduler: FakeScheduler) -> None:
    origin = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    with serving(scheduler.endpoint) as url:
        assert "access-control-allow-origin" not in http.get(f"{url}/version", headers=origin).headers
    settings: dict[str, Any] = {"http_cors_origins": "https://a.example, https://b.example", "http_api_key": "k"}
    with serving(scheduler.endpoint, **settings) as url:
        preflight = http.options(f"{url}/v1/completions", headers=origin)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        headers = {"Origin": "https://c.example"}
        assert "access-control-allow-origin" not in http.get(f"{url}/version", headers=headers).headers


def test_the_page_forbids_foreign_content_and_serves_no_other_files(scheduler: FakeScheduler) -> None:
    with serving(scheduler.endpoint) as url:
        assert "default-src 'self'" in http.get(f"{url}/").headers["content-security-policy"]
        for path in ("/page/../app.py", "/page/%2e%2e/app.py", "/?file=../app.py", "/page/"):
            assert "create_app" not in http.get(url + path).text
