"""PrefixCache: which full blocks hold which tokens, by a chained SHA-256, and which of them nobody uses now.

It never allocates and counts no references: BlockAllocator tells it when a block's last user is gone.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

from pagedserve.scheduler.invariants import require


def root_hash(cache_salt: str) -> bytes:
    """The parent of a first block: requests with different salts never share."""
    return hashlib.sha256(b"pagedserve" + cache_salt.encode()).digest()


def block_hash(parent: bytes, token_ids: bytes) -> bytes:
    """The hash of a full block: of its tokens (int32 bytes) and of all tokens before it, through `parent`."""
    return hashlib.sha256(parent + token_ids).digest()


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A block whose K and V are computed, and what it holds."""

    block_id: int
    hash: bytes
    parent: bytes
    token_ids: bytes


class PrefixCache:
    """Maps block hashes to blocks. Unused blocks stay until the allocator needs one: least recently used first.

    A sequence gives its blocks back from the last to the first, so that of blocks unused since the same moment the tail
    of a prefix goes before its head.
    """

    def __init__(self) -> None:
        self._by_hash: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_unused(self) -> int:
        """Blocks that are cached and referenced by nobody."""
        return len(self._unused)

    def find(self, hash: bytes, parent: bytes, token_ids: bytes) -> int | None:
        """The block that holds exactly these tokens after exactly this parent; the hash alone is not believed."""
        entry = self._by_hash.get(hash)
        if entry is None or entry.token_ids != token_ids or entry.parent != parent:
            return None
        return entry.block_id

    def insert(self, block_id: int, hash: bytes, parent: bytes, token_ids: bytes) -> None:
        """Remember a full, computed block that somebody references. A hash that is taken keeps its block."""
        if hash not in self._by_hash:
            self._by_hash[hash] = self._by_block[block_id] = CachedBlock(block_id, hash, parent, token_ids)

    def holds(self, block_id: int) -> bool:
        """Whether the block may be found by its hash."""
        return block_id in self._by_block

    def retire(self, block_id: int) -> None:
        """The block's last user is gone: it may be evicted from now on."""
        self._unused[block_id] = None

    def revive(self, block_id: int) -> None:
        """Somebody uses a retired block again."""
        del self._unused[block_id]

    def evict(self) -> int | None:
        """Forget the least recently used of the unused blocks and give its id; None when all are in use."""
        if not self._unused:
            return None
        block_id, _ = self._unused.popitem(last=False)
        self.forget(block_id)
        return block_id

    def forget(self, block_id: int) -> None:
        """The block's content is about to change: it cannot be found any more."""
        entry = self._by_block.pop(block_id)
        del self._by_hash[entry.hash]

    def entries(self) -> list[CachedBlock]:
        """All cached blocks, for checks."""
        return list(self._by_hash.values())

    def check(self) -> None:
        """InvariantError when the two maps disagree or an unused block is not cached."""
        require(len(self._by_hash) == len(self._by_block), "hash map and block map differ in size")
        for hash, entry in self._by_hash.items():
            require(entry.hash == hash, f"block {entry.block_id} is filed under another block's hash")
            require(block_hash(entry.parent, entry.token_ids) == hash, f"block {entry.block_id} has a wrong hash")
            require(self._by_block.get(entry.block_id) is entry, f"block {entry.block_id} is not in the block map")
        require(self._unused.keys() <= self._by_block.keys(), "an unused block is not cached")
