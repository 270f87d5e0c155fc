"""Instance: one running server's name, run folder and endpoints; and the lock that says whether its owner lives.

The owner (the supervisor, or the scheduler where there is none) holds a flock on `owner.lock` for its whole life, so
that "is it dead?" needs no process ids. Instances of dead owners are reaped by the next start.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pagedserve.contract import segments
from pagedserve.contract.errors import ConfigError, EndpointInUseError, PagedServeError

_MAX_SOCKET_PATH_BYTES = 107  # sun_path of Linux, without its final zero


def run_root() -> Path:
    """The folder of all run folders of this user, made with mode 0700."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    root = Path(base) / "pagedserve" if base else Path(tempfile.gettempdir()) / f"pagedserve-{os.getuid()}"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = root.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PagedServeError(f"{root} must belong to this user and have mode 0700")
    return root


@dataclass(frozen=True)
class Instance:
    """Paths of one server. `name` is made of letters, digits, "_" and "-"."""

    name: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,40}", self.name):
            raise ConfigError(f"instance: expected letters, digits, '_' and '-' (at most 41), got {self.name!r}")

    @property
    def run_dir(self) -> Path:
        """The run folder; it may not exist yet."""
        return run_root() / self.name

    @property
    def tag(self) -> str:
        """The instance's part of segment names: its name, and a hash of its run folder so that users do not meet."""
        return f"{self.name}-{hashlib.sha256(str(self.run_dir).encode()).hexdigest()[:8]}"

    @property
    def client_endpoint(self) -> str:
        """Where clients connect, unless the configuration adds TCP."""
        return self._endpoint("clients.sock")

    @property
    def worker_endpoint(self) -> str:
        """Where workers connect."""
        return self._endpoint("workers.sock")

    def _endpoint(self, file: str) -> str:
        path = str(self.run_dir / file)
        if len(path.encode()) > _MAX_SOCKET_PATH_BYTES:
            raise ConfigError(f"instance: the socket path {path} is longer than {_MAX_SOCKET_PATH_BYTES} bytes")
        return f"ipc://{path}"


class OwnerLock:
    """Held by the owner of an instance from start to end; made by `own`."""

    def __init__(self, instance: Instance, file: IO[str]) -> None:
        self._instance = instance
        self._file = file

    def release(self) -> None:
        """Unlink the instance's segments, remove its run folder, let go of the lock. In this order."""
        segments.unlink_instance(self._instance.tag)
        shutil.rmtree(self._instance.run_dir, ignore_errors=True)
        self._file.close()


def own(instance: Instance) -> OwnerLock:
    """Become the owner of `instance`, with a fresh run folder; EndpointInUseError names its endpoint."""
    instance.run_dir.mkdir(mode=0o700, exist_ok=True)
    file = _try_lock(instance.run_dir / "owner.lock")
    if file is None:
        raise EndpointInUseError(
            f"{instance.client_endpoint} is in use: an instance named {instance.name!r} is running "
            "(another name: --instance)"
        )
    segments.unlink_instance(instance.tag)
    for left_over in instance.run_dir.glob("*.sock"):
        left_over.unlink(missing_ok=True)
    return OwnerLock(instance, file)


def reap_dead_instances() -> list[str]:
    """Remove the segments and run folders whose owner is dead; the names removed."""
    reaped = []
    for folder in run_root().iterdir():
        if not (folder / "owner.lock").exists():
            continue
        file = _try_lock(folder / "owner.lock")
        if file is None:
            continue
        OwnerLock(Instance(folder.name), file).release()
        reaped.append(folder.name)
    return reaped


def _try_lock(path: Path) -> IO[str] | None:
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    if not path.exists():  # released and removed between open and lock
        file.close()
        return None
    return file
