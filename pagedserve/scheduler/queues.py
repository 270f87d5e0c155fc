"""Queues: the sequences that wait and those that run, each in order of (priority, arrival, index)."""

from __future__ import annotations

from bisect import insort

from pagedserve.scheduler.request import Sequence, State


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order


class Queues:
    """Every live sequence is in exactly one of the two lists, except a PARKED beam."""

    def __init__(self) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    def wait(self, sequence: Sequence) -> None:
        """Put a sequence without blocks into the queue; with its old arrival, a preempted one goes to the front."""
        sequence.state = State.WAITING
        insort(self.waiting, sequence, key=_order)

    def run(self, sequence: Sequence) -> None:
        """Let a sequence run, out of the queue or newly made."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.state = State.RUNNING
        insort(self.running, sequence, key=_order)

    def leave(self, sequence: Sequence, state: State) -> None:
        """Take a sequence out of whichever list it is in."""
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is State.RUNNING:
            self.running.remove(sequence)
        sequence.state = state
