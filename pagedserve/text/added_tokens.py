"""AddedTokens: finds whole tokens (control tokens, user-defined ones) in text, the longest at each place first.

A vocabulary may have six thousand of them, so it looks only where two characters begin one, then in a dictionary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping


class AddedTokens:
    """`tokens` maps a token's text to its id."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        lengths: dict[str, set[int]] = {}
        for token in tokens:
            lengths.setdefault(token[:2], set()).add(len(token))
        self._lengths = {head: sorted(found, reverse=True) for head, found in lengths.items()}
        heads = "|".join(map(re.escape, sorted(lengths, key=len, reverse=True)))
        self._heads = re.compile(f"(?=({heads}))" if heads else r"(?!)")
        self._beginnings = frozenset(token[:n] for token in tokens for n in range(1, len(token)))
        self._longest_beginning = max(map(len, self._beginnings), default=0)

    def split(self, text: str) -> Iterator[str | int]:
        """The stretches of `text` between tokens, and the ids of the tokens, in order."""
        done = 0
        for match in self._heads.finditer(text):
            begin = match.start()
            if begin < done:
                continue
            if length := self._length_at(text, begin):
                if done < begin:
                    yield text[done:begin]
                done = begin + length
                yield self._tokens[text[begin:done]]
        if done < len(text):
            yield text[done:]

    def break_up(self, text: str, mark: str) -> str:
        """`text` with `mark` behind the first character of every token, and of every beginning of a token at its end.

        (What comes behind the text could complete the latter, also when white space is stripped from it first.)
        """
        places = {match.start() for match in self._heads.finditer(text) if self._length_at(text, match.start())}
        end = len(text.rstrip())
        places |= {
            begin for begin in range(max(0, end - self._longest_beginning), end) if text[begin:end] in self._beginnings
        }
        parts, done = [], 0
        for place in sorted(places):
            parts += [text[done : place + 1], mark]
            done = place + 1
        return "".join(parts) + text[done:]

    def _length_at(self, text: str, begin: int) -> int:
        """The length of the longest token at a place, 0 for none."""
        for head in (text[begin : begin + 2], text[begin]):
            for length in self._lengths.get(head, ()):
                if text[begin : begin + length] in self._tokens:
                    return length
        return 0
