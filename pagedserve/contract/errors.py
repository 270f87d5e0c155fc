"""The one tree of errors that PagedServe raises on purpose.

Each message is one line that names the field or file and what was expected; the command line prints it without a
traceback. Anything that is not a PagedServeError is a bug.
"""

from __future__ import annotations


class PagedServeError(Exception):
    """Base of all expected errors. `exit_code` is what the command line ends with."""

    exit_code = 1


class ConfigError(PagedServeError):
    """A configuration file, flag or environment variable holds an unknown key or a wrong value."""

    exit_code = 2


class ModelError(PagedServeError):
    """A model file or folder cannot be served: missing, damaged, or of an unsupported kind. Names the file."""


class SegmentError(PagedServeError):
    """A shared-memory segment cannot be made or attached (for example too little room in /dev/shm)."""


class EndpointInUseError(PagedServeError):
    """Another instance already serves this endpoint."""


class ServerUnavailableError(PagedServeError):
    """No server answers at the endpoint, or it went away."""


class ProtocolError(PagedServeError):
    """A message could not be read: not msgpack, an unknown type, a missing or wrong field, another version."""


class RequestError(PagedServeError):
    """A request that cannot be served as asked. `code` is one of:

    invalid_value (a field out of range), context_length_exceeded (longer than the model's context),
    pool_exceeded (needs more blocks than the pool has), queue_full, not_found, unavailable.
    `param` names the field, or None.
    """

    exit_code = 2

    def __init__(self, message: str, *, code: str = "invalid_value", param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
