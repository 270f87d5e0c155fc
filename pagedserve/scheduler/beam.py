"""Beam search: from the most likely next tokens of all beams to the next beams. Holds no blocks and forks nothing.

The rules are those of Hugging Face transformers' BeamSearchScorer: of the 2 * width best continuations, the first
`width` that end are finished, and the best `width` that do not are the next beams.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagedserve.contract.messages import TokenLogprobs, unpack_ids
from pagedserve.scheduler.request import Request, Sequence


@dataclass(frozen=True, slots=True)
class Branch:
    """A beam of the next step: beam number `parent` with one more token."""

    parent: int
    token_id: int
    logprobs: TokenLogprobs
    cumulative_logprob: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished output. `score` is cumulative_logprob / length ** length_penalty, length in output tokens."""

    score: float
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    cumulative_logprob: float
    finish_reason: str
    stop_token_id: int | None


class BeamSearch:
    """The finished outputs of one request, best first, and the rule that makes the next beams."""

    def __init__(self, request: Request) -> None:
        sampling = request.sampling
        self._width = sampling.beam_width
        self._length_penalty = sampling.length_penalty
        self._early_stopping = sampling.early_stopping
        self._min_tokens = sampling.min_tokens
        self._stop_token_ids = request.stop_token_ids
        self._num_logprobs = sampling.logprobs or 0
        self._max_output_tokens = request.max_num_tokens - request.num_prompt_tokens
        self.hypotheses: list[Hypothesis] = []

    def advance(self, beams: list[Sequence]) -> list[Branch]:
        """The next beams, best first; none when the search is over. All `beams` have their candidates."""
        length = beams[0].num_output_tokens + 1
        branches: list[Branch] = []
        for place, branch in enumerate(self._continuations(beams)[: 2 * self._width]):
            if branch.token_id in self._stop_token_ids:
                if place < self._width:
                    self._finish(beams[branch.parent], branch, "stop")
            elif len(branches) < self._width:
                branches.append(branch)
        if length == self._max_output_tokens:
            if not self._is_over(branches, length):
                for branch in branches:
                    self._finish(beams[branch.parent], branch, "length")
            return []
        return [] if self._is_over(branches, length) else branches

    def _continuations(self, beams: list[Sequence]) -> list[Branch]:
        """All candidates of all beams, most likely first; ties: the earlier beam, then the likelier token."""
        found = []
        for parent, beam in enumerate(beams):
            assert beam.candidates is not None
            logprobs = np.frombuffer(beam.candidates.top_logprobs, dtype="<f4").tolist()
            token_ids = unpack_ids(beam.candidates.top_token_ids).tolist()
            for rank, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True), start=1):
                if beam.num_output_tokens < self._min_tokens and token_id in self._stop_token_ids:
                    continue
                kept = TokenLogprobs(
                    logprob=logprob,
                    rank=rank,
                    top_token_ids=beam.candidates.top_token_ids[: 4 * self._num_logprobs],
                    top_logprobs=beam.candidates.top_logprobs[: 4 * self._num_logprobs],
                )
                found.append(Branch(parent, token_id, kept, beam.cumulative_logprob + logprob))
        found.sort(key=lambda branch: (-branch.cumulative_logprob, branch.parent, branch.logprobs.rank))
        return found

    def _finish(self, beam: Sequence, branch: Branch, reason: str) -> None:
        token_ids = (*beam.output_token_ids().tolist(), branch.token_id)
        self.hypotheses.append(
            Hypothesis(
                score=self._score(branch.cumulative_logprob, len(token_ids)),
                token_ids=token_ids,
                logprobs=(*beam.logprobs, branch.logprobs),
                cumulative_logprob=branch.cumulative_logprob,
                finish_reason=reason,
                stop_token_id=branch.token_id if reason == "stop" else None,
            )
        )
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self._width :]

    def _is_over(self, branches: list[Branch], length: int) -> bool:
        if not branches:
            return True
        if len(self.hypotheses) < self._width:
            return False
        if self._early_stopping:
            return True
        best_possible = self._score(branches[0].cumulative_logprob, length)
        return self.hypotheses[-1].score >= best_possible

    def _score(self, cumulative_logprob: float, length: int) -> float:
        return cumulative_logprob / float(length**self._length_penalty)
