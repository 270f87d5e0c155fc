"""The control words at the head of the `team` segment, by which a team steps together and is freed when one dies.

Workers count and spin on them with atomics (workers/kernels); the scheduler only raises the abort flag, and resets
the words once no worker is inside a step.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_WORDS_A_LINE = 16  # int32 words of a 64-byte cache line: no two control words share one

ABORT = 0 * _WORDS_A_LINE
ARRIVED = 1 * _WORDS_A_LINE
GENERATION = 2 * _WORDS_A_LINE
SLEEPERS = 3 * _WORDS_A_LINE
COUNTERS = 4 * _WORDS_A_LINE  # one line each; an operation claims its tiles from one of them
NUM_COUNTERS = 8
CONTROL_BYTES = 4096


class Control:
    """The scheduler's hand on the control words. `memory` is the team segment's."""

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self._words = memory[:CONTROL_BYTES].view(np.int32)

    def abort(self) -> None:
        """Free all that wait at a barrier, and let none begin a step: each answers its plans with ok = False."""
        self._words[ABORT] = 1

    def reset(self) -> None:
        """Make the words ready for a new step. Only when no worker is inside a step."""
        self._words[ARRIVED] = self._words[SLEEPERS] = 0
        for counter in range(NUM_COUNTERS):
            self._words[COUNTERS + counter * _WORDS_A_LINE] = 0
        self._words[ABORT] = 0
