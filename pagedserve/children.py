"""Child: one process under the supervisor, its output by lines, and the rule for starting it again when it dies."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from pagedserve.contract.parent import die_with_parent

MAX_CRASHES = 5  # in a row, before the supervisor gives up
QUICK_S = 10.0  # a process that lived longer than this starts with a clean record
KILLED_BY_SOMEBODY = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Restarts:
    """When to start a process again: at once, then ever later while it goes on dying young; None after MAX_CRASHES.

    Only an end of its own doing counts as a crash: a process that others kill is restarted without end, soon.
    """

    def __init__(self) -> None:
        self._num_young_deaths = 0
        self._num_crashes = 0

    def delay_s(self, returncode: int, lived_s: float) -> float | None:
        """Seconds to wait after this death; None: give up."""
        if lived_s > QUICK_S:
            self._num_young_deaths = self._num_crashes = 0
        killed = returncode < 0 and -returncode in KILLED_BY_SOMEBODY
        self._num_crashes += not killed
        if self._num_crashes >= MAX_CRASHES:
            return None
        delay = 0.0 if self._num_young_deaths == 0 else min(0.125 * 2**self._num_young_deaths, 1.0 if killed else 8.0)
        self._num_young_deaths += 1
        return delay


class Child:
    """A process that is started, watched and started again. Owns its pipe and its process handle (pidfd)."""

    def __init__(self, name: str, arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self.name = name
        self.restarts = Restarts()
        self.restart_at: float | None = None  # when a dead one is to be started; None while it runs
        self.last_line = ""
        self._arguments = list(arguments)
        self._environment = environment
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._partial = b""
        self._started = 0.0

    @property
    def running(self) -> bool:
        """Whether there is a process that has not been reaped."""
        return self._process is not None

    @property
    def output(self) -> int:
        """The descriptor to read lines from; readable when there are some."""
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout.fileno()

    @property
    def handle(self) -> int:
        """The process handle; readable when the process has ended."""
        return self._pidfd

    def start(self, now: float) -> None:
        """Start the process. It dies with us, and leaves Ctrl-C to us."""
        parent_pid = os.getpid()

        def prepare() -> None:
            die_with_parent(parent_pid)
            signal.signal(signal.SIGINT, signal.SIG_IGN)

        self._process = subprocess.Popen(
            self._arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment,
            cwd=self._folder,
            preexec_fn=prepare,  # noqa: PLW1509 - this process has one thread
        )
        os.set_blocking(self.output, False)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._started = now
        self.restart_at = None
        self.last_line = ""
        self._partial = b""

    def read_lines(self) -> list[str]:
        """The complete lines that are there; after the end also what has no newline."""
        chunks = [self._partial]
        ended = False
        while True:
            try:
                chunk = os.read(self.output, 65536)
            except BlockingIOError:
                break
            if not chunk:
                ended = True
                break
            chunks.append(chunk)
        *lines, self._partial = b"".join(chunks).split(b"\n")
        if ended and self._partial:
            lines.append(self._partial)
            self._partial = b""
        texts = [line.decode(errors="replace").rstrip("\r") for line in lines]
        self.last_line = next((text for text in reversed(texts) if text.strip()), self.last_line)
        return texts

    def reap(self, now: float) -> tuple[int, float]:
        """Take leave of a process that has ended: its return code (negative: the signal) and how long it lived."""
        assert self._process is not None and self._process.stdout is not None
        returncode = self._process.wait()
        self._process.stdout.close()
        os.close(self._pidfd)
        self._process = None
        return returncode, now - self._started

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if it runs."""
        if self._process is not None:
            signal.pidfd_send_signal(self._pidfd, number)


def describe_end(returncode: int) -> str:
    """In words: exit code 1, or SIGKILL."""
    return f"exit code {returncode}" if returncode >= 0 else signal.Signals(-returncode).name
