"""How many blocks the KV pool has: as configured, or a sensible share of what is free."""

from __future__ import annotations

import shutil
from pathlib import Path

from pagedserve.contract.errors import ConfigError
from pagedserve.contract.segments import SHM_FOLDER

_SHARE_OF_FREE = 4  # a quarter
_MAX_CONTEXTS = 8  # of the model's full length: beyond that, memory helps few and costs start-up time


def num_blocks(
    *, pool_tokens: int, pool_bytes: int, block_size: int, block_bytes: int, max_model_len: int, free_bytes: int
) -> int:
    """Blocks of the pool: from tokens, else from bytes, else a quarter of the free memory, at most eight full contexts.

    ConfigError when what was asked for is less than one block.
    """
    if pool_tokens:
        blocks, key = pool_tokens // block_size, "pool_tokens"
    elif pool_bytes:
        blocks, key = pool_bytes // block_bytes, "pool_bytes"
    else:
        wanted = _MAX_CONTEXTS * -(-max_model_len // block_size)
        blocks, key = max(1, min(free_bytes // _SHARE_OF_FREE // block_bytes, wanted)), "pool_bytes"
    if blocks < 1:
        raise ConfigError(f"{key}: expected at least one block of {block_size} tokens ({block_bytes:,} bytes)")
    return blocks


def free_memory_bytes() -> int:
    """What may still be used: the machine's available memory or the room in /dev/shm, whichever is less."""
    available = shutil.disk_usage(SHM_FOLDER).free
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = min(available, int(line.split()[1]) * 1024)
    return available
