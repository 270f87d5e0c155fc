"""Limits: the numbers that bound one scheduler. Checked once, never changed afterwards."""

from __future__ import annotations

from dataclasses import dataclass

from pagedserve.contract.errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """What the scheduler may use. ConfigError names the field that is out of range.

    max_num_batched_tokens  tokens in one step, all sequences together
    min_mixed_prompt_tokens  prompt tokens in a step while few sequences wait for their next token (with many the
                            Planner allows more): it bounds how much a long prompt can slow the others
    attention_parity        context at which a prompt token's attention takes as long as the rest of the model: behind a
                            context of c a prompt token counts as 1 + c / attention_parity of them
    max_num_seqs            sequences that run at the same time
    max_num_rows            rows of logits in one step (0: max_num_seqs); several rows may be of one token
    max_waiting             sequences in the queue; one more is refused with queue_full
    sliding_window          only when every layer has it: blocks wholly outside it are given back
    num_speculative_tokens  drafts a step for requests that do not say (0: no speculation)
    """

    block_size: int
    num_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    max_waiting: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    sliding_window: int = 0
    enable_prefix_caching: bool = True
    num_speculative_tokens: int = 0
    min_mixed_prompt_tokens: int = 48
    attention_parity: int = 512
    max_num_rows: int = 0

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "num_blocks",
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_model_len",
            "max_waiting",
            "vocab_size",
            "min_mixed_prompt_tokens",
            "attention_parity",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence gets one token in each step"
            )
        if self.max_num_rows == 0:
            object.__setattr__(self, "max_num_rows", self.max_num_seqs)
        if self.max_num_rows < self.max_num_seqs:
            raise ConfigError(f"max_num_rows ({self.max_num_rows}) must be at least max_num_seqs ({self.max_num_seqs})")

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold K and V of `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def prompt_token_cost(self, context: int) -> float:
        """The work of a prompt token after `context` others, in tokens without context."""
        if self.sliding_window:
            context = min(context, self.sliding_window)
        return 1.0 + context / self.attention_parity

    def max_blocks_at_once(self, num_tokens: int) -> int:
        """Most blocks that a sequence of `num_tokens` tokens ever holds: fewer than all with a sliding window."""
        num_blocks = self.num_blocks_for(num_tokens)
        if self.sliding_window:
            num_blocks = min(num_blocks, self.num_blocks_for(self.sliding_window + self.max_num_batched_tokens) + 1)
        return num_blocks
