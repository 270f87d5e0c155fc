"""Processes killed while HTTP clients stream: scheduler and workers cost nobody a token, the API comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable

import httpx
import psutil
import pytest

from tests.api_server import events, free_port, http
from tests.server import RunFolder, Running, eventually

BODY = {"prompt": "Once upon a time", "max_tokens": 600, "temperature": 0.8, "seed": 5, "ignore_eos": True}


@pytest.fixture
def server(start: Callable[..., Running]) -> tuple[Running, str]:
    """A server of this test's own, and its address."""
    port = free_port()
    running = start("--model", "demo", "--workers", "2", "--pool-tokens", "65536", "--http-port", str(port))
    running.wait_for("ready: ")
    return running, f"http://127.0.0.1:{port}"


def test_a_stream_outlives_scheduler_and_workers(server: tuple[Running, str]) -> None:
    running, url = server
    expected = http.post(f"{url}/v1/completions", json=BODY).json()["choices"][0]["text"]
    for victim in ("workers", "pagedserve.scheduler"):
        text, killed = "", False
        with http.stream("POST", f"{url}/v1/completions", json={**BODY, "stream": True}) as response:
            body = ""
            for part in response.iter_text():
                body += part
                if not killed and len(body) > 5000:
                    running.child(victim).kill()
                    killed = True
        text = "".join(chunk["choices"][0]["text"] for chunk in events(body))
        assert killed
        assert text == expected, victim
        assert eventually(lambda: http.get(f"{url}/health").status_code == 200, 60)


def test_a_killed_api_is_started_again_and_its_requests_free_their_blocks(server: tuple[Running, str]) -> None:
    running, url = server

    def ask() -> None:
        with pytest.raises(httpx.TransportError):
            http.post(f"{url}/v1/completions", json={**BODY, "max_tokens": 3000})

    asking = threading.Thread(target=ask)
    asking.start()
    assert eventually(lambda: http.get(f"{url}/status").json()["num_running"] > 0, 10)
    api: psutil.Process = running.child("pagedserve.api")
    api.kill()
    asking.join()

    def is_back_and_idle() -> bool:
        try:
            return bool(http.get(f"{url}/status").json().get("num_referenced_blocks") == 0)
        except httpx.TransportError:
            return False

    assert eventually(is_back_and_idle, 10)
    assert running.child("pagedserve.api").pid != api.pid
    assert http.post(f"{url}/v1/completions", json=BODY).status_code == 200


def test_the_server_ends_in_order_while_http_clients_stream(server: tuple[Running, str], folder: RunFolder) -> None:
    running, url = server
    bodies: list[str] = []

    def stream() -> None:
        body = {**BODY, "max_tokens": 3500, "n": 16, "stream": True}
        bodies.append(http.post(f"{url}/v1/completions", json=body).text)

    streaming = threading.Thread(target=stream)
    streaming.start()
    assert eventually(lambda: http.get(f"{url}/status").json()["num_generation_tokens"] > 50, 10)
    assert running.end(timeout_s=5.0) == 0
    streaming.join()
    *_, last = events(bodies[0])
    assert last["error"]["code"] == "unavailable"
    assert last["error"]["message"] == "the server is ending; try again soon"
    assert "Traceback" not in running.output
    assert folder.segments() == []
