"""The answer of a generation: whole, or as server-sent events, built once and written together when they come so."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Protocol

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagedserve.api import answers
from pagedserve.api.errors import error_body
from pagedserve.api.generation import Generation
from pagedserve.contract.errors import PagedServeError

_DONE = b"data: [DONE]\n\n"


def events(chunks: Iterable[object]) -> bytes:
    """Records as events."""
    return b"".join(b"data: " + answers.encode(chunk) + b"\n\n" for chunk in chunks)


class Writer(Protocol):
    """Writes an endpoint's answer."""

    def bodies(self) -> AsyncIterator[bytes]:
        """The events of a stream, while the generation runs."""
        ...

    async def whole(self) -> bytes:
        """The answer in one piece, once the generation has ended."""
        ...


async def respond(request: Request, generation: Generation, writer: Writer, *, stream: bool) -> Response:
    """The response of a generation, which is closed with it.

    It begins with the first tokens, so that a refusal by the scheduler still has its own status.
    """
    try:
        async with generation.watched(request.receive):
            await generation.accepted()
            if stream:
                return EventStream(generation, writer.bodies())
            async for _ in generation.batches():
                pass
        request.state.usage = generation.usage()
        whole = await writer.whole()
    except BaseException:
        generation.close()
        raise
    generation.close()
    return Response(whole, media_type="application/json")


class EventStream(Response):
    """Sends `bodies` as they come, then the end mark; an error becomes the last event before it."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, bodies: AsyncIterator[bytes]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application of this one answer."""
        try:
            async with self._generation.watched(receive):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                try:
                    async for body in self._bodies:
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                except PagedServeError as error:
                    body = b"data: " + error_body(error) + b"\n\n"
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                await send({"type": "http.response.body", "body": _DONE})
        finally:
            scope["state"]["usage"] = self._generation.usage()
            self._generation.close()
