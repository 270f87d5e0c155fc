"""Ties a child process to its parent's life, so that `kill -9` of a supervisor leaves nobody behind. Linux only."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int | None = None) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    `parent_pid` is who should be the parent; another one means that it is dead already, and the process exits. Call it
    first thing: what happens to the parent before it goes unnoticed when `parent_pid` is None.
    """
    if _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)
