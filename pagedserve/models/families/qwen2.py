"""Qwen 2 and 2.5: Llama with biases on q, k and v."""

from __future__ import annotations

from pagedserve.models.family import Family

FAMILY = Family(name="qwen2", biases=frozenset({"q", "k", "v"}))
