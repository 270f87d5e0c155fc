"""`python -m pagedserve.api`: reads the configuration, opens the port, serves until SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn

from pagedserve.api.app import create_app
from pagedserve.api.backend import Backend
from pagedserve.config import Config, load_config
from pagedserve.contract.errors import EndpointInUseError, PagedServeError
from pagedserve.contract.instance import Instance
from pagedserve.contract.parent import die_with_parent

_DRAIN_S = 1  # streams that still run when we are told to end


class _Server(uvicorn.Server):
    """uvicorn, ended by `stop` alone: Ctrl-C reaches the whole group, and the supervisor ends us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install nothing."""
        yield

    def stop(self, backend: Backend) -> None:
        """End in order: answers that are not complete end with an error at once."""
        self.should_exit = True
        self._stopping = asyncio.ensure_future(backend.stop())


def main() -> int:
    """Run the API; the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    try:
        config = load_config()
        logging.basicConfig(level=config.log_level.upper(), format="%(message)s", stream=sys.stderr)
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        with _listen(config.http_host, config.http_port) as listening:
            asyncio.run(_serve(config, listening))
    except PagedServeError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


async def _serve(config: Config, listening: socket.socket) -> None:
    app = create_app(config, Instance(config.instance).client_endpoint)
    server = _Server(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=True,
            timeout_graceful_shutdown=_DRAIN_S,
        )
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.stop, app.state.server.backend)
    await server.serve(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise EndpointInUseError(f"http://{host}:{port} cannot be opened: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
