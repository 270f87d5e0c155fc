"""Rules of the pool's size."""

from __future__ import annotations

import pytest

from pagedserve.contract.errors import ConfigError
from pagedserve.scheduler.pool_size import num_blocks

GIB = 1 << 30


def blocks(*, pool_tokens: int = 0, pool_bytes: int = 0, free_bytes: int = 64 * GIB, max_model_len: int = 1000) -> int:
    return num_blocks(
        pool_tokens=pool_tokens,
        pool_bytes=pool_bytes,
        block_size=16,
        block_bytes=1 << 20,
        max_model_len=max_model_len,
        free_bytes=free_bytes,
    )


def test_a_pool_in_tokens_has_the_whole_blocks_within_them() -> None:
    assert blocks(pool_tokens=100) == 6


def test_a_pool_in_bytes_has_the_whole_blocks_within_them() -> None:
    assert blocks(pool_bytes=10 * (1 << 20) + 5) == 10


def test_the_default_pool_holds_eight_full_contexts_when_memory_allows() -> None:
    assert blocks() == 8 * 63


def test_the_default_pool_takes_at_most_a_quarter_of_the_free_memory() -> None:
    assert blocks(free_bytes=GIB) == 256


@pytest.mark.parametrize(("values", "key"), [({"pool_tokens": 15}, "pool_tokens"), ({"pool_bytes": 9}, "pool_bytes")])
def test_a_pool_of_less_than_one_block_is_refused(values: dict[str, int], key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: expected at least one block of 16 tokens"):
        blocks(**values)
