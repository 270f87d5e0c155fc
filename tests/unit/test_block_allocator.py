"""BlockAllocator: each block is free, cached or referenced, and who gets which block next."""

from __future__ import annotations

import pytest

from pagedserve.scheduler.block_allocator import CACHED, FREE, PRIVATE, SHARED, BlockAllocator
from pagedserve.scheduler.invariants import InvariantError
from pagedserve.scheduler.prefix_cache import PrefixCache, block_hash, root_hash


def make(num_blocks: int) -> tuple[BlockAllocator, PrefixCache]:
    cache = PrefixCache()
    return BlockAllocator(num_blocks, cache), cache


def allocate(allocator: BlockAllocator) -> int:
    block_id = allocator.allocate()
    assert block_id is not None
    return block_id


def publish(cache: PrefixCache, block_id: int, content: bytes) -> None:
    cache.insert(block_id, block_hash(root_hash(""), content), root_hash(""), content)


def counts(allocator: BlockAllocator) -> tuple[int, int, int]:
    allocator.check()
    return allocator.num_free, allocator.num_cached, allocator.num_referenced


def test_no_block_is_given_twice_and_none_when_all_are_taken() -> None:
    allocator, _ = make(3)
    assert {allocate(allocator) for _ in range(3)} == {0, 1, 2}
    assert allocator.allocate() is None
    assert counts(allocator) == (0, 0, 3)


def test_a_block_is_free_again_when_its_last_reference_goes() -> None:
    allocator, _ = make(2)
    block_id = allocate(allocator)
    allocator.share(block_id)
    allocator.release(block_id)
    assert counts(allocator) == (1, 0, 1)
    allocator.release(block_id)
    assert counts(allocator) == (2, 0, 0)


def test_a_published_block_stays_cached_and_can_be_shared_again() -> None:
    allocator, cache = make(2)
    block_id = allocate(allocator)
    publish(cache, block_id, b"abcd")
    allocator.release(block_id)
    assert counts(allocator) == (1, 1, 0)
    allocator.share(block_id)
    assert counts(allocator) == (1, 0, 1)
    assert allocator.ref_counts[block_id] == 1


def test_free_blocks_are_given_before_cached_ones_and_of_these_the_least_recently_used() -> None:
    allocator, cache = make(4)
    first, second, third = (allocate(allocator) for _ in range(3))
    for block_id in (first, second, third):
        publish(cache, block_id, bytes([block_id] * 4))
    for block_id in (second, first, third):
        allocator.release(block_id)
    allocator.share(second)  # used again: now the most recent
    allocator.release(second)
    assert [allocate(allocator) for _ in range(4)] == [3, first, third, second]
    assert counts(allocator) == (0, 0, 4)


def test_an_evicted_block_cannot_be_found_any_more() -> None:
    allocator, cache = make(1)
    block_id = allocate(allocator)
    publish(cache, block_id, b"abcd")
    allocator.release(block_id)
    assert allocate(allocator) == block_id
    assert cache.find(block_hash(root_hash(""), b"abcd"), root_hash(""), b"abcd") is None


def test_states_names_the_state_of_each_block() -> None:
    allocator, cache = make(4)
    cached, private, shared = (allocate(allocator) for _ in range(3))
    publish(cache, cached, b"abcd")
    allocator.release(cached)
    allocator.share(shared)
    states = allocator.states()
    assert [states[b] for b in (cached, private, shared, 3)] == [CACHED, PRIVATE, SHARED, FREE]


def test_check_finds_a_block_that_is_lost() -> None:
    allocator, _ = make(2)
    allocator.ref_counts[allocate(allocator)] = 0
    with pytest.raises(InvariantError, match="a block is lost"):
        allocator.check()


def test_check_finds_a_block_that_is_free_and_in_use() -> None:
    allocator, _ = make(2)
    allocator.ref_counts[1] = 1
    with pytest.raises(InvariantError, match=r"free and referenced at once: \[1\]"):
        allocator.check()
