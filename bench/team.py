"""A team of threads that runs a kernel as a team of workers does: tiles by a counter, then a barrier."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from pagedserve.contract.control import CONTROL_BYTES

_SHORTEST_S = 0.04  # of a measurement: starting threads costs 0.1 ms of it
_ROUNDS = 3


class Team:
    """`size` threads. A kernel is a compiled function without the GIL: kernel(repeats, *arguments, control, size)."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = np.zeros(CONTROL_BYTES + 64, dtype=np.uint8)
        self._control = int(self._memory.ctypes.data) + 63 & -64

    def seconds(self, kernel: Callable[..., Any], *arguments: Any, rounds: int = _ROUNDS) -> float:
        """Seconds of one repetition, in the quickest of some rounds: what disturbs only ever adds time."""
        self.run(kernel, 1, *arguments)  # compiles
        repeats, spent = 1, self.run(kernel, 1, *arguments)
        while spent < _SHORTEST_S:
            repeats = max(2 * repeats, int(repeats * 1.2 * _SHORTEST_S / max(spent, 1e-6)))
            spent = self.run(kernel, repeats, *arguments)
        return min(spent, *(self.run(kernel, repeats, *arguments) for _ in range(rounds - 1))) / repeats

    def run(self, kernel: Callable[..., Any], repeats: int, *arguments: Any) -> float:
        """Seconds of so many repetitions."""
        call = (repeats, *arguments, self._control, self.size)
        others = [threading.Thread(target=kernel, args=call) for _ in range(self.size - 1)]
        started = time.perf_counter()
        for thread in others:
            thread.start()
        kernel(*call)
        for thread in others:
            thread.join()
        return time.perf_counter() - started
