"""What all tests share: one cache of compiled kernels, the one that worker processes use; the default model's file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagedserve.config import load_config
from pagedserve.models.catalog import fetch_if_missing
from workers.isa import kernel_environment

# Before anything imports Numba, which reads its environment once.
os.environ.update(kernel_environment("auto", Path(load_config().home)))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The file of SmolLM2-135M-Instruct, fetched when this user has none yet."""
    return fetch_if_missing("smollm2", load_config().models_dir)
