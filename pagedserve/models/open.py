"""open_checkpoint: from a path to an opened model, whatever kind of file it is."""

from __future__ import annotations

from pathlib import Path

from pagedserve.contract.errors import ModelError
from pagedserve.models.demo import DEMO, DemoCheckpoint
from pagedserve.models.families import FAMILIES
from pagedserve.models.family import Family
from pagedserve.models.gguf import open_gguf
from pagedserve.models.hf import open_hf
from pagedserve.models.spec import Checkpoint


def open_checkpoint(path: str | Path, families: tuple[Family, ...] = FAMILIES) -> Checkpoint:
    """Open a GGUF file, a Hugging Face folder, or "demo". Headers and shapes are checked here, weights are only mapped.

    ModelError, one line that names the file and the reason, when it cannot be served.
    """
    if str(path) == DEMO:
        return DemoCheckpoint()
    path = Path(path)
    if not path.exists():
        raise ModelError(f"{path}: no such file or folder")
    return open_hf(path, families) if path.is_dir() else open_gguf(path, families)
