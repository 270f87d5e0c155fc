"""Mistral: Llama with a sliding window in every layer. (Its GGUF files call themselves `llama`.)"""

from __future__ import annotations

from pagedserve.models.family import Family

FAMILY = Family(name="mistral", gguf_pairing="adjacent", hf_window=True)
