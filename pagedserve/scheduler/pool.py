"""Pool: what happens to a sequence's blocks, from the first hit in the prefix cache to the last release.

Sharing, copy-on-write and the sliding window are here; who gets blocks and when is the scheduler's decision.
"""

from __future__ import annotations

from pagedserve.scheduler.block_allocator import BlockAllocator
from pagedserve.scheduler.invariants import require
from pagedserve.scheduler.limits import Limits
from pagedserve.scheduler.prefix_cache import PrefixCache, block_hash, root_hash
from pagedserve.scheduler.request import Sequence


class Pool:
    """The blocks of one instance and the tables that refer to them."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._block_size = limits.block_size
        self.cache = PrefixCache()
        self.allocator = BlockAllocator(limits.num_blocks, self.cache)
        self._copy_sources: set[int] = set()  # blocks that the step being planned or in flight copies from
        self._kept: list[int] = []  # last references to blocks that a step in flight reads, until it is answered

    # ---- sharing what is computed -----------------------------------------------------------------------------------

    def find_cached(self, sequence: Sequence) -> list[int]:
        """The cached blocks that a sequence can go on with, from its num_computed_tokens; its last token is left.

        With a sliding window a sequence that has computed nothing may begin anywhere: blocks that the window has left
        are not needed, and are -1.
        """
        if not self._limits.enable_prefix_caching or sequence.request.lacks_prompt_logprobs:
            return []
        first = sequence.num_computed_tokens // self._block_size
        last = (sequence.num_tokens - 1) // self._block_size
        if self._limits.sliding_window and first == 0:
            return self._find_window(sequence, last)
        found = []
        for index in range(first, last):
            block_id = self._find(sequence, index)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def _find_window(self, sequence: Sequence, last: int) -> list[int]:
        """The longest prefix of which all blocks that its next query sees are cached."""
        found: list[int] = []  # blocks of a run that ends before `end`, last first
        end = last
        for index in reversed(range(last)):
            block_id = self._find(sequence, index)
            if block_id is None:
                found, end = [], index
                continue
            found.append(block_id)
            if index <= self._first_seen_block(end * self._block_size):
                break
        return [-1] * (end - len(found)) + found[::-1] if found else []

    def take_cached(self, sequence: Sequence, block_ids: list[int]) -> None:
        """Go on with blocks that `find_cached` gave: nothing of them is computed again."""
        first = sequence.num_computed_tokens // self._block_size
        for index, block_id in enumerate(block_ids, start=first):
            if block_id >= 0:
                self.allocator.share(block_id)
            if index < sequence.table.length:  # what the sequence had of this block so far
                self._give_back(int(sequence.table.values[index]))
                sequence.table.values[index] = block_id
            else:
                sequence.table.append(block_id)
                if block_id < 0:
                    sequence.num_left_blocks = index + 1
        if block_ids:
            sequence.num_published_blocks = first + len(block_ids)
            sequence.num_computed_tokens = sequence.num_published_blocks * self._block_size

    def publish(self, sequence: Sequence) -> None:
        """Make the blocks that have become full findable.

        Where somebody else has published the same tokens meanwhile, the sequence goes on with that block and gives its
        own back: a token's K and V are kept once. What a step in flight reads is given back when that is answered.
        """
        if not self._limits.enable_prefix_caching:
            return
        table = sequence.table.values
        for index in range(sequence.num_published_blocks, sequence.num_computed_tokens // self._block_size):
            own = int(table[index])
            parent, token_ids = self._parent(sequence, index), self._token_ids(sequence, index)
            published = self.cache.find(self.block_hash(sequence, index), parent, token_ids)
            if published is None:
                self.cache.insert(own, self.block_hash(sequence, index), parent, token_ids)
            elif published != own:
                self.allocator.share(published)
                if sequence.num_steps_in_flight:
                    self._kept.append(own)
                else:
                    self.allocator.release(own)
                table[index] = published
            sequence.num_published_blocks = index + 1

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let the child share all that the parent has computed, a last partial block included."""
        child.num_computed_tokens = parent.num_computed_tokens
        child.table = parent.table.copy()
        child.table.truncate(self._limits.num_blocks_for(parent.num_computed_tokens))
        for block_id in child.table.view(parent.num_left_blocks).tolist():
            self.allocator.share(block_id)
        num_full_blocks = parent.num_computed_tokens // self._block_size
        child.block_hashes = parent.block_hashes[:num_full_blocks]
        child.num_published_blocks = min(parent.num_published_blocks, num_full_blocks)
        child.num_left_blocks = parent.num_left_blocks

    # ---- writing ----------------------------------------------------------------------------------------------------

    def num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks to allocate before `num_tokens` more tokens can be written, the copy of a shared one included."""
        end = sequence.num_computed_tokens + num_tokens
        missing = -(-end // self._block_size) - sequence.table.length
        return max(missing, 0) + (1 if self.is_shared(sequence) else 0)

    def extend(self, sequence: Sequence, num_tokens: int) -> tuple[int, int] | None:
        """Give a sequence the blocks for `num_tokens` more tokens, of which `num_missing` must be available.

        The first block to be written is made the sequence's own: (source, destination) of a copy when others share it.
        """
        copy = None
        if sequence.num_computed_tokens % self._block_size:
            index = sequence.num_computed_tokens // self._block_size
            block_id = int(sequence.table.values[index])
            if self.allocator.ref_counts[block_id] > 1:
                copy = (block_id, self._allocate())
                sequence.table.values[index] = copy[1]
                self.allocator.release(block_id)
                self._copy_sources.add(block_id)
            elif self.cache.holds(block_id):  # filled and published by a sequence that this one was forked from
                self.cache.forget(block_id)
        end = sequence.num_computed_tokens + num_tokens
        for _ in range(-(-end // self._block_size) - sequence.table.length):
            sequence.table.append(self._allocate())
        return copy

    def is_shared(self, sequence: Sequence) -> bool:
        """Whether the block that the next token is written to has other users (only a partial block can)."""
        if sequence.num_computed_tokens % self._block_size == 0:
            return False
        block_id = int(sequence.table.values[sequence.num_computed_tokens // self._block_size])
        return self.allocator.ref_counts[block_id] > 1

    def _allocate(self) -> int:
        block_id = self.allocator.allocate()
        assert block_id is not None, "num_missing was not checked"
        return block_id

    # ---- giving back ------------------------------------------------------------------------------------------------

    def release(self, sequence: Sequence) -> None:
        """Give all blocks back, last first, so that the cache evicts tails before heads."""
        for block_id in reversed(sequence.table.view(sequence.num_left_blocks).tolist()):
            self._give_back(block_id)
        sequence.table.truncate(0)
        sequence.num_computed_tokens = 0
        sequence.num_published_blocks = 0
        sequence.num_left_blocks = 0

    def settle(self) -> None:
        """The first step in flight has been answered: what was kept for it may go."""
        for block_id in self._kept:
            self.allocator.release(block_id)
        self._kept.clear()
        self._copy_sources.clear()

    def trim(self, sequence: Sequence) -> None:
        """Give back the blocks of rejected drafts: those beyond what the known tokens need."""
        needed = self._limits.num_blocks_for(sequence.num_tokens)
        for block_id in reversed(sequence.table.view(needed).tolist()):
            self.allocator.release(block_id)
        sequence.table.truncate(needed)

    def leave_window(self, sequence: Sequence) -> None:
        """Give back the blocks that no later token of the sequence will see."""
        if not self._limits.sliding_window:
            return
        first = self._first_seen_block(sequence.num_computed_tokens)
        for index in range(sequence.num_left_blocks, first):
            self.allocator.release(int(sequence.table.values[index]))
            sequence.table.values[index] = -1
            sequence.num_left_blocks = index + 1

    def _first_seen_block(self, position: int) -> int:
        return max(0, position - self._limits.sliding_window + 1) // self._block_size

    def _give_back(self, block_id: int) -> None:
        if block_id in self._copy_sources and self.allocator.ref_counts[block_id] == 1:
            self._kept.append(block_id)  # nobody may write to it before the copy is made
        else:
            self.allocator.release(block_id)

    # ---- hashes -----------------------------------------------------------------------------------------------------

    def block_hash(self, sequence: Sequence, index: int) -> bytes:
        """The hash of a sequence's full block `index`; each is computed once."""
        hashes = sequence.block_hashes
        while len(hashes) <= index:
            hashes.append(block_hash(self._parent(sequence, len(hashes)), self._token_ids(sequence, len(hashes))))
        return hashes[index]

    def _parent(self, sequence: Sequence, index: int) -> bytes:
        return sequence.block_hashes[index - 1] if index else root_hash(sequence.request.cache_salt)

    def _token_ids(self, sequence: Sequence, index: int) -> bytes:
        return sequence.tokens.values[index * self._block_size : (index + 1) * self._block_size].tobytes()

    def _find(self, sequence: Sequence, index: int) -> int | None:
        hash = self.block_hash(sequence, index)
        return self.cache.find(hash, self._parent(sequence, index), self._token_ids(sequence, index))

    # ---- invariants -------------------------------------------------------------------------------------------------

    def check(self, holders: list[Sequence]) -> None:
        """InvariantError unless reference counts equal table entries and tables hold what they must. `holders`: all
        sequences that may hold blocks."""
        self.allocator.check()
        counts = [0] * self._limits.num_blocks
        for block_id in self._kept:
            counts[block_id] += 1
        for sequence in holders:
            table = sequence.table.view().tolist()
            name = f"{sequence.request.request_id}[{sequence.index}]"
            left = table[: sequence.num_left_blocks]
            require(all(block_id == -1 for block_id in left), f"{name}: a block outside the window is kept")
            require(all(block_id >= 0 for block_id in table[len(left) :]), f"{name}: a block is missing")
            for block_id in table[len(left) :]:
                counts[block_id] += 1
            num_full_blocks = sequence.num_computed_tokens // self._block_size
            require(
                len(table) >= self._limits.num_blocks_for(sequence.num_computed_tokens),
                f"{name}: fewer blocks than computed tokens need",
            )
            require(sequence.num_published_blocks <= num_full_blocks, f"{name}: a partial block is published")
            for index in range(len(left), sequence.num_published_blocks):
                require(self._find(sequence, index) == table[index], f"{name}: a published block cannot be found")
        require(counts == self.allocator.ref_counts, "reference counts differ from table entries")

    def check_writes(self, sequence: Sequence, end: int) -> None:
        """InvariantError unless the blocks of a sequence's tokens from the first that is not computed to position `end`
        are there, in use, and nobody can find them as full."""
        first = sequence.num_computed_tokens // self._block_size
        end = self._limits.num_blocks_for(end)
        require(sequence.table.length >= end, "a step writes to a block that the sequence does not have")
        for block_id in sequence.table.values[first:end].tolist():
            require(self.allocator.ref_counts[block_id] > 0, f"block {block_id} is free while a step writes to it")
            require(not self.cache.holds(block_id), f"block {block_id} is full and shared, but a step writes to it")
