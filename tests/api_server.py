"""The API in a thread of the test's process, on a port of its own, in front of whatever scheduler listens."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import uvicorn

from pagedserve.api.app import create_app
from pagedserve.config import Config


@contextlib.contextmanager
def serving(endpoint: str, *, wait: bool = True, **settings: Any) -> Iterator[str]:
    """The base URL of a running API. `settings` are Config's; with `wait` it is connected when it is given."""
    app = create_app(Config(**settings), endpoint)
    server = uvicorn.Server(uvicorn.Config(app, port=0, http="httptools", log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        _wait_until(lambda: server.started)
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        if wait:
            _wait_until(lambda: httpx.get(f"{url}/health").status_code == 200)
        yield url
    finally:
        server.should_exit = True
        thread.join()


def _wait_until(done: Any, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)
