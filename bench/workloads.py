"""Workloads: what is asked of a server, and when. Seeded, so that two servers get the same prompts. Sends nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

_LOWEST_ID, _HIGHEST_ID = 1000, 40_000  # plain words in the vocabularies of most models


@dataclass(frozen=True)
class Workload:
    """`num_prompts` requests of shared_len + input_len prompt tokens and output_len output tokens each.

    At most `concurrency` of them run at once (0: no limit). `request_rate` requests arrive a second, at random as in a
    Poisson process; 0: as soon as they may run.
    """

    name: str
    concurrency: int
    num_prompts: int
    input_len: int
    output_len: int
    shared_len: int = 0
    request_rate: float = 0.0

    @property
    def prompt_len(self) -> int:
        """Tokens of each prompt."""
        return self.shared_len + self.input_len

    def prompts(self, seed: int, vocab_size: int) -> list[list[int]]:
        """The prompts of token ids, each beginning with the same shared_len of them."""
        rng = random.Random(seed * 1000 + sum(map(ord, self.name)))
        low, high = min(_LOWEST_ID, vocab_size // 2), min(_HIGHEST_ID, vocab_size)

        def token_ids(count: int) -> list[int]:
            return [rng.randrange(low, high) for _ in range(count)]

        shared = token_ids(self.shared_len)
        return [shared + token_ids(self.input_len) for _ in range(self.num_prompts)]

    def arrivals_s(self, seed: int) -> Iterator[float]:
        """Seconds from the start at which each request arrives."""
        rng, now = random.Random(f"{seed} arrivals of {self.name}"), 0.0
        for _ in range(self.num_prompts):
            yield now
            if self.request_rate:
                now += rng.expovariate(self.request_rate)


PRESETS = {
    workload.name: workload
    for workload in (
        Workload("decode1", 1, 3, 128, 128),
        Workload("ttft1k", 1, 4, 1024, 1),
        Workload("conc8", 8, 32, 128, 64),
        Workload("conc32", 32, 64, 128, 64),
        Workload("prefix", 16, 32, 64, 64, shared_len=960),
    )
}
LATENCY = ("decode1", "ttft1k")
SERVE = ("conc8", "conc32", "prefix")
