"""Llama 1-3, SmolLM, TinyLlama and the many that copied them: RMS norm, rotary positions, gated SiLU, no biases."""

from __future__ import annotations

from pagedserve.models.family import Family

FAMILY = Family(
    name="llama",
    gguf_pairing="adjacent",
    optional_biases=frozenset({"q", "k", "v", "o", "gate", "up", "down"}),
    hf_ignored=(".rotary_emb.inv_freq",),
)
