"""Speculation by prompt lookup: a sequence's own tokens are the draft model (Saxena 2023, "prompt lookup decoding")."""

from __future__ import annotations

import numpy as np

from pagedserve.contract.messages import Int32

MIN_NGRAM = 2
MAX_NGRAM = 5


def propose(token_ids: Int32, num_drafts: int) -> Int32:
    """What followed the latest earlier occurrence of the last tokens: `num_drafts` drafts, or none.

    The longest match counts, MIN_NGRAM to MAX_NGRAM tokens; where what followed reaches the end, the text is a loop and
    the drafts go round it.
    """
    ends = np.flatnonzero(token_ids[:-1] == token_ids[-1])  # positions where an occurrence could end
    length = 1
    while length < MAX_NGRAM:
        longer = ends[ends >= length]
        if len(longer) > 0:
            longer = longer[token_ids[longer - length] == token_ids[-1 - length]]
        if len(longer) == 0:
            break
        ends, length = longer, length + 1
    if length < MIN_NGRAM:
        return np.empty(0, dtype=np.int32)
    start = int(ends[-1]) + 1
    return token_ids[start + np.arange(num_drafts) % (len(token_ids) - start)]


def num_accepted(drafts: Int32, sampled_token_ids: list[int]) -> int:
    """How many leading drafts are the tokens that were sampled where they stand."""
    count = 0
    for draft, sampled in zip(drafts.tolist(), sampled_token_ids, strict=False):
        if draft != sampled:
            break
        count += 1
    return count
