"""BlockAllocator: who may use which block of the pool. Counts references; never looks into a block or a table."""

from __future__ import annotations

from pagedserve.scheduler.invariants import require
from pagedserve.scheduler.prefix_cache import PrefixCache

FREE, CACHED, PRIVATE, SHARED = range(4)  # the states of Status.block_states


class BlockAllocator:
    """Each block is free, cached (unused, but its content can still be found) or referenced (by 1 or more tables)."""

    def __init__(self, num_blocks: int, cache: PrefixCache) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._cache = cache
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is warm in the CPU's caches

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that hold cached tokens and that nobody references."""
        return self._cache.num_unused

    @property
    def num_referenced(self) -> int:
        """Blocks in at least one table."""
        return self.num_blocks - self.num_available

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can still give."""
        return len(self._free) + self._cache.num_unused

    def allocate(self) -> int | None:
        """A block with one reference: a free one, else the least recently used cached one; None when there is none."""
        block_id = self._free.pop() if self._free else self._cache.evict()
        if block_id is not None:
            self.ref_counts[block_id] = 1
        return block_id

    def share(self, block_id: int) -> None:
        """Add a reference to a block that is referenced or cached."""
        if self.ref_counts[block_id] == 0:
            self._cache.revive(block_id)
        self.ref_counts[block_id] += 1

    def release(self, block_id: int) -> None:
        """Take a reference away; with the last one the block becomes cached, or free when it cannot be found."""
        count = self.ref_counts[block_id] - 1
        assert count >= 0, f"block {block_id} released more often than referenced"
        self.ref_counts[block_id] = count
        if count == 0:
            if self._cache.holds(block_id):
                self._cache.retire(block_id)
            else:
                self._free.append(block_id)

    def states(self) -> bytes:
        """One byte a block: FREE, CACHED, PRIVATE or SHARED."""
        states = bytearray(min(count, 2) + 1 if count else FREE for count in self.ref_counts)
        for entry in self._cache.entries():
            if states[entry.block_id] == FREE:
                states[entry.block_id] = CACHED
        return bytes(states)

    def check(self) -> None:
        """InvariantError when a block is in two states at once or in none."""
        self._cache.check()
        free = set(self._free)
        require(len(free) == len(self._free), "a block is free twice")
        referenced = {block_id for block_id, count in enumerate(self.ref_counts) if count > 0}
        require(not free & referenced, f"free and referenced at once: {sorted(free & referenced)}")
        cached = {entry.block_id for entry in self._cache.entries()}
        require(not free & cached, f"free and cached at once: {sorted(free & cached)}")
        require(len(cached - referenced) == self.num_cached, "a cached block without users is not marked as unused")
        require(len(free) + self.num_cached + len(referenced) == self.num_blocks, "a block is lost")
