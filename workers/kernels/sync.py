"""How the processes of a team step together: claim tiles from a counter, meet at a barrier.

A barrier's last arriver clears all tile counters, so every operation starts from tile 0. Who waits spins briefly, then
sleeps until it is woken: where other programs want the cores too, a spinning member would take them from the one that
it waits for. The abort flag ends the wait when a member has died.
"""

from __future__ import annotations

from numba import njit

from workers.kernels.vector import (
    atomic_add_i32,
    futex_wait,
    futex_wake,
    load_acquire_i32,
    pause,
    prefetch,
    store_release_i32,
)

_SPINS = 4_000  # some 50 us: longer than an even operation's waits, and than a sleep costs

# Byte offsets of the control words, as in pagedserve/contract/control.py (a test holds them together).
ABORT = 0
ARRIVED = 64
GENERATION = 128
SLEEPERS = 192
COUNTERS = 256
NUM_COUNTERS = 8
_LINE = 64


@njit(cache=True)
def claim(control: int, counter: int) -> int:
    """The next tile of counter 0..7: each number is given once between two barriers."""
    return atomic_add_i32(control + COUNTERS + _LINE * counter, 1)


@njit(cache=True)
def next_claim(control: int, counter: int, team_size: int) -> int:
    """What a member that has just claimed a tile will probably claim next: the others take one each before."""
    return load_acquire_i32(control + COUNTERS + _LINE * counter) + team_size - 1


@njit(cache=True)
def barrier(control: int, team_size: int, coming: int = 0, coming_end: int = 0) -> bool:
    """Wait until every member is here; False when the step was aborted.

    Who waits asks meanwhile for what it will read next, from address `coming` up to `coming_end`.
    """
    generation = load_acquire_i32(control + GENERATION)
    if atomic_add_i32(control + ARRIVED, 1) == team_size - 1:
        for counter in range(NUM_COUNTERS):
            store_release_i32(control + COUNTERS + _LINE * counter, 0)
        store_release_i32(control + ARRIVED, 0)
        # A full fence: whoever is counted as a sleeper after this sees the new generation.
        atomic_add_i32(control + GENERATION, 1)
        if load_acquire_i32(control + SLEEPERS) != 0:
            futex_wake(control + GENERATION)
        return True
    spins = 0
    while load_acquire_i32(control + GENERATION) == generation:
        if load_acquire_i32(control + ABORT) != 0:
            return False
        if coming < coming_end:
            prefetch(coming)
            coming += _LINE
        elif spins < _SPINS:
            pause()
            spins += 1
        else:
            atomic_add_i32(control + SLEEPERS, 1)
            futex_wait(control + GENERATION, generation)
            atomic_add_i32(control + SLEEPERS, -1)
    return True
