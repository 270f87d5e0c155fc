"""ByteBpe: byte-level byte-pair encoding by `tiktoken`, for vocabularies whose merges are in id order.

Owns the regular expressions that cut text into words before any merge. Knows nothing of added tokens.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Mapping, Sequence

import tiktoken

from pagedserve.text.vocabulary import byte_level

_CONTRACTIONS = r"'(?:[sdmt]|ll|ve|re)"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# How text is cut before merging, by GGUF's tokenizer.ggml.pre.
WORD_PATTERNS: Mapping[str, str] = {
    "gpt-2": _CONTRACTIONS + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    # Digits are split off one by one before GPT-2's pattern, so white space before a digit counts as ending there.
    "smollm": _CONTRACTIONS + r"| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+",
    "llama-bpe": _LLAMA3 % r"\p{N}{1,3}",
    "qwen2": _LLAMA3 % r"\p{N}",
}
# Vocabularies that were made with the text in a Unicode normal form.
NORMALIZATIONS: Mapping[str, str] = {"qwen2": "NFC"}

# The regular expression engine gives up on a run of about a million white spaces.
_MAX_SPACES = 100_000
_LONG_SPACES = re.compile(rf"\s{{{_MAX_SPACES}}}")


class ByteBpe:
    """Byte-level BPE. `ranks`: bytes -> id, ids in the order of the merges; `pattern` cuts the words.

    A byte without a token cannot be encoded; the character it belongs to is encoded as U+FFFD, or left out where the
    vocabulary cannot write U+FFFD either. `normalization` is a Unicode normal form ("NFC") applied first, or None.
    """

    def __init__(self, ranks: Mapping[bytes, int], pattern: str, normalization: str | None = None) -> None:
        self._encoding = tiktoken.Encoding(
            "pagedserve", pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens={}
        )
        self._normalization = normalization
        self._known_bytes = bytes(byte for byte in range(256) if bytes([byte]) in ranks)
        self._replacement = "\ufffd" if self._missing("\ufffd") == b"" else ""

    def encode(self, text: str) -> list[int]:
        """The ids of `text`."""
        if self._normalization == "NFC":
            text = unicodedata.normalize("NFC", text)
        if self._missing(text):
            text = "".join(self._replacement if self._missing(character) else character for character in text)
        if len(text) < _MAX_SPACES:
            return self._encoding.encode_ordinary(text)
        cuts = [0, *(match.end() for match in _LONG_SPACES.finditer(text)), len(text)]
        return [i for begin, end in itertools.pairwise(cuts) for i in self._encoding.encode_ordinary(text[begin:end])]

    def _missing(self, text: str) -> bytes:
        return text.encode().translate(None, self._known_bytes)


def ranks_of(
    vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], *, ignore_merges: bool
) -> dict[bytes, int] | None:
    """The ranks of a vocabulary in GPT-2's byte alphabet, or None where ids cannot serve as ranks.

    They can when each merge, in order of priority, makes a token no lower than the one before. A token that no merge
    makes is never encoded, unless `ignore_merges` says (as Llama 3's files do) that whole words need none.
    """
    try:
        merged = [vocabulary[a + b] for a, b in merges]
    except KeyError:
        return None
    if any(later < earlier for earlier, later in itertools.pairwise(merged)):
        return None
    made = set(merged)
    ranks = {byte_level(token): i for token, i in vocabulary.items() if ignore_merges or len(token) == 1 or i in made}
    return ranks if len(set(ranks.values())) == len(ranks) else None
