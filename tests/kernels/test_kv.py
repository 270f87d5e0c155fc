"""The pool's layout, and copies of blocks."""

from __future__ import annotations

import numpy as np
import pytest

from workers.kernels.kv import F16_MAX, KvPool, block_bytes, copy_block, write_kv


def make_pool(dtype: str, num_blocks: int = 5, block_size: int = 16) -> tuple[np.ndarray, KvPool]:
    array = np.zeros((num_blocks, 3, 2, 2, block_size * 32), dtype=dtype)
    return array, KvPool(array.ctypes.data, 3, 2, 32, block_size, array.itemsize)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("block_size", [16, 48])
def test_a_token_is_one_column_of_k_and_one_row_of_v(dtype: str, block_size: int) -> None:
    array, pool = make_pool(dtype, block_size=block_size)
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((2, 32)).astype(np.float32) for _ in range(2))
    write_kv(pool, 1, 3 * block_size + 7, k.ctypes.data, v.ctypes.data)
    expected = np.zeros_like(array)
    expected[3, 1, :, 0].reshape(2, 32, block_size)[:, :, 7] = k
    expected[3, 1, :, 1].reshape(2, block_size, 32)[:, 7] = v
    np.testing.assert_array_equal(array, expected)


def test_too_large_values_are_written_as_the_largest_float16() -> None:
    array, pool = make_pool("float16")
    k, v = (np.full((2, 32), value, dtype=np.float32) for value in (1e6, -np.inf))
    write_kv(pool, 0, 0, k.ctypes.data, v.ctypes.data)
    assert set(np.unique(array)) == {-F16_MAX, 0.0, F16_MAX}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_block_is_copied_whole_and_nothing_else_is_touched(dtype: str) -> None:
    array, pool = make_pool(dtype)
    array[:] = np.random.default_rng(0).standard_normal(array.shape)
    expected = array.copy()
    expected[4] = expected[1]
    copy_block(pool, 1, 4)
    np.testing.assert_array_equal(array, expected)
    assert block_bytes(pool) == array[0].nbytes
