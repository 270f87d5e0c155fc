"""Session: one connection's protocol and its live requests. Bytes in, bytes out; the shells around it own the sockets.

If the scheduler is restarted, the session sends every live request again and drops the tokens that it already has: a
request's tokens depend on nothing but itself, so the stream goes on where it stopped.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from pagedserve.client.live import LiveRequest, TextOptions
from pagedserve.contract.errors import PagedServeError, ProtocolError, RequestError, ServerUnavailableError
from pagedserve.contract.messages import (
    PROTOCOL,
    Abort,
    Failure,
    Fork,
    Generate,
    GetStatus,
    Hello,
    SchedulerMessage,
    Status,
    Tokens,
    Welcome,
    decode,
    encode,
    pack_ids,
)
from pagedserve.contract.sampling import SamplingParams
from pagedserve.text.load import TextModel, load_text
from pagedserve.text.stream import TextStream

TextLoader = Callable[[str], TextModel]


class Received(NamedTuple):
    """What one message brought: requests with news, and bodies to send in answer."""

    news: list[LiveRequest]
    replies: list[bytes]


class Session:
    """The client's half of the protocol. `text` is loaded from the model's file when it is first needed."""

    def __init__(self, text_loader: TextLoader = load_text) -> None:
        self.welcome: Welcome | None = None
        self.status: Status | None = None
        self.failure: PagedServeError | None = None  # of a message that belongs to no request
        self.live: dict[str, LiveRequest] = {}
        self._text_loader = text_loader
        self._text: TextModel | None = None
        self._forks: set[str] = set()
        self._unheard: set[str] = set()  # requests that met a scheduler which does not know us: sent again after Hello
        self._resent: set[str] = set()  # after a restart; some may have reached the new scheduler already
        self._counter = itertools.count()

    @property
    def has_text(self) -> bool:
        """Whether `text` is loaded."""
        return self._text is not None

    @property
    def text(self) -> TextModel:
        """The model's tokenizer and chat template; ModelError when its file cannot be read here."""
        if self._text is None:
            assert self.welcome is not None
            self._text = self._text_loader(self.welcome.model.path)
        return self._text

    def hello(self) -> bytes:
        """The body that opens the connection, or asks whether it still leads to the same scheduler."""
        return encode(Hello(protocol=PROTOCOL, client="pagedserve.client"))

    def get_status(self, *, blocks: bool = False) -> bytes:
        """The body that asks for Status."""
        return encode(GetStatus(blocks=blocks))

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        options: TextOptions,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        now: float,
    ) -> tuple[LiveRequest, bytes]:
        """A new live request and the body that starts it. RequestError when a parameter is out of range."""
        if options.stop and not options.detokenize:
            raise RequestError("stop: strings cannot be matched without detokenize", param="stop")
        sampling.validate()
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=secrets.randbits(63))
        token_ids = self.text.prompt(prompt) if isinstance(prompt, str) else prompt
        request_id = request_id if request_id is not None else f"r{next(self._counter)}"
        if request_id in self.live:
            raise RequestError(f"request_id: {request_id!r} is running already", param="request_id")
        message = Generate(
            request_id=request_id,
            prompt_token_ids=pack_ids(token_ids),
            sampling=sampling,
            priority=priority,
            cache_salt=cache_salt,
        )
        request = LiveRequest(message, self._texts(sampling.n, options), options, now)
        self.live[request_id] = request
        return request, encode(message)

    def fork(
        self, parent: LiveRequest, options: TextOptions, seed: int | None, now: float
    ) -> tuple[LiveRequest, bytes]:
        """A copy of a running request, and the body that makes it. Its stream starts from the prompt."""
        new_id = f"r{next(self._counter)}"
        seed = secrets.randbits(63) if seed is None else seed
        message = msgspec.structs.replace(parent.message, request_id=new_id)
        request = LiveRequest(message, self._texts(1, options), options, now)
        self.live[new_id] = request
        self._forks.add(new_id)
        return request, encode(Fork(request_id=parent.request_id, new_request_id=new_id, seed=seed))

    def abort(self, request: LiveRequest) -> bytes:
        """The body that ends a request; the scheduler answers with its last record."""
        request.aborting = True
        return encode(Abort(request_id=request.request_id))

    def forget(self, request: LiveRequest) -> None:
        """Nobody reads this request any more: what still arrives for it is dropped."""
        self.live.pop(request.request_id, None)
        self._forks.discard(request.request_id)
        self._unheard.discard(request.request_id)
        self._resent.discard(request.request_id)

    def receive(self, body: bytes, now: float) -> Received:
        """Take one message. ProtocolError when it is none."""
        message = decode(body, SchedulerMessage)
        if isinstance(message, Tokens):
            return self._on_tokens(message, now)
        if isinstance(message, Failure):
            return self._on_failure(message)
        if isinstance(message, Status):
            self.status = message
            return Received([], [])
        return self._on_welcome(message)

    def fail(self, error: PagedServeError) -> None:
        """End every live request with this error."""
        self.failure = error
        for request in list(self.live.values()):
            request.fail(error)
            self.forget(request)

    def _texts(self, num_sequences: int, options: TextOptions) -> list[TextStream | None]:
        if not options.detokenize:
            return [None] * num_sequences
        return [
            TextStream(
                self.text.tokenizer,
                stop=options.stop,
                include_stop_str=options.include_stop_str,
                skip_special_tokens=options.skip_special_tokens,
            )
            for _ in range(num_sequences)
        ]

    def _on_tokens(self, message: Tokens, now: float) -> Received:
        received = Received([], [])
        for record in message.outputs:
            request = self.live.get(record.request_id)
            if request is None:
                continue
            request.feed(record, now)
            if request.must_abort:
                received.replies.append(encode(Abort(request_id=request.request_id, finish_reason="stop")))
                request.finished = True
            if request.finished:
                self.forget(request)
            received.news.append(request)
        return received

    def _on_failure(self, message: Failure) -> Received:
        if message.request_id is None:
            self.failure = ProtocolError(message.message)
            return Received([], [])
        request = self.live.get(message.request_id)
        if request is None:
            return Received([], [])
        if message.code == "protocol":  # a new scheduler, which wants a Hello first
            self._unheard.add(request.request_id)
            return Received([], [self.hello()])
        if message.param == "request_id" and request.request_id in self._resent:  # it has the first copy
            return Received([], [])
        request.fail(RequestError(message.message, code=message.code, param=message.param))
        self.forget(request)
        return Received([request], [])

    def _on_welcome(self, message: Welcome) -> Received:
        restarted = self.welcome is not None and message.scheduler_id != self.welcome.scheduler_id
        self.welcome = message
        received = Received([], [])
        again = list(self.live if restarted else self._unheard)
        self._unheard.clear()
        for request in [self.live[request_id] for request_id in again]:
            if request.request_id in self._forks:
                request.fail(ServerUnavailableError("the scheduler was restarted; a fork cannot be computed again"))
                self.forget(request)
                received.news.append(request)
            elif request.aborting:
                request.end_aborted()
                self.forget(request)
                received.news.append(request)
            else:
                request.rewind()
                self._resent.add(request.request_id)
                received.replies.append(encode(request.message))
        return received
