"""How the processes of a team step together: claim tiles from a counter, meet at a barrier.

A barrier's last arriver clears all tile counters, so every operation starts from tile 0. Who waits spins briefly, then
yields its core at every look; the abort flag ends the wait when a member has died.
"""

from __future__ import annotations

from numba import njit

from workers.kernels.vector import atomic_add_i32, load_acquire_i32, pause, sched_yield, store_release_i32

_SPINS_BEFORE_YIELD = 20_000  # some 0.2 ms: longer than an even step's waits, short beside a scheduler's time slice

# Byte offsets of the control words, as in pagedserve/contract/control.py (a test holds them together).
ABORT = 0
ARRIVED = 64
GENERATION = 128
COUNTERS = 192
NUM_COUNTERS = 8
_LINE = 64


@njit(cache=True)
def claim(control: int, counter: int) -> int:
    """The next tile of counter 0..7: each number is given once between two barriers."""
    return atomic_add_i32(control + COUNTERS + _LINE * counter, 1)


@njit(cache=True)
def barrier(control: int, team_size: int) -> bool:
    """Wait until every member is here; False when the step was aborted."""
    generation = load_acquire_i32(control + GENERATION)
    if atomic_add_i32(control + ARRIVED, 1) == team_size - 1:
        for counter in range(NUM_COUNTERS):
            store_release_i32(control + COUNTERS + _LINE * counter, 0)
        store_release_i32(control + ARRIVED, 0)
        store_release_i32(control + GENERATION, (generation + 1) & 0x3FFFFFFF)
        return True
    spins = 0
    while load_acquire_i32(control + GENERATION) == generation:
        if load_acquire_i32(control + ABORT) != 0:
            return False
        pause()
        spins += 1
        if spins > _SPINS_BEFORE_YIELD:
            sched_yield()
    return True
