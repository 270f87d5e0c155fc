"""Any OpenAI-compatible server as a target: streamed completions over plain sockets.

One connection a request and as little work a token as can be, since the client shares the cores with the server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from bench.measures import RequestTimes

_DATA = b"data:"
_MAX_LINE_BYTES = 1 << 20


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    """What is read of a completion chunk."""

    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None
    error: Any = None


class _ModelName(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_ModelName]


class HttpTarget:
    """The server at `url` (http or https, with or without /v1). `extra_body`: fields added to each request."""

    def __init__(self, url: str, *, api_key: str = "", extra_body: Mapping[str, Any] | None = None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        self._tls = parts.scheme == "https"
        self._host = parts.hostname or "127.0.0.1"
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._extra_body = dict(extra_body or {})
        self.model = ""

    async def connect(self) -> None:
        """Ask for the model's name; OSError when nobody answers, RuntimeError when the answer is another."""
        body = b"".join([part async for part in self._request("GET", "/v1/models", b"")])
        try:
            models = msgspec.json.decode(body, type=_Models).data
        except msgspec.DecodeError:
            raise RuntimeError(f"GET /v1/models: expected a list of models, got {body[:200]!r}") from None
        if not models:
            raise RuntimeError("GET /v1/models: the list is empty")
        self.model = models[0].id

    async def complete(self, prompt: Sequence[int], output_len: int, request: RequestTimes) -> None:
        """Target.complete; RuntimeError with the server's words when it answers with an error."""
        fields = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra_body,
        }
        usage = None
        async for line in _lines(self._request("POST", "/v1/completions", msgspec.json.encode(fields))):
            data = line[len(_DATA) :].strip() if line.startswith(_DATA) else b""
            if not data.startswith(b"{"):
                continue
            now = time.perf_counter()
            event = msgspec.json.decode(data, type=_Event)
            if event.error is not None:
                raise RuntimeError(str(event.error))
            if event.choices:
                request.arrivals_s.append(now)
            usage = event.usage or usage
        request.num_output_tokens = len(request.arrivals_s)
        if usage is not None:
            request.num_prompt_tokens = usage.prompt_tokens
            request.num_output_tokens = usage.completion_tokens
            details = usage.prompt_tokens_details
            request.num_cached_tokens = (details.cached_tokens or 0) if details is not None else 0

    async def _request(self, method: str, path: str, body: bytes) -> AsyncIterator[bytes]:
        """The body of the answer as it comes; RuntimeError when its status is not 200."""
        reader, writer = await asyncio.open_connection(
            self._host, self._port, ssl=self._tls or None, limit=_MAX_LINE_BYTES
        )
        try:
            head = (
                f"{method} {self._prefix}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n{self._headers}"
                f"Connection: close\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            status, *headers = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
            parts = _chunks(reader) if b"transfer-encoding: chunked" in headers else _until_closed(reader)
            if b" 200" not in status:
                raise RuntimeError((status + b" " + b"".join([part async for part in parts])[:500]).decode())
            async for part in parts:
                yield part
        except asyncio.IncompleteReadError:
            raise RuntimeError("the server closed the connection before the end of its answer") from None
        finally:
            writer.close()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The parts of a chunked body (RFC 9112, 7.1)."""
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        part = await reader.readexactly(size + 2)
        yield part[:-2]


async def _until_closed(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The parts of a body that ends with its connection."""
    while part := await reader.read(65536):
        yield part


async def _lines(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The lines of a body, wherever its parts were cut."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest
