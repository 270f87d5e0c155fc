"""The API in a thread of the test's process, on a port of its own, in front of whatever scheduler listens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx

from pagedserve.api.app import create_app
from pagedserve.api.server import HttpServer
from pagedserve.config import Config

# Patient, since tests run on busy machines; and without connections that a later test could find dead.
http = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))


@contextlib.contextmanager
def serving(endpoint: str, *, wait: bool = True, send_buffer_bytes: int = 0, **settings: Any) -> Iterator[str]:
    """The base URL of a running API. `settings` are Config's; with `wait` it is connected when it is given."""
    server = HttpServer(create_app(Config(**settings), endpoint))
    loop = asyncio.new_event_loop()
    with socket.create_server(("127.0.0.1", 0)) as listening, contextlib.closing(loop):
        if send_buffer_bytes:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)  # connections inherit it
        thread = threading.Thread(target=loop.run_until_complete, args=(server.serve([listening]),))
        thread.start()
        try:
            _wait_until(lambda: server.started)
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            if wait:
                _wait_until(lambda: http.get(f"{url}/health").status_code == 200)
            yield url
        finally:
            loop.call_soon_threadsafe(server.stop)
            thread.join()


def _wait_until(done: Any, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def events(body: str) -> list[Any]:
    """The objects of a server-sent stream; its last event must be the end mark."""
    parts = body.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    assert all(part.startswith("data: ") for part in parts[:-1])
    return [json.loads(part[len("data: ") :]) for part in parts[:-2]]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
