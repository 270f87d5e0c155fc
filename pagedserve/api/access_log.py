"""AccessLog: one JSON line for each answer, and the request id that it shares with the client (X-Request-Id)."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import Any

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("pagedserve.access")

_ACCEPTABLE_ID = re.compile(r"[!-~]{1,128}")
_CLIENT_CLOSED = 499  # as nginx writes it: the client went away before the answer was complete


class AccessLog:
    """Outermost of our layers. Sets scope["state"]["request_id"]; handlers may set ["usage"] for the log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        sent_id = Headers(scope=scope).get("x-request-id", "")
        request_id = sent_id if _ACCEPTABLE_ID.fullmatch(sent_id) else uuid.uuid4().hex
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id
        status, complete, gone = 500, False, False

        async def watched_receive() -> Message:
            nonlocal gone
            message = await receive()
            gone |= message["type"] == "http.disconnect"
            return message

        async def watched_send(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            elif not message.get("more_body", False):
                complete = not gone
            await send(message)

        try:
            await self._app(scope, watched_receive, watched_send)
        finally:
            line = {
                "request_id": request_id,
                "client": scope["client"][0] if scope.get("client") else None,
                "method": scope["method"],
                "path": scope["path"],
                "status": status if complete or not gone else _CLIENT_CLOSED,
                "duration_ms": round((time.perf_counter() - started) * 1000, 1),
            }
            if usage := state.get("usage"):
                line |= {
                    "prompt_tokens": usage.prompt_tokens,
                    "completion_tokens": usage.completion_tokens,
                    "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                }
            log.info("%s", msgspec.json.encode(line).decode())
