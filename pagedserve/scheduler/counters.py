"""Counters: totals since the start, as Status reports them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Counters:
    """Names and meanings are those of contract.messages.Status."""

    num_steps_ahead: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_cached_tokens: int = 0
    num_queried_tokens: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_finished: dict[str, int] = field(default_factory=dict)
