"""Qwen 3: Llama with a norm on each head of q and k, and a head_dim apart from hidden_size / num_heads."""

from __future__ import annotations

from pagedserve.models.family import Family

FAMILY = Family(name="qwen3", qk_norm=True, optional_biases=frozenset({"q", "k", "v", "o"}))
