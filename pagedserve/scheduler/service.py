"""The scheduler's shell: sockets, clocks and process handles around the pure core (Scheduler) and the Team.

Decides nothing: every event goes to the core, every message the core gives goes out. One thread, one poll loop.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from pagedserve.contract import segments
from pagedserve.contract.control import Control
from pagedserve.contract.errors import ProtocolError, RequestError
from pagedserve.contract.messages import (
    PROTOCOL,
    Abort,
    ClientMessage,
    Failure,
    Fork,
    Generate,
    GetStatus,
    Hello,
    Join,
    Message,
    ModelInfo,
    Ready,
    SequenceTokens,
    Shutdown,
    Status,
    Tokens,
    Welcome,
    WorkerMessage,
    decode,
    encode,
)
from pagedserve.scheduler.invariants import InvariantError
from pagedserve.scheduler.rounds import rounds_in_time
from pagedserve.scheduler.scheduler import Scheduler
from pagedserve.scheduler.team import Outgoing, Team

log = logging.getLogger("pagedserve.scheduler")

Handler = Callable[[bytes, bytes], None]

KEEPALIVE_S = 0.5  # a client that waits longer for a token gets an empty message, which tells us if it is gone
POLL_MS = 250
AHEAD_S = 0.004  # the next step is planned this long before the running one should end: who comes until then is in it
ABORT_GRACE_S = 2.0  # from raising the abort flag to ending the workers that did not answer even then


@dataclass(frozen=True)
class ServiceSettings:
    """What the service needs to know. Endpoints are ZeroMQ's; the first of the clients' is the instance's own."""

    instance: str
    tag: str
    client_endpoints: tuple[str, ...]
    worker_endpoint: str
    model: ModelInfo
    block_size: int
    num_blocks: int
    pool_bytes: int
    max_num_seqs: int
    step_timeout_s: float


@dataclass
class _Client:
    """A connected client: when it was last sent something, and which of its requests live."""

    last_sent: float
    request_ids: set[str] = field(default_factory=set)


