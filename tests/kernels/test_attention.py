"""Paged attention against dense attention, and its bits against themselves computed otherwise."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from numba import njit

from tests.kernels.paged import Paged, Shape
from workers.kernels.attention import attention_tile_ahead
from workers.kernels.attention_inner import COPY, NOTHING

BASE = Shape()
LONG = 601  # two splits and a part of a third


def assert_same_bits(a: list[np.ndarray], b: list[np.ndarray]) -> None:
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x.view(np.int32), y.view(np.int32))


@njit(cache=True)
def tile_without_prefetch(a, b, c, d, e, f, g, h, i, j, k, m, n, o):  # type: ignore[no-untyped-def]
    attention_tile_ahead(NOTHING, 0, 0, a, b, c, d, e, f, g, h, i, j, k, m, n, o)


@njit(cache=True)
def tile_double_buffered(a, b, c, d, e, f, g, h, i, j, k, m, n, o):  # type: ignore[no-untyped-def]
    attention_tile_ahead(COPY, 0, 0, a, b, c, d, e, f, g, h, i, j, k, m, n, o)


@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_equals_dense_attention_for_every_head_dim(head_dim: int, dtype: str) -> None:
    paged = Paged(dataclasses.replace(BASE, head_dim=head_dim, dtype=dtype), [300, 33, 1, 64])
    for query_lens in ([1, 1, 1, 1], [40, 33, 1, 17]):
        for index, out in enumerate(paged.attend(query_lens)):
            np.testing.assert_allclose(out, paged.dense(index, query_lens[index]), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (3, 1), (9, 3), (8, 2), (5, 1), (14, 2), (8, 1), (9, 1), (48, 1)])
def test_equals_dense_attention_for_every_group_of_query_heads(heads: tuple[int, int]) -> None:
    paged = Paged(dataclasses.replace(BASE, num_heads=heads[0], num_kv_heads=heads[1]), [270, 18])
    for query_lens in ([1, 1], [70, 18]):
        for index, out in enumerate(paged.attend(query_lens)):
            np.testing.assert_allclose(out, paged.dense(index, query_lens[index]), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("window", [1, 16, 40, 64, 100, 256, 1000])
@pytest.mark.parametrize("block_size", [16, 32])
def test_a_sliding_window_sees_its_tokens_and_reads_no_block_before_them(window: int, block_size: int) -> None:
    shape = dataclasses.replace(BASE, window=window, block_size=block_size)
    for query_len in (1, 37):
        paged = Paged(shape, [LONG, 320, 50], kept=window + query_len - 1)
        for index, out in enumerate(paged.attend([query_len] * 3)):
            np.testing.assert_allclose(out, paged.dense(index, query_len), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("window", [0, 1, 64, 100, 300])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_row_has_the_same_bits_in_every_chunking_of_its_prompt(window: int, dtype: str) -> None:
    paged = Paged(dataclasses.replace(BASE, window=window, dtype=dtype), [LONG])
    whole = paged.attend([LONG])[0]
    for chunk in (16, 100, 256):
        ends = [*range(chunk, LONG, chunk), LONG]
        parts = [paged.attend([end - start], seq_lens=[end])[0] for start, end in zip([0, *ends], ends, strict=False)]
        assert_same_bits([np.concatenate(parts)], [whole])
    for position in (0, 1, 63, 64, 255, 256, 257, 400, 511, 512, LONG - 1):
        assert_same_bits(paged.attend([1], seq_lens=[position + 1]), [whole[position : position + 1]])


def test_a_row_has_the_same_bits_in_chunks_that_later_tokens_have_not_been_written_for() -> None:
    paged = Paged(BASE, [LONG])
    whole = paged.attend([LONG])[0]
    fresh = Paged(BASE, [LONG])
    fresh.array[:] = np.nan
    for start, end in ((0, 7), (7, 300), (300, LONG)):
        for t in range(start, end):
            fresh.write(0, t)
        assert_same_bits(fresh.attend([end - start], seq_lens=[end]), [whole[start:end]])


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_bad_value_of_a_later_token_does_not_reach_earlier_rows(value: float) -> None:
    paged = Paged(BASE, [90])
    expected = paged.attend([90])[0]
    paged.v[0][71] = value
    paged.k[0][72] = value
    slot = paged.array.copy()
    paged.write(0, 71)
    paged.write(0, 72)
    assert not np.array_equal(paged.array, slot, equal_nan=True)
    out = paged.attend([90])[0]
    assert_same_bits([out[:71]], [expected[:71]])


def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    lens = [LONG, 17, 300, 1, 257, 64, 130]
    paged = Paged(BASE, lens)
    for query_lens in ([1] * len(lens), [5, 17, 300, 1, 2, 1, 80]):
        together = paged.attend(query_lens)
        for index, n in enumerate(lens):
            alone = Paged(BASE, [n])
            for name in ("q", "k", "v"):
                setattr(alone, name, [getattr(paged, name)[index]])
            for t in range(n):
                alone.write(0, t)
            assert_same_bits(alone.attend([query_lens[index]]), [together[index]])


@pytest.mark.parametrize("window", [0, 290])
@pytest.mark.parametrize("query_len", [1, 3, 20])
def test_splitting_a_context_over_items_changes_no_bit(window: int, query_len: int) -> None:
    paged = Paged(dataclasses.replace(BASE, window=window), [1500])
    whole = paged.attend([query_len], max_states=0)
    assert paged.num_combines == 0
    for order in (1, -1):
        split = paged.attend([query_len], order=order)
        assert paged.num_combines > 0
        assert_same_bits(split, whole)


def test_a_query_that_is_not_a_number_gives_none_whole_and_split() -> None:
    paged = Paged(Shape(), [1500])
    paged.q[0][-1] = np.nan
    for max_states in (0, None):
        assert np.isnan(paged.attend([1], max_states=max_states)[0]).all()


def test_splitting_a_context_does_not_change_the_sign_of_zero() -> None:
    paged = Paged(Shape(num_heads=2, num_kv_heads=2), [1500])
    paged.q[0][:], paged.k[0][:], paged.v[0][:] = 0, 0, -0.0
    paged.q[0][..., 0] = 100
    paged.k[0][::256, :, 0], paged.v[0][::256] = -100, -(2.0**-24)  # each split's first: their product underflows
    for t in range(1500):
        paged.write(0, t)
    [whole], [split] = paged.attend([1], max_states=0), paged.attend([1])
    np.testing.assert_array_equal(whole.view(np.int32), split.view(np.int32))


@pytest.mark.parametrize("window", [0, 90])
def test_block_sizes_have_the_same_bits(window: int) -> None:
    shapes = [dataclasses.replace(BASE, block_size=size, window=window) for size in (16, 32, 48, 64, 128)]
    for query_lens in ([1, 1], [200, 33]):
        first, *others = (Paged(shape, [LONG, 33]).attend(query_lens) for shape in shapes)
        for other in others:
            assert_same_bits(other, first)


@pytest.mark.parametrize("tile", [tile_without_prefetch, tile_double_buffered])
@pytest.mark.parametrize("window", [0, 70])
def test_looking_ahead_changes_no_bit(tile: object, window: int) -> None:
    for block_size, head_dim in ((16, 32), (32, 80)):
        shape = dataclasses.replace(BASE, window=window, block_size=block_size, head_dim=head_dim)
        paged = Paged(shape, [LONG, 33, 1])
        for query_lens in ([1, 1, 1], [40, 33, 1]):
            assert_same_bits(paged.attend(query_lens, tile=tile), paged.attend(query_lens))


def test_large_scores_neither_overflow_nor_lose_the_largest() -> None:
    paged = Paged(BASE, [100])
    paged.q[0] *= 1000
    np.testing.assert_allclose(paged.attend([100])[0], paged.dense(0, 100), rtol=1e-4, atol=1e-4)
