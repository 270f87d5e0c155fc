"""What this machine can do at most: int8 dot products and float32 multiply-adds from registers, reading memory.

Every share of a peak in the benchmark's tables is one of these, measured in the same run on the same cores: memory's
before each shape of attention and each type of weights, since memory that others use too changes within minutes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from bench.team import Team
from workers.kernels.int8_dot import dot_u8s8
from workers.kernels.simd import I8, I32, Simd, Value, isa_name, vector
from workers.kernels.sync import barrier, claim

_CHAINS = 12 if isa_name() == "avx512" else 5  # sums side by side: more than latency x units, fewer than registers
_TURNS = 100_000
_ROUNDS = 15  # many: a peak that was disturbed would flatter every kernel
_PREFETCH_BYTES = 2048
_READ_BYTES = 384 << 20  # much more than any cache here
_STEP_BYTES = 512  # read in one turn
_PAGE_BYTES = 4096  # K and V of 16 tokens, of one kv_head and layer of SmolLM2: a paged pool has them in no order
_PAST_L2 = 0


@dataclass(frozen=True)
class Peaks:
    """Of `cores` cores together. A multiply and an add are two operations."""

    cores: int
    int8_gops: float
    float32_gflops: float
    read_gbytes_per_s: float
    read_pages_gbytes_per_s: float  # in pages of 4 KB in random order


class PeakMeter:
    """Measures peaks with a team, and holds the 384 MB that it reads for them."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._data = np.ones(_READ_BYTES // 4, dtype=np.int32)
        begin, self._share = self._data.ctypes.data, _READ_BYTES // team.size // _STEP_BYTES * _STEP_BYTES
        self._starts = begin + self._share * np.arange(team.size)
        self._pages = begin + _PAGE_BYTES * np.random.default_rng(0).permutation(_READ_BYTES // _PAGE_BYTES)

    def measure(self) -> Peaks:
        """All four; some three seconds."""
        operations = self._team.size * _TURNS * _CHAINS * 2
        int8, float32 = (self._team.seconds(kernel, rounds=_ROUNDS) for kernel in (_dot_int8, _multiply_add))
        peaks = Peaks(self._team.size, operations * 64 / int8 / 1e9, operations * 16 / float32 / 1e9, 0.0, 0.0)
        return self.measure_memory(peaks, _ROUNDS)

    def measure_memory(self, peaks: Peaks, rounds: int = 5) -> Peaks:
        """The same peaks, but memory's as they are now; half a second."""
        read = self._team.seconds(_read, self._starts, self._share, rounds=rounds)
        pages = self._team.seconds(_read_pages, self._pages, rounds=rounds)
        return replace(
            peaks,
            read_gbytes_per_s=self._share * self._team.size / read / 1e9,
            read_pages_gbytes_per_s=_READ_BYTES / pages / 1e9,
        )


@intrinsic
def _dot_turns(typing_context: Any, turns: Any) -> Any:
    """_CHAINS int8 dot products a turn."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        s = Simd(builder)
        bytes_ = s.bitcast(s.splat(s.truncate(s.wrap(args[0]), I32)), vector(I8, 64)) & 0x7F

        def body(_: Value, sums: list[Value]) -> list[Value]:
            return [dot_u8s8(s, total, bytes_, bytes_) for total in sums]

        sums = s.loop(0, args[0], 1, [s.i32(chain) for chain in range(_CHAINS)], body)
        return s.lane(_total(sums), 0).llvm

    return types.int32(turns), generate


@intrinsic
def _multiply_add_turns(typing_context: Any, turns: Any) -> Any:
    """_CHAINS multiply-adds of 16 float32 a turn."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        s = Simd(builder)
        factor = s.to_f32(s.splat(s.truncate(s.wrap(args[0]), I32))) * 1e-6

        def body(_: Value, sums: list[Value]) -> list[Value]:
            return [s.fma(total, factor, factor) for total in sums]

        sums = s.loop(0, args[0], 1, [s.f32(chain) for chain in range(_CHAINS)], body)
        return s.lane(_total(sums), 0).llvm

    return types.float32(turns), generate


@intrinsic
def _read_bytes(typing_context: Any, begin: Any, num_bytes: Any, coming: Any) -> Any:
    """Read memory, _STEP_BYTES a turn, asking for as much from `coming` on."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        s = Simd(builder)
        begin, coming = s.wrap(args[0]), s.wrap(args[2])

        def body(at: Value, sums: list[Value]) -> list[Value]:
            for line in range(0, _STEP_BYTES, 64):
                s.prefetch(coming + at, line, _PAST_L2)
            return [total ^ s.load(begin + at, vector(I32), 64 * line) for line, total in enumerate(sums)]

        sums = s.loop(0, args[1], _STEP_BYTES, [s.i32(0)] * (_STEP_BYTES // 64), body)
        return s.lane(_total(sums), 0).llvm

    return types.int32(begin, num_bytes, coming), generate


def _total(sums: list[Value]) -> Value:
    """All of them in one, so that none is left out as unused."""
    first, *others = sums
    for value in others:
        first = first + value
    return first


@njit(cache=True, nogil=True)
def _dot_int8(repeats: int, control: int, team_size: int) -> int:
    total = 0
    for _ in range(repeats):
        total += _dot_turns(_TURNS)
        barrier(control, team_size)
    return total


@njit(cache=True, nogil=True)
def _multiply_add(repeats: int, control: int, team_size: int) -> float:
    total = 0.0
    for _ in range(repeats):
        total += _multiply_add_turns(_TURNS)
        barrier(control, team_size)
    return total


@njit(cache=True, nogil=True)
def _read(repeats: int, starts: Any, share: int, control: int, team_size: int) -> int:
    total = 0
    for _ in range(repeats):
        tile = claim(control, 0)
        while tile < team_size:
            total += _read_bytes(starts[tile], share, starts[tile] + _PREFETCH_BYTES)
            tile = claim(control, 0)
        barrier(control, team_size)
    return total


@njit(cache=True, nogil=True)
def _read_pages(repeats: int, pages: Any, control: int, team_size: int) -> int:
    """Each member reads its share of the pages, asking for the next but one."""
    total = 0
    for _ in range(repeats):
        tile = claim(control, 0)
        while tile < team_size:
            begin, end = tile * len(pages) // team_size, (tile + 1) * len(pages) // team_size
            for i in range(begin, end):
                total += _read_bytes(pages[i], _PAGE_BYTES, pages[min(i + 2, end - 1)])
            tile = claim(control, 0)
        barrier(control, team_size)
    return total
