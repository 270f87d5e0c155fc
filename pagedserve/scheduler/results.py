"""Results: a StepResult's columns, checked against the rows of its plan."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from pagedserve.contract.errors import ProtocolError
from pagedserve.contract.messages import StepResult, TokenLogprobs, unpack_ids


class Results:
    """What each row of a step gave. `num_logprobs` is what its plan asked for; ProtocolError when they differ.

    `token_ids` are those of the first round's rows, then the second's, and so on; logprobs are of steps of one round.
    """

    def __init__(self, result: StepResult, num_logprobs: list[int], num_rounds: int, vocab_size: int) -> None:
        self.token_ids: list[int] = unpack_ids(result.sampled_token_ids).tolist()
        num_rows = self._num_rows = len(num_logprobs)
        num_sampled = num_rounds * num_rows
        if len(self.token_ids) != num_sampled:
            raise ProtocolError(f"sampled_token_ids: expected {num_sampled} ids, got {len(self.token_ids)}")
        if num_sampled and not 0 <= min(self.token_ids) <= max(self.token_ids) < vocab_size:
            raise ProtocolError(f"sampled_token_ids: expected ids within [0, {vocab_size - 1}]")
        if not any(number >= 0 for number in num_logprobs):
            return
        self._logprobs = np.frombuffer(result.logprobs, dtype="<f4")
        self._ranks = unpack_ids(result.ranks)
        if len(self._logprobs) != num_rows or len(self._ranks) != num_rows:
            raise ProtocolError(f"logprobs, ranks: expected {num_rows} rows")
        self._top_start = [0, *accumulate(max(number, 0) for number in num_logprobs)]
        self._top_token_ids, self._top_logprobs = result.top_token_ids, result.top_logprobs
        if len(self._top_token_ids) != len(self._top_logprobs) or len(self._top_token_ids) != 4 * self._top_start[-1]:
            raise ProtocolError(f"top_token_ids, top_logprobs: expected {self._top_start[-1]} values")

    def of_rounds(self, row: int) -> list[int]:
        """What a row sampled in each round."""
        return self.token_ids[row :: self._num_rows]

    def logprobs(self, row: int) -> TokenLogprobs:
        """Logprobs of a row that asked for them."""
        start, end = 4 * self._top_start[row], 4 * self._top_start[row + 1]
        return TokenLogprobs(
            logprob=float(self._logprobs[row]),
            rank=int(self._ranks[row]),
            top_token_ids=self._top_token_ids[start:end],
            top_logprobs=self._top_logprobs[start:end],
        )
