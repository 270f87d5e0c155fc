"""A real server for integration tests: `pagedserve up` in a run folder of its own, with its output and processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from pagedserve.contract.instance import Instance

REPOSITORY = Path(__file__).parents[1]
START_S = 240.0  # the first start on a machine compiles the kernels
TINY = ("--until-stdin-closes", "--model", "demo", "--workers", "2", "--pool-tokens", "4096", "--no-http")


def command(*arguments: str) -> list[str]:
    """The command line of this interpreter's pagedserve."""
    return [sys.executable, "-m", "pagedserve", *arguments]


class RunFolder:
    """A place for instances that no other test sees: short, since socket paths are."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="ps-"))
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PAGEDSERVE_")},
            "XDG_RUNTIME_DIR": str(self.path),
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONUNBUFFERED": "1",
        }

    def endpoint(self, name: str = "default") -> str:
        """Where clients of an instance here connect."""
        return f"ipc://{self.path}/pagedserve/{name}/clients.sock"

    def segments(self) -> list[str]:
        """The shared segments of the instances here."""
        names = [folder.name for folder in (self.path / "pagedserve").glob("*")] or ["default"]
        tags = [self.tag(name) for name in names]
        return [file.name for file in Path("/dev/shm").glob("pagedserve-*") if any(tag in file.name for tag in tags)]

    def tag(self, name: str = "default") -> str:
        """The instance's part of segment names."""
        previous = os.environ.get("XDG_RUNTIME_DIR")
        os.environ["XDG_RUNTIME_DIR"] = str(self.path)
        try:
            return Instance(name).tag
        finally:
            if previous is None:
                del os.environ["XDG_RUNTIME_DIR"]
            else:
                os.environ["XDG_RUNTIME_DIR"] = previous

    def run(self, *arguments: str, text: str = "", timeout_s: float = START_S) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, with `text` as its standard input."""
        return subprocess.run(
            command(*arguments),
            check=False,
            env=self.environment,
            input=text,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=self.path,
        )

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)


class Running:
    """A process whose output is collected while it runs. A server (TINY) does not outlive the tests."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path = REPOSITORY) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            arguments,
            env=environment,
            cwd=folder,
            stdin=subprocess.PIPE if "--until-stdin-closes" in arguments else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return "\n".join(self.lines)

    def wait_for(self, text: str, timeout_s: float = START_S) -> str:
        """The first line that holds `text`; fails with the whole output when the process ends before."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = next((line for line in self.lines if text in line), None)
            if found is not None:
                return found
            if self.process.poll() is not None:
                self._reader.join()
                assert any(text in line for line in self.lines), f"ended without {text!r}:\n{self.output}"
            time.sleep(0.02)
        raise AssertionError(f"no {text!r} within {timeout_s} s:\n{self.output}")

    def children(self) -> list[psutil.Process]:
        """All its descendants."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, *words: str) -> psutil.Process:
        """The descendant whose command line holds these words, one after the other."""
        return next(p for p in self.children() if f" {' '.join(words)} " in f" {' '.join(p.cmdline())} ")

    def end(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = 5.0) -> int:
        """Send a signal and wait; the exit code."""
        self.process.send_signal(number)
        returncode = self.process.wait(timeout_s * contention())
        self._reader.join(timeout_s)
        return returncode

    def kill(self) -> None:
        """End what is left of it, whatever happened."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(5.0)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))


def contention() -> float:
    """How much longer than alone a process takes here now: elapsed time over CPU time of a little work, at least 1.

    The promised limits (five seconds to end, one second to free blocks) are for a machine that is not overloaded; where
    other programs hold the cores, as on shared test machines, a limit counts in the time that this one is given.
    """
    started, used = time.monotonic(), time.process_time()
    while time.process_time() - used < 0.1:
        sum(range(1000))
    return max(1.0, (time.monotonic() - started) / (time.process_time() - used))


def eventually(holds: Callable[[], bool], timeout_s: float) -> bool:
    """Whether it holds within this time (longer where the machine is overloaded, see `contention`)."""
    started = time.monotonic()
    limit_s = timeout_s
    while not holds():
        if time.monotonic() - started > limit_s:
            longer_s = timeout_s * contention()
            if longer_s <= 1.2 * limit_s:
                return False
            limit_s = longer_s
        time.sleep(0.02)
    return True
