"""Worker: one process of the team. Joins, maps the segments, then answers each StepPlan with a StepResult.

Keeps no request state: everything a step needs is in its plan and in shared memory.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time

import zmq

from pagedserve.contract.errors import ProtocolError
from pagedserve.contract.instance import Instance
from pagedserve.contract.messages import (
    PROTOCOL,
    Failure,
    Join,
    Message,
    Ready,
    Setup,
    Shutdown,
    StepPlan,
    StepResult,
    TeamMessage,
    decode,
    encode,
)
from pagedserve.models.open import open_checkpoint
from workers import arena, weights
from workers.forward import Forward

log = logging.getLogger("workers")


class Worker:
    """A connected worker. `isa` is the instruction set that its kernels were compiled for."""

    def __init__(self, socket: zmq.Socket[bytes], setup: Setup, isa: str) -> None:
        started = time.monotonic()
        self._socket = socket
        self._setup = setup
        self._isa = isa
        if setup.prepare:
            checkpoint = open_checkpoint(setup.model_path)
            spec = dataclasses.replace(checkpoint.spec, max_model_len=setup.max_model_len)
            mapped = weights.prepare(setup.tag, checkpoint, spec, setup.compute, setup.quantize)
            shared = arena.create(setup, mapped.layout)
        else:
            mapped = weights.attach(setup.tag)
            shared = arena.attach(setup, mapped.layout)
        self._weights = mapped
        self._arena = shared
        self._forward = Forward(setup, mapped, shared)
        verb = "packed" if setup.prepare else "mapped"
        log.info("%s %.1f MB of weights in %.2f s", verb, mapped.num_bytes / 1e6, time.monotonic() - started)

    def run(self) -> None:
        """Answer plans until Shutdown."""
        ready = Ready(
            worker_id=self._setup.worker_id,
            isa=self._isa,
            weights_bytes=self._weights.num_bytes,
            team_bytes=self._arena.num_bytes,
        )
        self._socket.send(encode(ready))
        while True:
            message = receive(self._socket)
            if isinstance(message, StepPlan) and self._setup.worker_id in message.team:
                self._socket.send(encode(self._step(message)))
            elif isinstance(message, Shutdown):
                return
            else:
                log.warning("dropped %s: expected a StepPlan for this worker, or Shutdown", type(message).__name__)

    def _step(self, plan: StepPlan) -> StepResult:
        started = time.perf_counter()
        worker_id = self._setup.worker_id
        completed = self._forward.run(plan)
        kernel_time_s = time.perf_counter() - started
        if not completed or plan.team[0] != worker_id:
            return StepResult(step_id=plan.step_id, worker_id=worker_id, ok=completed)
        return StepResult(
            step_id=plan.step_id,
            worker_id=worker_id,
            ok=True,
            step_time_s=time.perf_counter() - started,
            kernel_time_s=kernel_time_s,
            **self._forward.results(plan),
        )


def join(instance: Instance, worker_id: int) -> zmq.Socket[bytes]:
    """Connect to the scheduler and say so; Setup will come on the socket that is returned."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 200)
    socket.connect(instance.worker_endpoint)
    socket.send(encode(Join(protocol=PROTOCOL, worker_id=worker_id, pid=os.getpid())))
    return socket


def receive(socket: zmq.Socket[bytes]) -> Message:
    """The next message of the scheduler; ProtocolError when it refused this worker."""
    message: Message = decode(socket.recv(), TeamMessage)
    if isinstance(message, Failure):
        raise ProtocolError(message.message)
    return message
