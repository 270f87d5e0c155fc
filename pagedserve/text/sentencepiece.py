"""SentencePieceBpe: SentencePiece's byte-pair encoding, from a vocabulary with scores (GGUF's tokenizer model "llama").

The pair with the best score merges first, the leftmost among equals; characters without a token become byte tokens.
Knows nothing of added tokens.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

SPACE = "▁"  # U+2581, how the vocabulary writes a space

_BEFORE_SPACE = re.compile(f"[^{SPACE}](?={SPACE})")
_MAX_CACHED_WORD = 64  # characters; longer words are not worth remembering


class SentencePieceBpe:
    """`ids` and `scores` are the vocabulary (token text -> id, score by id) without control tokens.

    `byte_ids` [256] are the ids of `<0x00>` … `<0xFF>`, or None; then an unknown character is `unknown_id`, or
    is left out when there is none.
    """

    def __init__(
        self,
        ids: Mapping[str, int],
        scores: Sequence[float],
        *,
        byte_ids: Sequence[int] | None,
        unknown_id: int | None,
    ) -> None:
        self._ids = ids
        self._scores = scores
        self._byte_ids = byte_ids
        self._unknown = [] if unknown_id is None else [unknown_id]
        # No merge crosses from a letter to the space behind it, unless a token does; elsewhere words are independent.
        spaced = [token for token in ids if SPACE in token.lstrip(SPACE)]
        crossing = {match[0] for token in spaced for match in _BEFORE_SPACE.finditer(token)}
        self._word_ends = re.compile(f"(?<=[^{re.escape(SPACE + ''.join(sorted(crossing)))}])(?={SPACE})")
        self._cached_word = lru_cache(maxsize=50_000)(self._merge)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`."""
        ids: list[int] = []
        for word in self._word_ends.split(text.replace(" ", SPACE)):
            ids += self._cached_word(word) if len(word) <= _MAX_CACHED_WORD else self._merge(word)
        return ids

    def _merge(self, word: str) -> tuple[int, ...]:
        if word in self._ids and len(word) == 1:
            return (self._ids[word],)
        # Symbols are a doubly linked list over positions of the word; a merged-away symbol is "".
        symbols = list(word)
        before, after = list(range(-1, len(word) - 1)), list(range(1, len(word) + 1))
        heap: list[tuple[float, int, str]] = []

        def consider(left: int) -> None:
            right = after[left]
            if left < 0 or right >= len(symbols):
                return
            pair = symbols[left] + symbols[right]
            if (i := self._ids.get(pair)) is not None:
                heapq.heappush(heap, (-self._scores[i], left, pair))

        for left in range(len(word) - 1):
            consider(left)
        while heap:
            _, left, pair = heapq.heappop(heap)
            right = after[left]
            if not symbols[left] or right >= len(symbols) or symbols[left] + symbols[right] != pair:
                continue  # one of the two has been merged meanwhile
            symbols[left], symbols[right] = pair, ""
            after[left] = after[right]
            if after[left] < len(symbols):
                before[after[left]] = left
            consider(left)
            if before[left] >= 0:
                consider(before[left])
        return tuple(i for symbol in symbols if symbol for i in self._symbol_ids(symbol))

    def _symbol_ids(self, symbol: str) -> list[int]:
        if symbol in self._ids:
            return [self._ids[symbol]]
        if self._byte_ids is not None:
            return [self._byte_ids[byte] for byte in symbol.encode()]
        return self._unknown
