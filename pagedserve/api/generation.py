"""Generation: what one HTTP request has the server generate, and its end: finished, client gone, or time up."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence

from starlette.types import Receive

from pagedserve.api import answers
from pagedserve.api.errors import HttpError
from pagedserve.api.metrics import RequestMetrics
from pagedserve.client import AsyncStream, Delta
from pagedserve.contract.errors import RequestError

Batch = tuple[int, list[Delta]]  # which prompt, and what is new of its outputs


class Generation:
    """Streams that run side by side, one for each prompt. `close` ends whatever still runs."""

    def __init__(
        self, streams: Sequence[AsyncStream], metrics: RequestMetrics, timeout_s: float, field_name: str
    ) -> None:
        self.streams = list(streams)
        self._field_name = field_name  # of the prompts, for refusals
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._timed_out = False
        self._last_news = [0.0] * len(self.streams)  # 0.0: no token yet
        self._timer: asyncio.TimerHandle | None = None
        if timeout_s:
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self._on_timeout)

    async def accepted(self) -> None:
        """Wait until the first prompt has tokens; the error instead, if it was refused."""
        with self._own_names():
            await self.streams[0].accepted()

    async def batches(self) -> AsyncIterator[Batch]:
        """What arrives, of any prompt, until all have ended.

        HttpError when they end before that: 504 when the time is up, 503 when the server ends.
        """
        if len(self.streams) == 1:
            while deltas := await self._next(0):
                yield 0, deltas
        else:
            async for batch in self._merged():
                yield batch

    def usage(self) -> answers.Usage:
        """Token counts so far."""
        return answers.usage_of(stream.usage for stream in self.streams)

    @contextlib.asynccontextmanager
    async def watched(self, receive: Receive) -> AsyncIterator[None]:
        """While inside, the streams are aborted as soon as the client goes away."""
        watch = asyncio.create_task(self._abort_on_disconnect(receive))
        try:
            yield
        finally:
            watch.cancel()

    def close(self) -> None:
        """End what still runs."""
        if self._timer is not None:
            self._timer.cancel()
        for stream in self.streams:
            stream.abort()

    async def _next(self, prompt: int) -> list[Delta]:
        with self._own_names():
            deltas = await self.streams[prompt].batch()
        now = time.perf_counter()
        if any(delta.finish_reason == "abort" for delta in deltas):
            if self._timed_out:
                raise HttpError(504, "timeout", f"the request took longer than {self._timeout_s:g} s and was ended")
            raise HttpError(503, "unavailable", "the request was ended before it was complete")
        if deltas:
            if self._last_news[prompt]:
                num_tokens = sum(len(delta.token_ids) for delta in deltas)
                self._metrics.tokens(num_tokens, now - self._last_news[prompt])
            self._last_news[prompt] = now
        else:
            self._metrics.finished(self.streams[prompt].usage, self.streams[prompt].timing)
        return deltas

    async def _merged(self) -> AsyncIterator[Batch]:
        news: asyncio.Queue[Batch | BaseException | None] = asyncio.Queue()

        async def feed(prompt: int) -> None:
            try:
                while deltas := await self._next(prompt):
                    news.put_nowait((prompt, deltas))
                news.put_nowait(None)
            except Exception as error:  # raised again where the batches are read
                news.put_nowait(error)

        feeders = [asyncio.create_task(feed(prompt)) for prompt in range(len(self.streams))]
        try:
            num_running = len(feeders)
            while num_running:
                item = await news.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    num_running -= 1
                else:
                    yield item
        finally:
            for feeder in feeders:
                feeder.cancel()

    async def _abort_on_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        for stream in self.streams:
            stream.abort()

    @contextlib.contextmanager
    def _own_names(self) -> Iterator[None]:
        """Refusals by the scheduler name its field for a prompt; the client of this request knows another one."""
        try:
            yield
        except RequestError as error:
            if error.param != "prompt_token_ids":
                raise
            message = str(error).replace("prompt_token_ids", self._field_name)
            raise RequestError(message, code=error.code, param=self._field_name) from None

    def _on_timeout(self) -> None:
        self._timed_out = True
        for stream in self.streams:
            stream.abort()
