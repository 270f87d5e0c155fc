"""Where a server is, and whether one is there: endpoints and the quick look at an ipc socket. Used by both clients."""

from __future__ import annotations

import socket
from pathlib import Path

import zmq

from pagedserve.config import load_config
from pagedserve.contract.errors import ServerUnavailableError
from pagedserve.contract.instance import Instance

GIVE_UP_S = 5.0  # without a message from the server while one is due: it is gone
ASKS = 5  # in that time, whether it is still there

# Nothing is ever dropped for being too much: the scheduler limits what it queues. Aborts still go out at close.
SOCKET_OPTIONS = ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 200))


def resolve_endpoint(endpoint: str | None) -> str:
    """The given ZeroMQ endpoint, or that of the configured instance."""
    return endpoint or Instance(load_config().instance).client_endpoint


def check_reachable(endpoint: str) -> None:
    """ServerUnavailableError at once when an ipc endpoint has no listener; nothing is known about other kinds."""
    if not endpoint.startswith("ipc://"):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(endpoint.removeprefix("ipc://"))
        except OSError:
            raise unavailable(endpoint) from None


def has_ended(endpoint: str) -> bool:
    """Whether the server was ended in order: its run folder is gone. A dead one that is being restarted has not."""
    return endpoint.startswith("ipc://") and not Path(endpoint.removeprefix("ipc://")).parent.exists()


def unavailable(endpoint: str) -> ServerUnavailableError:
    """The error that names the endpoint and what to do."""
    return ServerUnavailableError(f"no server answers at {endpoint} (start one: pagedserve up)")
