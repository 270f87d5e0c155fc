"""PagedServe: a server for language models on ordinary CPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedserve.contract.sampling import SamplingParams
    from pagedserve.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """LLM and SamplingParams, when they are first used: every process of a server imports this package."""
    from importlib import import_module

    homes = {"LLM": "pagedserve.llm", "SamplingParams": "pagedserve.contract.sampling"}
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(homes[name]), name)
