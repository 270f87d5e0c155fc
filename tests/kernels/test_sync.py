"""Rules of the team's synchronisation: real processes on shared memory claim, meet, sleep and are freed."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.queues import Queue

import numpy as np
import pytest

from pagedserve.contract import control, segments
from workers.kernels import sync
from workers.kernels.sync import barrier, claim

NAME = "pagedserve-test-sync"


@pytest.fixture
def words() -> Iterator[np.ndarray[tuple[int], np.dtype[np.int32]]]:
    segment = segments.create(NAME, control.CONTROL_BYTES)
    yield segment.memory.view(np.int32)
    segments.unlink(NAME)


def test_the_kernels_and_the_contract_agree_on_the_control_words() -> None:
    ours = (sync.ABORT, sync.ARRIVED, sync.GENERATION, sync.SLEEPERS, sync.COUNTERS)
    theirs = (control.ABORT, control.ARRIVED, control.GENERATION, control.SLEEPERS, control.COUNTERS)
    assert ours == tuple(4 * word for word in theirs)
    assert sync.NUM_COUNTERS == control.NUM_COUNTERS


def _member(rounds: int, late_s: float, team_size: int, results: Queue[tuple[list[list[int]], bool, float]]) -> None:
    segment = segments.attach(NAME)
    address = int(segment.memory.ctypes.data)
    claimed: list[list[int]] = []
    ok = True
    for _ in range(rounds):
        time.sleep(late_s)
        tiles = []
        while (tile := claim(address, 2)) < 50:
            tiles.append(tile)
        claimed.append(tiles)
        ok = ok and barrier(address, team_size)
    results.put((claimed, ok, time.process_time()))


def run_team(rounds: int, late: tuple[float, ...], team_size: int = 0) -> list[tuple[list[list[int]], bool, float]]:
    context = multiprocessing.get_context("spawn")
    results: Queue[tuple[list[list[int]], bool, float]] = context.Queue()
    members = [
        context.Process(target=_member, args=(rounds, late_s, team_size or len(late), results)) for late_s in late
    ]
    for member in members:
        member.start()
    answers = [results.get(timeout=120) for _ in members]
    for member in members:
        member.join()
    return answers


@pytest.mark.integration
def test_every_tile_is_claimed_once_between_two_barriers(words: object) -> None:
    answers = run_team(200, (0.0, 0.0, 0.0))
    assert all(ok for _, ok, _ in answers)
    for step in range(200):
        assert sorted(tile for claimed, _, _ in answers for tile in claimed[step]) == list(range(50))


@pytest.mark.integration
def test_who_waits_long_at_a_barrier_sleeps(words: object) -> None:
    """One member is 50 ms late, 20 times; the other would burn a second if it span."""
    used = [seconds for _, _, seconds in run_team(20, (0.05, 0.0))]
    idle = [seconds for _, _, seconds in run_team(0, (0.0, 0.0))]
    assert max(used) < max(idle) + 0.4


@pytest.mark.integration
def test_the_abort_flag_frees_who_waits_for_a_dead_member(words: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
    context = multiprocessing.get_context("spawn")
    results: Queue[tuple[list[list[int]], bool, float]] = context.Queue()
    member = context.Process(target=_member, args=(1, 0.0, 2, results))
    member.start()
    deadline = time.monotonic() + 60
    while words[control.ARRIVED] != 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    words[control.ABORT] = 1
    _, ok, _ = results.get(timeout=30)
    member.join()
    assert not ok
