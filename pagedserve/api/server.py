"""HttpServer: uvicorn as we run it: no signal handlers of its own, and answers that end in order when it does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

_DRAIN_S = 1  # for answers that are being written when we are told to end


class HttpServer(uvicorn.Server):
    """Serves an app of `create_app` on the sockets given to `serve`, until `stop`."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_DRAIN_S,
            )
        )
        self._backend = app.state.server.backend

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install nothing: Ctrl-C reaches the whole group, and the supervisor ends us."""
        yield

    def stop(self) -> None:
        """End, from within the event loop; answers that are not complete end with an error at once."""
        self.should_exit = True
        self._stopping = asyncio.ensure_future(self._backend.stop())
