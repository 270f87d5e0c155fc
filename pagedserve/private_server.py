"""PrivateServer: a server of one's own, for a chat or a script, that ends with whoever started it."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import msgspec

import pagedserve
from pagedserve.client import Client
from pagedserve.client.connection import check_reachable
from pagedserve.config import Config, child_environment
from pagedserve.contract.errors import PagedServeError, ServerUnavailableError
from pagedserve.contract.instance import Instance
from pagedserve.models.catalog import fetch_if_missing

END_S = 5.0
_LONG_START_S = 4.0  # longer than a start takes once the kernels are compiled


@contextlib.contextmanager
def running_or_private(config: Config, endpoint: str | None, tell: Callable[[str], None]) -> Iterator[str]:
    """The endpoint of a server: the one given, the configured instance's if it runs, or one of our own until we leave.

    `tell` hears of what takes time. ServerUnavailableError when nobody listens at the endpoint that was given.
    """
    running = endpoint or Instance(config.instance).client_endpoint
    try:
        check_reachable(running)
    except ServerUnavailableError:
        if endpoint is not None:
            raise
        path = fetch_if_missing(config.model, config.models_dir, tell)
        tell(f"no server is running: starting one for now ({config.model})")
        with PrivateServer(msgspec.structs.replace(config, model=str(path)), tell=tell) as server:
            yield server.endpoint
    else:
        yield running


class PrivateServer:
    """`pagedserve up` as a child, with an instance name that nobody else has and without HTTP.

    Entering waits until it is ready; PagedServeError with its own words when it fails, or after `timeout_s`. The child
    ends when its standard input does, which the kernel sees to even if we are killed.
    """

    def __init__(
        self, config: Config, *, timeout_s: float = 600.0, tell: Callable[[str], None] | None = None
    ) -> None:
        name = f"private-{os.getpid()}-{secrets.token_hex(3)}"
        model = config.model
        if Path(model).exists():
            model = str(Path(model).absolute())  # the child stands elsewhere
        self._config = msgspec.structs.replace(config, instance=name, model=model, http=False)
        self._timeout_s = timeout_s
        self._tell = tell
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def instance(self) -> str:
        """Its name."""
        return self._config.instance

    @property
    def endpoint(self) -> str:
        """Where clients connect."""
        return Instance(self._config.instance).client_endpoint

    def start(self) -> None:
        """Start it and wait until it is ready."""
        with tempfile.TemporaryFile() as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pagedserve", "up", "--until-stdin-closes"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=child_environment(self._config),
                cwd=Path(pagedserve.__file__).parents[1],
                start_new_session=True,  # Ctrl-C on our terminal is not meant for it
            )
            try:
                self._wait_ready()
            except BaseException as error:
                self.end()
                log.seek(0)
                *_, last = log.read().decode(errors="replace").strip().splitlines() or [""]
                if isinstance(error, ServerUnavailableError):
                    raise PagedServeError(last.removeprefix("error: ") or str(error)) from None
                raise

    def end(self) -> None:
        """End it and all its processes."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def __enter__(self) -> PrivateServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _wait_ready(self) -> None:
        assert self._process is not None
        started = time.monotonic()
        deadline = started + self._timeout_s
        while time.monotonic() < deadline:
            if self._tell is not None and time.monotonic() - started > _LONG_START_S:
                self._tell("the first start on a machine compiles the kernels: up to a minute")
                self._tell = None
            if self._process.poll() is not None:
                raise ServerUnavailableError("the server ended before it was ready")
            try:
                with Client(self.endpoint, timeout_s=1.0) as client:
                    client.wait_ready(1.0)
                    return
            except ServerUnavailableError:
                time.sleep(0.05)
        raise PagedServeError(f"the server is not ready after {self._timeout_s:g} s")