class Service:
    """Serve until `stop` is called (from a signal handler) or the process ends."""

    def __init__(self, settings: ServiceSettings, scheduler: Scheduler, team: Team) -> None:
        self._settings = settings
        self._scheduler = scheduler
        self._team = team
        self._context = zmq.Context()
        self._clients_socket = self._bind(settings.client_endpoints)
        self._workers_socket = self._bind((settings.worker_endpoint,))
        self._clients: dict[bytes, _Client] = {}
        self._pidfds: dict[int, int] = {}  # pidfd -> worker_id
        self._poller = zmq.Poller()
        self._poller.register(self._clients_socket, zmq.POLLIN)
        self._poller.register(self._workers_socket, zmq.POLLIN)
        self._control: Control | None = None
        self._team_segment: segments.Segment | None = None
        self._outputs: list[tuple[bytes, SequenceTokens]] = []
        self._running = True
        self._started = time.monotonic()
        self._step_started = self._ahead_at = 0.0
        self._round_s = 0.0  # of the last step, a round; 0 before the first
        self._aborted_late_step = False
        self._num_steps = 0
        self._step_time_s = self._kernel_time_s = 0.0
        self._scheduler_id = secrets.token_hex(8)

    def stop(self) -> None:
        """Leave the loop after the current events."""
        self._running = False

    def run(self) -> None:
        """Poll sockets and process handles, feed the core, send what it says."""
        while self._running:
            events = dict(self._poller.poll(self._poll_ms()))
            if self._workers_socket in events:
                self._drain(self._workers_socket, self._on_worker)
            for handle in [fd for fd in events if isinstance(fd, int)]:
                self._on_worker_death(self._pidfds.pop(handle), handle)
            if self._clients_socket in events:
                self._drain(self._clients_socket, self._on_client)
            now = time.monotonic()  # after the requests that have just come
            self._step(now)
            self._send_outputs()  # while the team computes already
            self._step_ahead()
            self._keep_alive(now)
            self._end_stuck_step(now)
        for identity in self._team.identities():
            self._send_worker(identity, Shutdown())
        self._context.destroy(linger=200)

    # ---- sockets ------------------------------------------------------------------------------------------------

    def _bind(self, endpoints: tuple[str, ...]) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.SNDHWM, 100_000)
        for endpoint in endpoints:
            socket.bind(endpoint)
        return socket

    def _drain(self, socket: zmq.Socket[bytes], handle: Handler) -> None:
        for _ in range(1000):  # a flood on one socket must not starve the other
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 2:
                log.warning("dropped a message of %d frames; expected an identity and a body", len(frames))
                continue
            try:
                handle(frames[0], frames[1])
            except ProtocolError as error:
                log.warning("dropped a message: %s", error)
                if socket is self._clients_socket:
                    self._send_client(frames[0], Failure(code="protocol", message=str(error)))

    def _send_client(self, identity: bytes, message: Message) -> None:
        try:
            self._clients_socket.send_multipart((identity, encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            if identity in self._clients:
                reason = "went away" if error.errno == zmq.EHOSTUNREACH else "does not read its messages"
                log.info("client %s %s: its requests end", identity.hex(), reason)
                del self._clients[identity]
                self._scheduler.abort_client(identity)
            return
        if identity in self._clients:
            self._clients[identity].last_sent = time.monotonic()

    def _send_worker(self, identity: bytes, message: Message) -> None:
        try:
            self._workers_socket.send_multipart((identity, encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:  # it died: its pidfd says so too
            log.info("a worker cannot be reached: %s", error)

    def _send_team(self, outgoing: Outgoing) -> None:
        bodies: dict[int, bytes] = {}
        for identity, message in outgoing:
            body = bodies.get(id(message))
            if body is None:
                body = bodies[id(message)] = encode(message)
            try:
                self._workers_socket.send_multipart((identity, body), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                log.info("a worker cannot be reached: %s", error)

    # ---- clients ------------------------------------------------------------------------------------------------

    def _on_client(self, identity: bytes, body: bytes) -> None:
        message = decode(body, ClientMessage)
        now = time.monotonic()
        request_id = getattr(message, "request_id", None)
        if isinstance(message, Hello):
            if message.protocol != PROTOCOL:
                text = f"protocol {message.protocol} is not spoken here, expected {PROTOCOL}"
                self._send_client(identity, Failure(code="protocol", message=text, param="protocol"))
                return
            self._clients.setdefault(identity, _Client(now))
            self._send_client(identity, self._welcome())
            return
        if isinstance(message, GetStatus):
            self._send_client(identity, self._status(message.blocks, now))
            return
        client = self._clients.get(identity)
        if client is None:
            self._send_client(
                identity, Failure(code="protocol", message="say Hello first", request_id=request_id)
            )
            return
        try:
            if isinstance(message, Generate):
                self._scheduler.add(identity, message, now)
                client.request_ids.add(message.request_id)
            elif isinstance(message, Fork):
                request_id = message.new_request_id
                self._scheduler.fork(identity, message, now)
                client.request_ids.add(message.new_request_id)
            elif isinstance(message, Abort):
                self._outputs += self._scheduler.abort(identity, message.request_id, message.finish_reason)
        except RequestError as error:
            failure = Failure(code=error.code, message=str(error), request_id=request_id, param=error.param)
            self._send_client(identity, failure)

    def _send_outputs(self) -> None:
        """Send each client all that its requests were given since the last time, in one message."""
        by_client: dict[bytes, list[SequenceTokens]] = defaultdict(list)
        outputs, self._outputs = self._outputs, []
        for identity, output in outputs:
            by_client[identity].append(output)
            client = self._clients.get(identity)
            if output.finished and client is not None:
                client.request_ids.discard(output.request_id)
        for identity, records in by_client.items():
            if identity in self._clients:
                self._send_client(identity, Tokens(outputs=tuple(records)))

    def _keep_alive(self, now: float) -> None:
        for identity, client in list(self._clients.items()):
            if client.request_ids and now - client.last_sent > KEEPALIVE_S:
                self._send_client(identity, Tokens(outputs=()))

    def _welcome(self) -> Welcome:
        s = self._settings
        return Welcome(
            protocol=PROTOCOL,
            instance=s.instance,
            model=s.model,
            block_size=s.block_size,
            num_blocks=s.num_blocks,
            max_num_seqs=s.max_num_seqs,
            ready=self._is_ready(),
            scheduler_id=self._scheduler_id,
        )

    def _is_ready(self) -> bool:
        return any(worker.state in ("ready", "busy") for worker in self._team.status())

    def _status(self, blocks: bool, now: float) -> Status:
        s = self._settings
        snapshot = self._scheduler.snapshot(blocks)
        return Status(
            instance=s.instance,
            model=s.model,
            ready=self._is_ready(),
            uptime_s=now - self._started,
            scheduler_pid=os.getpid(),
            workers=self._team.status(),
            block_size=s.block_size,
            num_blocks=s.num_blocks,
            pool_bytes=s.pool_bytes,
            weights_bytes=self._team.weights_bytes,
            num_steps=self._num_steps,
            step_time_s=self._step_time_s,
            kernel_time_s=self._kernel_time_s,
            **snapshot,
        )

    # ---- workers ------------------------------------------------------------------------------------------------

    def _on_worker(self, identity: bytes, body: bytes) -> None:
        message = decode(body, WorkerMessage)
        if isinstance(message, Join):
            self._on_join(identity, message)
        elif not self._team.has(message.worker_id):
            log.warning("dropped %s of worker %d, which has not joined", type(message).__name__, message.worker_id)
        elif isinstance(message, Ready):
            self._send_team(self._team.ready(message))
            if self._control is None:
                self._team_segment = segments.attach(segments.segment_name(self._settings.tag, "team"))
                self._control = Control(self._team_segment.memory)
            log.info("worker %d is ready (%s)", message.worker_id, message.isa)
        else:
            self._team.result(message)
            while (result := self._team.finish_step()) is not None:
                now = time.monotonic()
                num_rounds = self._scheduler.in_flight[0].num_rounds
                self._num_steps += num_rounds
                self._step_time_s += result.step_time_s
                self._kernel_time_s += result.kernel_time_s
                # Where two answers were read at once, only the worker knows how long the second step took.
                self._round_s = max(now - self._step_started, result.step_time_s) / num_rounds
                try:
                    self._outputs += self._scheduler.apply(result)
                except ProtocolError as error:  # a bug of ours: better a new scheduler than one that waits for ever
                    raise InvariantError(f"a worker's result does not fit its plan: {error}") from None
                self._begin_step(now)  # the one that was sent ahead, if there is one

    def _on_join(self, identity: bytes, message: Join) -> None:
        if message.protocol != PROTOCOL or self._team.has(message.worker_id):
            text = (
                f"protocol {message.protocol} is not spoken here, expected {PROTOCOL}"
                if message.protocol != PROTOCOL
                else f"a worker with worker_id {message.worker_id} is already here"
            )
            self._send_worker(identity, Failure(code="protocol", message=text))
            return
        try:
            handle = os.pidfd_open(message.pid)
        except OSError:
            log.warning("dropped Join of process %d, which is not alive on this machine", message.pid)
            return
        worker_id, outgoing = self._team.join(message, identity)
        self._pidfds[handle] = worker_id
        self._poller.register(handle, zmq.POLLIN)
        self._send_team(outgoing)

    def _on_worker_death(self, worker_id: int, handle: int) -> None:
        self._poller.unregister(handle)
        os.close(handle)
        if self._running:  # at the end everybody dies
            log.warning("worker %d died", worker_id)
        in_step, outgoing = self._team.lose(worker_id)
        if in_step and self._control is not None:
            self._control.abort()
        self._send_team(outgoing)

    def _step(self, now: float) -> None:
        if self._team.must_retry and self._control is not None:
            self._control.reset()
            outgoing = self._team.retry()
            if outgoing:
                log.warning("step sent again to %d workers", len({identity for identity, _ in outgoing}))
                self._begin_step(now)
                self._send_team(outgoing)
        elif not self._scheduler.in_flight and self._team.can_start and self._scheduler.has_work:
            plan = self._scheduler.plan(now, rounds_in_time(self._round_s))
            if plan is not None:
                self._begin_step(now)
                self._send_team(self._team.start(plan))

    def _begin_step(self, now: float) -> None:
        self._step_started, self._aborted_late_step = now, False
        num_rounds = sum(plan.num_rounds for plan in self._scheduler.in_flight[:1])
        self._ahead_at = now + num_rounds * self._round_s - AHEAD_S

    def _step_ahead(self) -> None:
        """Plan the step after the running one, once that is about to end."""
        now = time.monotonic()
        if self._waits_to_step_ahead and now >= self._ahead_at:
            self._ahead_at = math.inf  # if it cannot be planned now, it is after the result
            plan = self._scheduler.plan(now, rounds_in_time(self._round_s))
            if plan is not None:
                self._send_team(self._team.start(plan))

    @property
    def _waits_to_step_ahead(self) -> bool:
        return len(self._scheduler.in_flight) == 1 and self._ahead_at < math.inf and self._team.can_start

    def _poll_ms(self) -> int:
        if not self._waits_to_step_ahead:
            return POLL_MS
        return min(POLL_MS, max(0, math.ceil(1000 * (self._ahead_at - time.monotonic()))))

    def _end_stuck_step(self, now: float) -> None:
        """Free a step that takes too long; a worker that does not answer even then (stopped, wedged) is ended."""
        late = now - self._step_started - self._settings.step_timeout_s
        if late <= 0 or not self._team.stuck_pids or self._control is None:
            return
        if not self._aborted_late_step:
            log.error("a step has run for %.0f s: it is aborted", now - self._step_started)
            self._aborted_late_step = True
            self._control.abort()
        elif late > ABORT_GRACE_S:
            for pid in self._team.stuck_pids:
                log.error("worker process %d does not answer: it is ended", pid)
                os.kill(pid, signal.SIGKILL)
            self._step_started = now
