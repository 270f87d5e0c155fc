"""IncrementalDecoder: text from token ids as they come, never half a character, nothing lost, little held back."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from pagedserve.text.tokenizer import Tokenizer


class IncrementalDecoder:
    """One output's decoder. The texts returned, joined, are `tokenizer.decode` of all ids (of a continuation).

    Only the bytes of a character that is not complete yet are held back: at most three.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text that these ids complete."""
        new = b"".join(self._tokenizer.token_bytes(i, skip_special_tokens=self._skip_special_tokens) for i in token_ids)
        return self._utf8.decode(new)

    def flush(self) -> str:
        """What is left at the end of the output: U+FFFD for a character that was never completed, else ""."""
        return self._utf8.decode(b"", final=True)
