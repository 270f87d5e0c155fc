"""Shared-memory segments: made once by an owner, attached by the team, unlinked by the owner or by the next start.

Names are `pagedserve-<tag>-<kind>`; the tag is Instance.tag, unique to a run folder. Python before 3.13 has no
SharedMemory(track=False): attaching registers the segment with the resource tracker, which unlinks it when the first
process ends (cpython #82300), so the tracker is kept out of it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sized
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pagedserve.contract.errors import SegmentError

SHM_FOLDER = Path("/dev/shm")
PREFIX = "pagedserve-"


def segment_name(tag: str, kind: str) -> str:
    """The name of an instance's segment; kind is kv, weights or team."""
    return f"{PREFIX}{tag}-{kind}"


class Segment(shared_memory.SharedMemory):
    """A mapped segment. It stays mapped until the process ends, since arrays may look into it until then."""

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """All its bytes; the size is rounded up to whole pages on some systems."""
        assert self.buf is not None
        return np.frombuffer(self.buf, dtype=np.uint8)

    def __del__(self) -> None:
        pass


def _ignore(name: Sized, rtype: str) -> None:
    pass


@contextlib.contextmanager
def _untracked() -> Iterator[None]:
    """Keep SharedMemory from talking to the resource tracker; the owner of the name unlinks, nobody else."""
    register, unregister = resource_tracker.register, resource_tracker.unregister
    resource_tracker.register = resource_tracker.unregister = _ignore
    try:
        yield
    finally:
        resource_tracker.register, resource_tracker.unregister = register, unregister


def create(name: str, num_bytes: int) -> Segment:
    """Make a segment of zeros with mode 0600 and all its pages reserved.

    SegmentError, naming needed and free bytes, when /dev/shm has too little room: never a SIGBUS later.
    A left-over segment of the same name is replaced.
    """
    unlink(name)
    free = shutil.disk_usage(SHM_FOLDER).free
    if num_bytes > free:
        raise SegmentError(_too_small(name, num_bytes, free))
    with _untracked():
        segment = Segment(name, create=True, size=num_bytes)
    try:
        os.posix_fallocate(segment._fd, 0, num_bytes)  # type: ignore[attr-defined]
    except OSError:
        segment.close()
        unlink(name)
        raise SegmentError(_too_small(name, num_bytes, shutil.disk_usage(SHM_FOLDER).free)) from None
    return segment


def attach(name: str) -> Segment:
    """Map an existing segment; SegmentError when there is none."""
    try:
        with _untracked():
            return Segment(name)
    except FileNotFoundError:
        raise SegmentError(f"no shared segment {SHM_FOLDER / name}: the server that owned it is gone") from None


def exists(name: str) -> bool:
    """Whether a segment of this name is there."""
    return (SHM_FOLDER / name).exists()


def unlink(name: str) -> None:
    """Remove a segment's name; processes that mapped it keep it until they end. No error when it is gone."""
    (SHM_FOLDER / name).unlink(missing_ok=True)


def unlink_instance(tag: str) -> list[str]:
    """Remove all segments of an instance; the names removed."""
    names = [segment_name(tag, kind) for kind in ("kv", "weights", "team")]
    found = [name for name in names if exists(name)]
    for name in found:
        unlink(name)
    return found


def _too_small(name: str, needed: int, free: int) -> str:
    return (
        f"{SHM_FOLDER} has too little room for segment {name}: needed {needed:,} bytes, free {free:,} bytes "
        "(a smaller pool: --pool-tokens; in a container: a larger --shm-size)"
    )
