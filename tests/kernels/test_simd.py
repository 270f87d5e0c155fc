"""The operations of the SIMD layer that are not one instruction: exp, float16, sums, masks, atomics."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from workers.kernels import vector as v


@njit(cache=True)
def _exp(x: int, n: int, out: int) -> None:
    for i in range(0, n, 16):
        v.store_f32(out + 4 * i, v.exp_f32(v.load_f32(x + 4 * i)))


@njit(cache=True)
def _from_f16(x: int, n: int, out: int) -> None:
    for i in range(0, n, 16):
        v.store_f32(out + 4 * i, v.load_f16(x + 2 * i))


@njit(cache=True)
def _to_f16(x: int, n: int, out: int) -> None:
    for i in range(0, n, 16):
        v.store_f16(out + 2 * i, v.load_f32(x + 4 * i))


@njit(cache=True)
def _reduce(x: int) -> tuple[float, float]:
    numbers = v.load_f32(x)
    return v.sum_f32(numbers), v.maximum_f32(numbers)


@njit(cache=True)
def _copy_first(x: int, count: int, out: int) -> None:
    v.store_first(out, v.load_first(x, count), count)


@njit(cache=True)
def _atomics(address: int) -> tuple[int, int]:
    before = v.atomic_add_i32(address, 3)
    v.store_release_i32(address + 64, v.load_acquire_i32(address) * 10)
    return before, v.load_acquire_i32(address + 64)


@njit(cache=True)
def _mask_of_less(a: int, b: float) -> int:
    return v.mask_bits(v.load_f32(a) < b)


def apply(kernel: Any, x: np.ndarray, dtype: Any) -> np.ndarray:
    """The kernel's output for each element of x."""
    out = np.zeros(x.shape, dtype=dtype)
    kernel(x.ctypes.data, x.size, out.ctypes.data)
    return out


def test_exp_is_within_two_units_in_the_last_place() -> None:
    x = np.linspace(-87.3, 88.3, 1 << 16).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(apply(_exp, x, np.float32) - exact) <= 2 * np.spacing(exact.astype(np.float32))).all()


def test_exp_of_very_small_numbers_is_zero_and_of_zero_one() -> None:
    x = np.array([-np.inf, -1e30, -88, 0, -0.0, 89, np.inf, np.nan] * 2, dtype=np.float32)
    out = apply(_exp, x, np.float32)
    np.testing.assert_array_equal(out[:5], [0, 0, 0, 1, 1])
    assert np.isfinite(out[5:]).all()


def test_every_float16_is_read_exactly() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    np.testing.assert_array_equal(apply(_from_f16, bits, np.float32), bits.view(np.float16).astype(np.float32))


def test_float16_is_rounded_to_nearest_ties_to_even() -> None:
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    between = (halves[:-1] + halves[1:]) / 2  # ties
    near = np.concatenate([between, np.nextafter(between, np.float32(0)), np.nextafter(between, np.float32(1e9))])
    x = np.concatenate([near, -near, [65519, 65520, 1e9, np.inf, -np.inf, 1e-10, 0, -0.0]]).astype(np.float32)
    x = np.concatenate([x, np.zeros(-len(x) % 16, np.float32)])
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal(apply(_to_f16, x, np.uint16), expected)
    assert np.isnan(apply(_to_f16, np.full(16, np.nan, np.float32), np.uint16).view(np.float16)).all()


def test_lanes_are_summed_by_halves() -> None:
    x = np.random.default_rng(0).standard_normal(16).astype(np.float32) * 10.0 ** np.arange(16).astype(np.float32)
    expected = x.copy()
    while len(expected) > 1:
        expected = expected[: len(expected) // 2] + expected[len(expected) // 2 :]
    assert _reduce(x.ctypes.data) == (expected[0], x.max())


def test_only_the_first_elements_are_read_and_written() -> None:
    for count in range(17):
        x, out = np.arange(1, 17, dtype=np.float32), np.zeros(16, dtype=np.float32)
        _copy_first(x.ctypes.data, count, out.ctypes.data)
        np.testing.assert_array_equal(out, np.where(np.arange(16) < count, x, 0))


def test_atomics_give_the_value_before_and_are_seen() -> None:
    words = np.zeros(32, dtype=np.int32)
    words[0] = 4
    assert _atomics(words.ctypes.data) == (4, 70)
    assert (words[0], words[16]) == (7, 70)


def test_comparison_with_nan_is_false() -> None:
    x = np.array([1, np.nan, -1, 5] * 4, dtype=np.float32)
    assert _mask_of_less(x.ctypes.data, 2.0) == 0b0101010101010101
