"""PrefixCache: what counts as the same prefix, and the order in which unused blocks go."""

from __future__ import annotations

import hashlib

from pagedserve.scheduler.prefix_cache import PrefixCache, block_hash, root_hash


def test_a_hash_is_sha256_of_parent_and_tokens() -> None:
    assert block_hash(b"parent", b"\1\0\0\0") == hashlib.sha256(b"parent\1\0\0\0").digest()


def test_salts_make_different_roots() -> None:
    assert root_hash("") != root_hash("tenant")


def test_a_block_is_found_only_by_its_tokens_after_its_parent() -> None:
    cache, root = PrefixCache(), root_hash("")
    first, second = block_hash(root, b"aaaa"), block_hash(block_hash(root, b"aaaa"), b"bbbb")
    cache.insert(4, first, root, b"aaaa")
    cache.insert(7, second, first, b"bbbb")
    assert cache.find(second, first, b"bbbb") == 7
    assert cache.find(block_hash(root, b"bbbb"), root, b"bbbb") is None


def test_equal_hashes_of_unequal_tokens_are_no_hit() -> None:
    cache, root = PrefixCache(), root_hash("")
    cache.insert(4, b"forged", root, b"aaaa")
    assert cache.find(b"forged", root, b"bbbb") is None
    assert cache.find(b"forged", b"another parent", b"aaaa") is None
    cache.insert(5, b"forged", root, b"bbbb")  # the first keeps the hash
    assert cache.find(b"forged", root, b"aaaa") == 4
    assert not cache.holds(5)


def test_least_recently_used_goes_first() -> None:
    cache, root = PrefixCache(), root_hash("")
    for block_id in range(3):
        content = bytes([block_id] * 4)
        cache.insert(block_id, block_hash(root, content), root, content)
    for block_id in (1, 0, 2):
        cache.retire(block_id)
    cache.revive(1)
    cache.retire(1)
    assert [cache.evict() for _ in range(4)] == [0, 2, 1, None]
