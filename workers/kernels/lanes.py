"""Reduces several vectors at once, each to a lane of one: one by one, every step of a reduction waits for the last."""

from __future__ import annotations

from collections.abc import Callable

from workers.kernels.simd import LANES, Simd, Value


def each_to_a_lane(simd: Simd, vectors: list[Value], combine: Callable[[Value, Value], Value]) -> Value:
    """All lanes of vectors[i], combined in a fixed order, in lane 4 * (i % 4) + i // 4; up to 16 vectors of 16 lanes.

    Sixteen take 15 steps of two shuffles. Where there are fewer, some are in several lanes.
    """
    num_groups = -(-len(vectors) // 4)
    groups = []
    for group in range(4):
        begin = group % num_groups * 4
        members = vectors[begin : begin + 4]
        groups.append(_four(simd, [members[i % len(members)] for i in range(4)], combine, _quarters))
    return _four(simd, groups, combine, _within)


def lane_of(i: int) -> int:
    """Where each_to_a_lane leaves vector i; of its result, vector lane_of(i) is in lane i."""
    return i % 4 * 4 + i // 4


def _four(
    simd: Simd, vectors: list[Value], combine: Callable[[Value, Value], Value], places: Callable[..., list[int]]
) -> Value:
    """Of each of four vectors' quarters, or within each quarter of its places, one: all four, combined."""

    def merge(a: Value, b: Value, first: list[int], second: list[int]) -> Value:
        return combine(simd.shuffle(a, b, first), simd.shuffle(a, b, second))

    a, b, c, d = vectors
    low, high = (merge(*pair, places(0, 1, 4, 5), places(2, 3, 6, 7)) for pair in ((a, b), (c, d)))
    return merge(low, high, places(0, 2, 4, 6), places(1, 3, 5, 7))


def _quarters(*quarters: int) -> list[int]:
    """Lanes of quarters, 0 to 3 of the first vector and 4 to 7 of the second: one shuffle of whole quarters on x86."""
    return [4 * quarter + lane for quarter in quarters for lane in range(4)]


def _within(*places: int) -> list[int]:
    """Of each quarter four places, 0 to 3 of the first vector and 4 to 7 of the second: one shuffle within quarters."""
    return [4 * quarter + place % 4 + LANES * (place // 4) for quarter in range(4) for place in places]
