"""The supervisor (`pagedserve up`): owns an instance's names, starts its processes, watches, restarts and drains them.

One thread, one poll loop over the children's output, their process handles, signals, and one socket on which it asks
the scheduler for its status until the team is ready. It computes nothing and sees no request.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

import pagedserve
from pagedserve.children import MAX_CRASHES, Child, describe_end
from pagedserve.config import Config, child_environment
from pagedserve.contract import segments
from pagedserve.contract.errors import EndpointInUseError, PagedServeError
from pagedserve.contract.instance import Instance, OwnerLock, reap_dead_instances
from pagedserve.contract.messages import GetStatus, SchedulerMessage, Status, decode, encode
from pagedserve.cores import usable_cores
from pagedserve.log_lines import LogLines

ASK_STATUS_S = 0.1  # while the team loads
DRAIN_S = 3.0  # from SIGTERM to SIGKILL
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Supervisor:
    """One run of an instance, from `run` to its return; `owner` holds its name, and is released at the end.

    `prepare` is called before the processes are started (to fetch a model). With `until_stdin_closes` the end of
    standard input ends the server: whoever started us is gone.
    """

    def __init__(
        self, config: Config, owner: OwnerLock, prepare: Callable[[], None], *, until_stdin_closes: bool = False
    ) -> None:
        cores = usable_cores()
        self._owner = owner
        self._config = msgspec.structs.replace(config, workers=config.workers or cores.number)
        self._cores_reason = cores.reason if not config.workers else "as configured"
        self._prepare = prepare
        self._until_stdin_closes = until_stdin_closes
        self._instance = Instance(config.instance)
        self._log = LogLines(sys.stdout)
        self._scheduler = self._child("scheduler", "pagedserve.scheduler", "--supervised")
        self._workers = [
            self._child(f"worker.{i}", "workers", "--worker-id", str(i)) for i in range(self._config.workers)
        ]
        has_api = importlib.util.find_spec("pagedserve.api.__main__") is not None
        self._api = self._child("api", "pagedserve.api") if config.http and has_api else None
        self._poller = zmq.Poller()
        self._ready = False
        self._asked = 0.0
        self._drain_deadline: float | None = None  # None: not draining
        self._failure: PagedServeError | None = None

    def run(self) -> int:
        """Serve until a signal or a failure; the exit code.

        EndpointInUseError at once when the HTTP port is taken; PagedServeError with a child's own words when it cannot
        load.
        """
        try:
            if self._api is not None:
                _check_port_free(self._config.http_host, self._config.http_port)
            for name in reap_dead_instances():
                self._say(f"removed what was left of instance {name}, whose processes are dead")
            self._prepare()
            self._say(f"{len(self._workers)} workers ({self._cores_reason})")
            self._serve()
        finally:
            self._end()
        if self._failure is not None:
            raise self._failure
        return 0

    # ---- the loop -----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        previous = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
        previous_wakeup = signal.set_wakeup_fd(writing)
        context = zmq.Context()
        status_socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        status_socket.setsockopt(zmq.LINGER, 0)
        status_socket.connect(self._instance.client_endpoint)
        self._poller.register(reading, zmq.POLLIN)
        self._poller.register(status_socket, zmq.POLLIN)
        if self._until_stdin_closes:
            self._poller.register(sys.stdin.fileno(), zmq.POLLIN)
        try:
            for child in self._children():
                self._start(child)
            while any(child.running or child.restart_at is not None for child in self._children()):
                events = dict(self._poller.poll(self._timeout_ms()))
                if reading in events:
                    os.read(reading, 64)
                    self._drain("signal")
                if self._until_stdin_closes and sys.stdin.fileno() in events and not os.read(sys.stdin.fileno(), 4096):
                    self._poller.unregister(sys.stdin.fileno())
                    self._until_stdin_closes = False
                    self._drain("the process that started this server is gone")
                if status_socket in events:
                    self._on_status(decode(status_socket.recv(), SchedulerMessage))
                for child in self._children():
                    if child.running and child.output in events:
                        self._print_output(child)
                    if child.running and child.handle in events:
                        self._on_death(child)
                self._on_time(status_socket)
        finally:
            context.destroy(linger=0)
            signal.set_wakeup_fd(previous_wakeup)
            for number, handler in previous.items():
                signal.signal(number, handler)
            os.close(reading)
            os.close(writing)

    def _timeout_ms(self) -> int | None:
        now = time.monotonic()
        times = [child.restart_at for child in self._children() if child.restart_at is not None]
        if self._drain_deadline is not None:
            times.append(self._drain_deadline)
        elif not self._ready:
            times.append(self._asked + ASK_STATUS_S)
        return max(0, int((min(times) - now) * 1000) + 1) if times else None

    def _on_time(self, status_socket: zmq.Socket[bytes]) -> None:
        now = time.monotonic()
        if self._drain_deadline is not None:
            if now >= self._drain_deadline:
                self._signal_all(signal.SIGKILL)
            return
        for child in self._children():
            if child.restart_at is not None and now >= child.restart_at:
                self._start(child)
        if not self._ready and now >= self._asked + ASK_STATUS_S:
            self._asked = now
            status_socket.send(encode(GetStatus()))

    def _on_status(self, status: object) -> None:
        if self._ready or self._drain_deadline is not None or not isinstance(status, Status):
            return
        num_ready = sum(worker.state in ("ready", "busy") for worker in status.workers)
        if num_ready < len(self._workers) or (self._api is not None and not self._api_answers()):
            return
        self._ready = True
        self._say(ready_line(status, self._endpoints()))

    # ---- children -----------------------------------------------------------------------------------------------

    def _child(self, name: str, module: str, *arguments: str) -> Child:
        # From the folder that holds our packages: a folder named "workers" where the user stands must not be taken.
        folder = Path(pagedserve.__file__).parents[1]
        return Child(name, [sys.executable, "-m", module, *arguments], child_environment(self._config), folder)

    def _children(self) -> list[Child]:
        return [self._scheduler, *self._workers, *([self._api] if self._api is not None else [])]

    def _start(self, child: Child) -> None:
        child.start(time.monotonic())
        self._poller.register(child.output, zmq.POLLIN)
        self._poller.register(child.handle, zmq.POLLIN)

    def _print_output(self, child: Child) -> None:
        for line in child.read_lines():
            self._log.write(child.name, line)

    def _on_death(self, child: Child) -> None:
        self._print_output(child)
        self._poller.unregister(child.output)
        self._poller.unregister(child.handle)
        returncode, lived_s = child.reap(time.monotonic())
        if self._drain_deadline is not None:
            return
        if not self._ready and child.last_line.startswith("error: "):
            self._fail(child.last_line.removeprefix("error: "), returncode)
            return
        delay_s = child.restarts.delay_s(returncode, lived_s)
        if delay_s is None:
            self._fail(
                f"{child.name} ended {MAX_CRASHES} times in a row, at last with {describe_end(returncode)}"
                + (f": {child.last_line}" if child.last_line else ""),
                returncode,
            )
            return
        again = "starting it again" + (f" in {delay_s:g} s" if delay_s else "")
        if child is self._scheduler:
            self._say(f"scheduler ended with {describe_end(returncode)}: {again}, and its workers with it")
            self._lose_workers(time.monotonic() + delay_s)
        else:
            self._say(f"{child.name} ended with {describe_end(returncode)}: {again}")
        child.restart_at = time.monotonic() + delay_s

    def _lose_workers(self, restart_at: float) -> None:
        """End the workers of a scheduler that is dead: they map segments which the next one makes anew."""
        for worker in self._workers:
            if worker.running:
                worker.send_signal(signal.SIGKILL)
                self._poller.unregister(worker.output)
                self._poller.unregister(worker.handle)
                worker.reap(time.monotonic())
            worker.restart_at = restart_at
        segments.unlink_instance(self._instance.tag)
        self._ready = False

    # ---- the end ------------------------------------------------------------------------------------------------

    def _fail(self, message: str, returncode: int) -> None:
        self._failure = PagedServeError(message)
        self._failure.exit_code = returncode if returncode > 0 else 1
        self._drain("failure")

    def _drain(self, reason: str) -> None:
        if self._drain_deadline is None:
            self._say(f"ending ({reason})")
            self._drain_deadline = time.monotonic() + DRAIN_S
            for child in self._children():
                child.restart_at = None
            self._signal_all(signal.SIGTERM)

    def _signal_all(self, number: signal.Signals) -> None:
        for child in self._children():
            child.send_signal(number)

    def _end(self) -> None:
        self._signal_all(signal.SIGKILL)
        for child in self._children():
            if child.running:
                child.reap(time.monotonic())
        self._owner.release()

    # ---- words --------------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        self._log.write("server", text)

    def _endpoints(self) -> list[str]:
        endpoints = [self._instance.client_endpoint]
        if self._config.tcp_endpoint:
            endpoints.append(self._config.tcp_endpoint)
        if self._api is not None:
            endpoints.append(f"http://{self._config.http_host}:{self._config.http_port}")
        return endpoints

    def _api_answers(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(0.2)
            return probe.connect_ex((self._config.http_host, self._config.http_port)) == 0


def ready_line(status: Status, endpoints: list[str]) -> str:
    """The one line that says that the server is ready, and what it is."""
    isas = ", ".join(sorted({worker.isa for worker in status.workers}))
    tokens = status.num_blocks * status.block_size
    return (
        f"ready: {status.model.name} on {isas}, team of {len(status.workers)}, "
        f"pool of {tokens:,} tokens ({status.pool_bytes:,} bytes), at {' '.join(endpoints)}"
    )


def _check_port_free(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: a port in TIME_WAIT is free
        try:
            probe.bind((host, port))
        except OSError as error:
            raise EndpointInUseError(
                f"http://{host}:{port} cannot be opened: {error.strerror} (another port: --http-port, none: --no-http)"
            ) from None
