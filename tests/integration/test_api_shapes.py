"""Requests as other clients send them: vLLM's benchmark, lm-evaluation-harness, a bare socket that goes away."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pagedserve.scheduler.rounds import MAX_ROUNDS
from tests.api_server import http
from tests.server import eventually


def chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """What a benchmark reads of a stream."""
    for line in response.iter_lines():
        data = line.removeprefix("data:").strip()
        if data and data != "[DONE]":
            yield json.loads(data)


@pytest.mark.parametrize(
    ("path", "extra"),
    [
        (
            "/v1/completions",
            {"prompt": "Once upon a time", "max_tokens": 20, "logprobs": None, "repetition_penalty": 1.0},
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "Once upon a time"}]}],
                "max_completion_tokens": 20,
            },
        ),
    ],
)
def test_vllm_bench_serve_gets_a_time_for_every_four_tokens_at_least_and_the_counts(
    api_url: str, path: str, extra: dict[str, Any]
) -> None:
    body = {
        "model": http.get(f"{api_url}/v1/models").json()["data"][0]["id"],
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        **extra,
    }
    headers = {"Authorization": "Bearer None", "x-request-id": "bench-1"}
    num_with_choices, usage = 0, {}
    with http.stream("POST", api_url + path, json=body, headers=headers) as response:
        assert response.status_code == 200
        for chunk in chunks(response):
            if chunk.get("choices"):
                num_with_choices += 1
            elif chunk.get("usage"):
                usage = chunk["usage"]
    assert usage["completion_tokens"] == 20
    num_with_tokens = num_with_choices - (0 if path == "/v1/completions" else 2)  # a chat's role and end are their own
    assert 20 / MAX_ROUNDS <= num_with_tokens <= 20


@pytest.mark.parametrize("as_ids", [False, True])
def test_lm_evaluation_harness_reads_the_loglikelihood_of_a_continuation(api_url: str, as_ids: bool) -> None:
    """Its `local-completions` model sends this for each (context, continuation), and sums [len(context):-1]."""

    def scored(texts: list[str]) -> list[tuple[float, bool]]:
        prompts: Any = [list(text.encode()) for text in texts] if as_ids else texts
        body = {
            "model": "demo",
            "prompt": prompts,
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        }
        answer = http.post(f"{api_url}/v1/completions", json=body, headers={"Authorization": "Bearer none"}).json()
        results = []
        for choice in sorted(answer["choices"], key=lambda choice: choice["index"]):
            logprobs = choice["logprobs"]
            own = slice(len("The sky is"), -1)
            is_greedy = all(
                token == max(top, key=top.get)
                for token, top in zip(logprobs["tokens"][own], logprobs["top_logprobs"][own], strict=True)
            )
            results.append((sum(logprobs["token_logprobs"][own]), is_greedy))
        return results

    greedy = http.post(
        f"{api_url}/v1/completions",
        json={"prompt": "The sky is", "max_tokens": 1, "temperature": 0, "return_token_ids": True},
    ).json()
    likely = greedy["choices"][0]["token_ids"][0]
    continuations = [" blue", " green"] if likely > 127 else [" blue", " green", chr(likely)]
    together = scored([f"The sky is{continuation}" for continuation in continuations])
    alone = [scored([f"The sky is{continuation}"])[0] for continuation in continuations]
    assert together == alone
    assert all(-100 < value < 0 for value, _ in together)
    assert [is_greedy for _, is_greedy in together] == [False, False, True][: len(continuations)]


def test_lm_evaluation_harness_generates_until_a_stop(api_url: str) -> None:
    body = {
        "model": "demo",
        "prompt": ["a", "b"],
        "max_tokens": 30,
        "temperature": 0,
        "stop": ["\x00", "e"],
        "seed": 1234,
    }
    answer = http.post(f"{api_url}/v1/completions", json=body).json()
    assert all("e" not in choice["text"] for choice in answer["choices"])


def leave_after(url: str, body: dict[str, Any], num_bytes: int, wait_s: float) -> None:
    """Ask, read a little, wait, and go away without a word."""
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    with socket.create_connection((host, int(port))) as connection:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        )
        connection.sendall(f"{head}\r\n\r\n".encode() + data)
        while num_bytes > 0:
            num_bytes -= len(connection.recv(min(num_bytes, 4096)))
        time.sleep(wait_s)


def status(url: str) -> dict[str, Any]:
    """The server's own account."""
    result: dict[str, Any] = http.get(f"{url}/status").json()
    return result


def is_idle(url: str) -> bool:
    """Nothing runs, nothing waits, no block is held."""
    now = status(url)
    return (now["num_running"], now["num_waiting"], now["num_referenced_blocks"]) == (0, 0, 0)


ENDLESS = {"max_tokens": 3000, "ignore_eos": True, "temperature": 0}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_in_decode_frees_its_blocks_within_a_second(api_url: str, stream: bool) -> None:
    assert eventually(lambda: is_idle(api_url), 10)
    leave_after(api_url, {"prompt": "decode", "stream": stream, **ENDLESS}, num_bytes=500 if stream else 0, wait_s=0.3)
    assert eventually(lambda: is_idle(api_url), 1.0)


def test_a_client_that_leaves_in_prefill_frees_its_blocks_within_a_second(api_url: str) -> None:
    prompt = [i % 256 for i in range(3500)]  # 55 steps of 64 tokens
    before = status(api_url)["num_prompt_tokens"]
    leave_after(
        api_url, {"prompt": prompt, "stream": True, "max_tokens": 500, "ignore_eos": True}, num_bytes=0, wait_s=0.02
    )
    assert eventually(lambda: is_idle(api_url), 1.0)
    assert status(api_url)["num_prompt_tokens"] - before < 3500 + 64


def test_clients_that_leave_the_queue_disturb_nobody_who_runs(api_url: str) -> None:
    """16 run, 20 more wait and leave; the 16 get what each would get alone."""

    def answer(i: int) -> str:
        body = {"prompt": f"runner {i}", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
        return str(http.post(f"{api_url}/v1/completions", json=body).json()["choices"][0]["text"])

    answers: dict[int, str] = {}
    runners = [threading.Thread(target=lambda i=i: answers.update({i: answer(i)})) for i in range(16)]
    for runner in runners:
        runner.start()
    assert eventually(lambda: status(api_url)["num_running"] == 16, 20)
    leavers = [
        threading.Thread(
            target=leave_after, args=(api_url, {"prompt": f"leaver {i}", "stream": i % 2 == 0, **ENDLESS}, 0, 0.2)
        )
        for i in range(20)
    ]
    for leaver in leavers:
        leaver.start()
    for thread in (*leavers, *runners):
        thread.join()
    assert eventually(lambda: is_idle(api_url), 1.0)
    assert answers[3] == answer(3)
    assert answers[15] == answer(15)


def test_the_end_of_text_is_no_stop_reason_and_a_stop_token_is(api_url: str) -> None:
    def ended_by(token_id: int) -> tuple[str, int | None]:
        """The end of an output in which this token is as good as certain."""
        body = {"prompt": "x", "max_tokens": 4, "logit_bias": {str(token_id): 100}, "stop_token_ids": [33]}
        (choice,) = http.post(f"{api_url}/v1/completions", json=body).json()["choices"]
        return choice["finish_reason"], choice["stop_reason"]

    assert ended_by(257) == ("stop", None)
    assert ended_by(33) == ("stop", 33)
