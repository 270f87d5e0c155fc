"""Client: the blocking client. No thread: whoever iterates a stream also reads the socket for all the others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from pagedserve.contract.errors import ServerUnavailableError
from pagedserve.contract.messages import ModelInfo, Status, Welcome
from pagedserve.contract.sampling import SamplingParams, sampling_params
from pagedserve.text.load import TextModel, load_text


class Stream(Iterator[Delta]):
    """The deltas of one request, as they come. Leaving it as a context manager aborts what still runs."""

    def __init__(self, client: Client, request: LiveRequest, options: TextOptions) -> None:
        self._client = client
        self._request = request
        self._options = options

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

    def __next__(self) -> Delta:
        """The next delta; RequestError if the request was refused, ServerUnavailableError if the server is gone."""
        request = self._request
        self._client.pump_until(lambda: bool(request.deltas) or request.finished)
        if request.deltas:
            return request.deltas.popleft()
        if request.error is not None:
            raise request.error
        raise StopIteration

    def poll(self, timeout_s: float = 0.0) -> Delta | None:
        """The next delta if it comes within `timeout_s`, else None. Errors are those of iteration."""
        request = self._request
        self._client.pump_until(lambda: bool(request.deltas) or request.finished, wait_s=timeout_s)
        if request.deltas:
            return request.deltas.popleft()
        if request.error is not None:
            raise request.error
        return None

    @property
    def finished(self) -> bool:
        """Whether every delta has been taken."""
        return self._request.finished and not self._request.deltas

    @property
    def has_ended(self) -> bool:
        """Whether the request is over, however many of its deltas were taken."""
        return self._request.finished

    def result(self) -> Completion:
        """Wait for the end; the whole request's text, tokens, counts and times."""
        for _ in self:
            pass
        return self._request.completion()

    def abort(self) -> None:
        """Ask the scheduler to end the request; the stream ends with finish_reason "abort"."""
        if not self._request.finished and not self._request.aborting:
            self._client.send(self._client.session.abort(self._request))

    def fork(self, *, seed: int | None = None) -> Stream:
        """A copy of this running request that goes on by itself, sharing all its blocks; its stream starts anew."""
        session = self._client.session
        request, body = session.fork(self._request, self._options, seed, time.monotonic())
        self._client.send(body)
        return Stream(self._client, request, self._options)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class Client:
    """A connection to a server. Use it from one thread.

    `endpoint` is a ZeroMQ address, by default that of the configured instance. ServerUnavailableError when nobody
    answers there within `timeout_s`, and later when the server is silent for `give_up_s` though a message is due (a
    scheduler that is restarted in time goes on with the streams). ProtocolError when it speaks another version.
    """

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
        check_reachable(self.endpoint)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        for option, value in SOCKET_OPTIONS:
            self._socket.setsockopt(option, value)
        self._socket.connect(self.endpoint)
        self._last_heard = self._last_pumped = self._last_asked = time.monotonic()
        try:
            self.send(self.session.hello())
            self.pump_until(lambda: self.session.welcome is not None, give_up_s=timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def welcome(self) -> Welcome:
        """What the server said of itself at connection."""
        assert self.session.welcome is not None
        return self.session.welcome

    @property
    def model(self) -> ModelInfo:
        """The model that is served."""
        return self.welcome.model

    @property
    def text(self) -> TextModel:
        """The model's tokenizer and chat template, read from its file."""
        return self.session.text

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        stop: str | Sequence[str] = (),
        include_stop_str: bool = False,
        skip_special_tokens: bool = True,
        detokenize: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        **params: Any,
    ) -> Stream:
        """Start a request for a text or for token ids; `params` are fields of SamplingParams, instead of `sampling`.

        Returns at once. RequestError names a parameter that is unknown or out of range; what only the scheduler can
        refuse (length, queue) comes out of the stream.
        """
        options = TextOptions(as_stops(stop), include_stop_str, skip_special_tokens, detokenize)
        request, body = self.session.generate(
            prompt,
            chosen_sampling(sampling, params),
            options,
            priority=priority,
            cache_salt=cache_salt,
            now=time.monotonic(),
        )
        self.send(body)
        return Stream(self, request, options)

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Stream:
        """Start the answer to a conversation of {"role", "content"} messages; `options` are those of `generate`."""
        text = self.text
        options["stop"] = (*as_stops(options.get("stop", ())), *text.template.stop_strings)
        return self.generate(text.chat_prompt(messages), **options)

    def status(self, *, blocks: bool = False, timeout_s: float = 5.0) -> Status:
        """The server's state now."""
        before = self.session.status
        self.send(self.session.get_status(blocks=blocks))
        self.pump_until(lambda: self.session.status is not before, give_up_s=timeout_s)
        assert self.session.status is not None
        return self.session.status

    def wait_ready(self, timeout_s: float = 300.0) -> Status:
        """Wait until the team can compute; its status then. ServerUnavailableError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.status()
            if status.ready:
                return status
            if time.monotonic() > deadline:
                raise ServerUnavailableError(f"the server at {self.endpoint} is not ready after {timeout_s:g} s")
            time.sleep(0.1)

    def close(self) -> None:
        """End live requests and disconnect."""
        for request in list(self.session.live.values()):
            self.send(self.session.abort(request))
        self.session.live.clear()
        self._socket.close()
        self._context.term()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def send(self, body: bytes) -> None:
        """Send one message; used by streams."""
        if not self.session.live:
            self._last_heard = time.monotonic()  # nobody waited for the server until now
        self._socket.send(body, zmq.NOBLOCK)

    def pump(self, timeout_s: float) -> None:
        """Read what arrives within `timeout_s` and give it to its requests."""
        arrived = self._socket.poll(int(timeout_s * 1000))
        self._last_pumped = time.monotonic()
        while arrived:
            try:
                body = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._last_heard = time.monotonic()
            for reply in self.session.receive(body, self._last_heard).replies:
                self._socket.send(reply, zmq.NOBLOCK)
            if self.session.failure is not None:
                raise self.session.failure

    def pump_until(self, done: Callable[[], bool], *, give_up_s: float | None = None, wait_s: float = math.inf) -> None:
        """Read until `done`, or for `wait_s`.

        ServerUnavailableError after `give_up_s` without a message from the server, sooner when it has ended in order.
        """
        give_up_s = self._give_up_s if give_up_s is None else give_up_s
        ask_s = give_up_s / ASKS
        deadline = time.monotonic() + wait_s
        while not done():
            started = time.monotonic()
            if started - self._last_pumped > ask_s:
                self._last_heard = started  # nobody listened: that was not the server's silence
            self.pump(max(0.0, min(ask_s, deadline - started)))
            now = time.monotonic()
            silence_s = now - max(self._last_heard, self._last_asked)
            if silence_s >= ask_s and not done():
                if now - self._last_heard >= give_up_s or has_ended(self.endpoint):
                    error = unavailable(self.endpoint)
                    self.session.fail(error)
                    raise error
                self._last_asked = now
                self._socket.send(self.session.hello(), zmq.NOBLOCK)
            if now >= deadline:
                return


def chosen_sampling(sampling: SamplingParams | None, params: dict[str, Any]) -> SamplingParams:
    """The record given, or one made of keyword arguments."""
    if sampling is not None and params:
        raise TypeError(f"give sampling or its fields ({', '.join(params)}), not both")
    return sampling if sampling is not None else sampling_params(params)


def as_stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    """One stop string or several, as several."""
    return (stop,) if isinstance(stop, str) else tuple(stop)
