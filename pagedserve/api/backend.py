"""Backend: the connection to the scheduler, made when there is one and made anew when it was lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from pagedserve.client import AsyncClient
from pagedserve.contract.errors import PagedServeError, ServerUnavailableError
from pagedserve.contract.messages import Status
from pagedserve.text.load import TextModel

log = logging.getLogger("pagedserve.api")

_RETRY_S = 0.1
_LOOK_S = 0.5  # at whether the connection still holds
_HOPELESS_RETRY_S = 5.0
_STATUS_TIMEOUT_S = 2.0
_QUICK_CHARACTERS = 2000  # a text of this length is tokenised faster than a thread is woken

T = TypeVar("T")


class Backend:
    """Stays connected between `start` and `stop`. While it is not, `client` and `text` raise ServerUnavailableError."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._client: AsyncClient | None = None
        self._text: TextModel | None = None
        self._connection: asyncio.Task[None] | None = None
        self._asking = asyncio.Lock()  # the client takes any status that comes for the one that was asked for

    @property
    def client(self) -> AsyncClient:
        """The connected client."""
        if self._client is None:
            raise ServerUnavailableError("the server is starting or was lost; try again soon")
        return self._client

    @property
    def text(self) -> TextModel:
        """The model's tokenizer and chat template."""
        if self._text is None:
            raise ServerUnavailableError("the server is starting; try again soon")
        return self._text

    def start(self) -> None:
        """Begin to connect, in the running event loop."""
        self._connection = asyncio.create_task(self._stay_connected())

    async def stop(self) -> None:
        """Disconnect; streams that still run end with ServerUnavailableError."""
        if self._client is not None:
            await self._client.close("the server is ending; try again soon")
        if self._connection is not None:
            self._connection.cancel()
            await asyncio.gather(self._connection, return_exceptions=True)

    async def status(self, *, blocks: bool = False) -> Status:
        """The server's state now; ServerUnavailableError when nobody tells."""
        async with self._asking:
            return await self.client.status(blocks=blocks, timeout_s=_STATUS_TIMEOUT_S)

    async def ready(self) -> bool:
        """Whether a request would be computed."""
        try:
            return (await self.status()).ready
        except ServerUnavailableError:
            return False

    async def _stay_connected(self) -> None:
        while True:
            try:
                async with AsyncClient(self._endpoint) as client:
                    await self._use(client)
            except ServerUnavailableError:
                await asyncio.sleep(_RETRY_S)
            except PagedServeError as error:  # another version, an unreadable model: somebody has to act
                log.error("%s", error)
                await asyncio.sleep(_HOPELESS_RETRY_S)

    async def _use(self, client: AsyncClient) -> None:
        """Offer the client until it fails."""
        self._text = await client.load_text()
        self._client = client
        log.info("connected to %s, model %s", self._endpoint, client.model.name)
        try:
            while client.session.failure is None:
                await asyncio.sleep(_LOOK_S)
        finally:
            self._client = None
        log.warning("connection lost: %s", client.session.failure)


async def tokenized(texts: Sequence[str], tokenize: Callable[[], T]) -> T:
    """What `tokenize` gives; outside the event loop when the texts are long."""
    if sum(map(len, texts)) < _QUICK_CHARACTERS:
        return tokenize()
    return await asyncio.to_thread(tokenize)
