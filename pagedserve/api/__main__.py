"""`python -m pagedserve.api`: reads the configuration, opens the port, serves until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys

import uvloop

from pagedserve.api.app import create_app
from pagedserve.api.server import HttpServer
from pagedserve.config import Config, load_config
from pagedserve.contract.errors import EndpointInUseError, PagedServeError
from pagedserve.contract.instance import Instance
from pagedserve.contract.parent import die_with_parent


def main() -> int:
    """Run the API; the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    try:
        config = load_config()
        logging.basicConfig(level=config.log_level.upper(), format="%(message)s", stream=sys.stderr)
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        with _listen(config.http_host, config.http_port) as listening:
            uvloop.run(_serve(config, listening))  # of a single stream's time, asyncio's own loop takes 5 % more
    except PagedServeError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


async def _serve(config: Config, listening: socket.socket) -> None:
    server = HttpServer(create_app(config, Instance(config.instance).client_endpoint))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.stop)
    await server.serve(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise EndpointInUseError(f"http://{host}:{port} cannot be opened: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
