"""What is refused before a request is read: a wrong key, a body too large. Plain ASGI, so that streams pay nothing."""

from __future__ import annotations

import base64
import binascii
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedserve.api.errors import HttpError, error_response

_OPEN_PATHS = frozenset(("/health",))
_MAX_DISCARDED_BYTES = 64 * 1024 * 1024


class ApiKeyLimit:
    """Lets through who sends the key: as a bearer token, or as the password that a browser asks for."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        if hmac.compare_digest(_sent_key(Headers(scope=scope).get("authorization", "")), self._key):
            await self._app(scope, receive, send)
            return
        error = HttpError(401, "invalid_api_key", "a valid API key is needed: Authorization: Bearer KEY")
        response = error_response(error, {"WWW-Authenticate": 'Basic realm="PagedServe: the password is the API key"'})
        await response(scope, receive, send)


def _sent_key(authorization: str) -> bytes:
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode("latin-1")  # as ASGI decoded it
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return b""


class BodyLimit:
    """Refuses bodies of more than `max_bytes`, by their announced length or as they come."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            await _discard(receive)
            await error_response(self._error(f"{announced} bytes"))(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._error("more")
            return message

        await self._app(scope, counted, send)

    def _error(self, got: str) -> HttpError:
        return HttpError(413, "body_too_large", f"the body may have {self._max_bytes} bytes, got {got}")


async def _discard(receive: Receive) -> None:
    """Read on, since a client that is cut off while it sends never sees the answer; but not forever."""
    num_bytes, more = 0, True
    while more and num_bytes < _MAX_DISCARDED_BYTES:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        more = message.get("more_body", False)
