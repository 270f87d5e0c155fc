"""InvariantError: a promise of the scheduler is broken, which is always a bug of ours."""

from __future__ import annotations


class InvariantError(AssertionError):
    """Names the invariant that does not hold."""


def require(holds: bool, invariant: str) -> None:
    """Raise InvariantError unless `holds`; unlike `assert` it is never optimised away."""
    if not holds:
        raise InvariantError(invariant)
