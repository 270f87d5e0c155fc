"""AsyncClient: many requests over one socket in one event loop.

The loop watches the socket's descriptor and reads without futures, since 32 streams bring hundreds of messages a
second; one task checks that the server is still there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import zmq

from pagedserve.client.connection import (
    ASKS,
    GIVE_UP_S,
    SOCKET_OPTIONS,
    check_reachable,
    has_ended,
    resolve_endpoint,
    unavailable,
)
from pagedserve.client.live import LiveRequest, TextOptions
from pagedserve.client.results import Completion, Delta, PromptLogprobs, Timing, Usage
from pagedserve.client.session import Session, TextLoader
from pagedserve.client.sync import as_stops, chosen_sampling
from pagedserve.contract.errors import PagedServeError, ServerUnavailableError
from pagedserve.contract.messages import ModelInfo, Status, Welcome
from pagedserve.contract.sampling import SamplingParams
from pagedserve.text.load import TextModel, load_text

_MAX_READS = 100  # messages taken in one turn of the event loop


class AsyncStream(AsyncIterator[Delta]):
    """The deltas of one request, as they come. Leaving it as a context manager aborts what still runs."""

    def __init__(self, client: AsyncClient, request: LiveRequest, options: TextOptions) -> None:
        self._client = client
        self._request = request
        self._options = options
        self._news = asyncio.Event()

    @property
    def request_id(self) -> str:
        """The id on the wire."""
        return self._request.request_id

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return self._request.usage()

    @property
    def timing(self) -> Timing:
        """Durations so far."""
        return self._request.timing()

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Logprobs of the prompt, with the first delta, if they were asked for."""
        return self._request.prompt_logprobs

    def wake(self) -> None:
        """There is news; called by the reader."""
        self._news.set()

    async def __anext__(self) -> Delta:
        """The next delta; RequestError if the request was refused, ServerUnavailableError if the server is gone."""
        await self.accepted()
        if not self._request.deltas:
            raise StopAsyncIteration
        return self._request.deltas.popleft()

    async def accepted(self) -> None:
        """Wait until there is a delta to take, or the end; errors as in `__anext__`."""
        request = self._request
        while not request.deltas and not request.finished:
            self._news.clear()
            await self._news.wait()
        if not request.deltas and request.error is not None:
            raise request.error

    async def batch(self) -> list[Delta]:
        """All deltas that have arrived, at least one; [] at the end. Errors as in `__anext__`."""
        await self.accepted()
        deltas = list(self._request.deltas)
        self._request.deltas.clear()
        return deltas

    async def result(self) -> Completion:
        """Wait for the end; the whole request's text, tokens, counts and times."""
        async for _ in self:
            pass
        return self._request.completion()

    def abort(self) -> None:
        """Ask the scheduler to end the request; the stream ends with finish_reason "abort". Never blocks."""
        if not self._request.finished and not self._request.aborting:
            self._client.send(self._client.session.abort(self._request))

    def fork(self, *, seed: int | None = None) -> AsyncStream:
        """A copy of this running request that goes on by itself, sharing all its blocks; its stream starts anew."""
        request, body = self._client.session.fork(self._request, self._options, seed, time.monotonic())
        return self._client.start(request, body, self._options)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class AsyncClient:
    """A connection to a server: `async with AsyncClient() as client`. Arguments and errors are those of Client."""

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        timeout_s: float = 10.0,
        give_up_s: float = GIVE_UP_S,
        text_loader: TextLoader = load_text,
    ) -> None:
        self.endpoint = resolve_endpoint(endpoint)
        self._give_up_s = give_up_s
        self.session = Session(text_loader)
        self._timeout_s = timeout_s
        self._streams: dict[str, AsyncStream] = {}
        self._answered = asyncio.Event()  # a Welcome, a Status or a failure came
        self._last_heard = 0.0
        self._watchdog: asyncio.Task[None] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None

    async def connect(self) -> AsyncClient:
        """Open the connection."""
        check_reachable(self.endpoint)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in SOCKET_OPTIONS:
            self._socket.setsockopt(option, value)
        self._socket.connect(self.endpoint)
        self._last_heard = time.monotonic()
        asyncio.get_running_loop().add_reader(self._socket.FD, self._read)
        self._watchdog = asyncio.create_task(self._watch())
        try:
            await self._ask(self.session.hello(), lambda: self.session.welcome is not None, self._timeout_s)
        except BaseException:
            await self.close()
            raise
        return self

    @property
    def welcome(self) -> Welcome:
        """What the server said of itself at connection."""
        assert self.session.welcome is not None
        return self.session.welcome

    @property
    def model(self) -> ModelInfo:
        """The model that is served."""
        return self.welcome.model

    async def load_text(self) -> TextModel:
        """The model's tokenizer and chat template; reads its file outside the event loop the first time."""
        if self.session.has_text:
            return self.session.text
        return await asyncio.to_thread(lambda: self.session.text)

    async def generate(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        stop: str | Sequence[str] = (),
        include_stop_str: bool = False,
        skip_special_tokens: bool = True,
        detokenize: bool = True,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        **params: Any,
    ) -> AsyncStream:
        """Start a request, as Client.generate does; a long text is tokenised outside the event loop."""
        if detokenize or isinstance(prompt, str):
            text = await self.load_text()
            if isinstance(prompt, str):
                prompt = text.prompt(prompt) if len(prompt) < 2000 else await asyncio.to_thread(text.prompt, prompt)
        options = TextOptions(as_stops(stop), include_stop_str, skip_special_tokens, detokenize)
        request, body = self.session.generate(
            prompt,
            chosen_sampling(sampling, params),
            options,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            now=time.monotonic(),
        )
        return self.start(request, body, options)

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> AsyncStream:
        """Start the answer to a conversation of {"role", "content"} messages; `options` are those of `generate`."""
        text = await self.load_text()
        prompt = await asyncio.to_thread(text.chat_prompt, messages)
        options["stop"] = (*as_stops(options.get("stop", ())), *text.template.stop_strings)
        return await self.generate(prompt, **options)

    async def status(self, *, blocks: bool = False, timeout_s: float = 5.0) -> Status:
        """The server's state now."""
        before = self.session.status
        await self._ask(self.session.get_status(blocks=blocks), lambda: self.session.status is not before, timeout_s)
        assert self.session.status is not None
        return self.session.status

    async def wait_ready(self, timeout_s: float = 300.0) -> Status:
        """Wait until the team can compute; its status then. ServerUnavailableError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = await self.status()
            if status.ready:
                return status
            if time.monotonic() > deadline:
                raise ServerUnavailableError(f"the server at {self.endpoint} is not ready after {timeout_s:g} s")
            await asyncio.sleep(0.1)

    async def close(self, reason: str = "the client is closed") -> None:
        """End live requests and disconnect; streams that are still read raise ServerUnavailableError with `reason`."""
        for request in list(self.session.live.values()):
            self.send(self.session.abort(request))
        self._fail(ServerUnavailableError(reason))  # now: the answers to the aborts would say less
        if self._watchdog is not None:
            self._watchdog.cancel()
            await asyncio.gather(self._watchdog, return_exceptions=True)
        if self._socket is not None and self._context is not None:
            asyncio.get_running_loop().remove_reader(self._socket.FD)
            self._socket.close()
            self._context.term()
            self._socket = None

    async def __aenter__(self) -> AsyncClient:
        return await self.connect()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def start(self, request: LiveRequest, body: bytes, options: TextOptions) -> AsyncStream:
        """Send a new request and make its stream; used by `generate` and by streams."""
        stream = AsyncStream(self, request, options)
        self._streams[request.request_id] = stream
        self.send(body)
        return stream

    def send(self, body: bytes) -> None:
        """Send one message, without waiting."""
        if self._socket is None:
            raise unavailable(self.endpoint)
        if not self.session.live:
            self._last_heard = time.monotonic()  # nobody waited for the server until now
        self._socket.send(body, zmq.NOBLOCK)
        # The descriptor is edge-triggered, and sending may have taken an edge that told of a message.
        asyncio.get_running_loop().call_soon(self._read)

    def _read(self) -> None:
        for _ in range(_MAX_READS):
            if self._socket is None:
                return
            try:
                body = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._last_heard = time.monotonic()
            received = self.session.receive(body, self._last_heard)
            for reply in received.replies:
                self._socket.send(reply, zmq.NOBLOCK)
            for request in received.news:
                self._wake(request)
            if self.session.failure is not None:
                self._fail(self.session.failure)
            if not received.news:
                self._answered.set()
        asyncio.get_running_loop().call_soon(self._read)  # let the others have the loop in between

    def _wake(self, request: LiveRequest) -> None:
        stream = self._streams.get(request.request_id)
        if stream is not None:
            stream.wake()
            if request.finished:
                del self._streams[request.request_id]

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._give_up_s / ASKS)
            silence_s = time.monotonic() - self._last_heard
            if not self.session.live or silence_s < self._give_up_s / ASKS:
                continue
            if silence_s >= self._give_up_s or has_ended(self.endpoint):
                self._fail(unavailable(self.endpoint))
            else:
                self.send(self.session.hello())

    async def _ask(self, body: bytes, answered: Callable[[], bool], timeout_s: float) -> None:
        self.send(body)
        deadline = time.monotonic() + timeout_s
        while not answered():
            self._answered.clear()
            if self.session.failure is not None:
                raise self.session.failure
            try:
                await asyncio.wait_for(self._answered.wait(), deadline - time.monotonic())
            except asyncio.TimeoutError:
                raise unavailable(self.endpoint) from None

    def _fail(self, error: PagedServeError) -> None:
        self.session.fail(error)
        for stream in self._streams.values():
            stream.wake()
        self._streams.clear()
        self._answered.set()
