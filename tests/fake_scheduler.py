"""A scheduler for client tests: real ZeroMQ and msgpack, scripted tokens, in a thread of the test's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from pagedserve.contract.messages import (
    PROTOCOL,
    Abort,
    ClientMessage,
    Failure,
    Fork,
    Generate,
    GetStatus,
    Hello,
    Message,
    ModelInfo,
    SequenceTokens,
    Status,
    Tokens,
    Welcome,
    WorkerStatus,
    decode,
    encode,
    pack_ids,
)

Script = Callable[[Generate], list[list[SequenceTokens]]]  # the records of each step

MODEL = ModelInfo(name="demo", path="demo", architecture="llama", vocab_size=259, max_model_len=4096)


def byte_steps(text: bytes, *, size: int = 1, finish_reason: str = "length") -> Script:
    """A script that answers every sequence with these bytes, `size` tokens a step."""

    def script(message: Generate) -> list[list[SequenceTokens]]:
        cuts = range(0, len(text), size)
        return [
            [
                SequenceTokens(
                    request_id=message.request_id,
                    index=index,
                    token_ids=pack_ids(list(text[cut : cut + size])),
                    finish_reason=finish_reason if cut == cuts[-1] else None,
                    finished=cut == cuts[-1] and index == message.sampling.n - 1,
                    num_cached_tokens=16 if cut == 0 else 0,
                )
                for index in range(message.sampling.n)
            ]
            for cut in cuts
        ]

    return script


class FakeScheduler:
    """Serves until closed. What it was sent is in `received`.

    `hold_after` steps it stops answering requests; a step takes `step_s`.
    """

    def __init__(
        self,
        path: Path,
        script: Script,
        *,
        scheduler_id: str = "one",
        hold_after: int | None = None,
        step_s: float = 0.0,
    ) -> None:
        self.endpoint = f"ipc://{path}"
        self.received: list[Message] = []
        self.protocol = PROTOCOL
        self.ready = True
        self.refusal: Failure | None = None
        self._script = script
        self._scheduler_id = scheduler_id
        self._hold_after = hold_after
        self._step_s = step_s
        self._due: list[tuple[float, bytes, str, Message]] = []  # time, client, request_id, what it gets then
        self._known: set[bytes] = set()
        self._stop = threading.Event()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(self.endpoint)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def of_kind(self, kind: type[Message]) -> list[Message]:
        """The messages of one kind that came so far."""
        return [message for message in self.received if isinstance(message, kind)]

    def close(self) -> None:
        """Go away without a word, as a process that is killed does."""
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def __enter__(self) -> FakeScheduler:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._stop.is_set():
            self.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(5 if self._due else 20):
                identity, body = self._socket.recv_multipart()
                message = decode(body, ClientMessage)
                self.received.append(message)
                if isinstance(message, Hello):
                    self._known.add(identity)
                for answer in self._answers(message, identity):
                    self._socket.send_multipart((identity, encode(answer)))
            now = time.monotonic()
            for _, identity, _, answer in [due for due in self._due if due[0] <= now]:
                self._socket.send_multipart((identity, encode(answer)))
            self._due = [due for due in self._due if due[0] > now]

    def _answers(self, message: Message, identity: bytes) -> list[Message]:
        if isinstance(message, Hello):
            if message.protocol != self.protocol:
                return [Failure(code="protocol", message=f"protocol {message.protocol} is not spoken here")]
            return [
                Welcome(
                    protocol=PROTOCOL,
                    instance="fake",
                    model=MODEL,
                    block_size=16,
                    num_blocks=64,
                    max_num_seqs=8,
                    ready=self.ready,
                    scheduler_id=self._scheduler_id,
                )
            ]
        if isinstance(message, GetStatus):
            return [self._status(blocks=message.blocks)]
        if isinstance(message, Generate):
            if self.refusal is not None:
                return [self.refusal]
            if identity not in self._known:
                return [Failure(code="protocol", message="say Hello first", request_id=message.request_id)]
            steps = [Tokens(outputs=tuple(records)) for records in self._script(message)[: self._hold_after]]
            if not self._step_s:
                return list(steps)
            now = time.monotonic()
            for i, step in enumerate(steps, 1):
                self._due.append((now + i * self._step_s, identity, message.request_id, step))
            return []
        if isinstance(message, Abort):
            self._due = [due for due in self._due if due[2] != message.request_id]
            end = SequenceTokens(request_id=message.request_id, finish_reason=message.finish_reason, finished=True)
            return [Tokens(outputs=(end,))]
        assert isinstance(message, Fork)
        end = SequenceTokens(
            request_id=message.new_request_id, token_ids=pack_ids(list(b"fork")), finish_reason="length", finished=True
        )
        return [Tokens(outputs=(end,))]

    def _status(self, *, blocks: bool) -> Status:
        return Status(
            instance="fake",
            model=MODEL,
            ready=self.ready,
            uptime_s=1.0,
            scheduler_pid=1,
            workers=(WorkerStatus(worker_id=0, pid=2, state="ready", isa="avx2"),),
            num_running=0,
            num_waiting=0,
            block_size=16,
            num_blocks=64,
            pool_bytes=1,
            weights_bytes=1,
            num_free_blocks=64,
            num_cached_blocks=0,
            num_referenced_blocks=0,
            num_steps=0,
            num_prompt_tokens=0,
            num_generation_tokens=0,
            num_cached_tokens=0,
            num_queried_tokens=0,
            num_preemptions=0,
            num_draft_tokens=0,
            num_accepted_tokens=0,
            num_finished={},
            block_states=bytes(i % 4 for i in range(64)) if blocks else b"",
        )
