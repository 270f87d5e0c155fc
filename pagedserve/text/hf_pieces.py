"""HfPieces: any tokenizer.json, through the `tokenizers` package; for what tiktoken cannot express."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tokenizers import Tokenizer as HfTokenizer

from pagedserve.contract.errors import ModelError
from pagedserve.text.sentencepiece import SPACE
from pagedserve.text.vocabulary import byte_level

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class HfPieces:
    """A PieceEncoder over a tokenizer.json. `control_ids` are never produced.

    `adds_space` says whether it puts a space before a text. ModelError when the file cannot be read, or its decoder is
    neither byte-level nor SentencePiece's.
    """

    def __init__(self, path: Path, control_ids: frozenset[int]) -> None:
        try:
            self._tokenizer = HfTokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing more precise
            raise ModelError(f"{path}: the tokenizer cannot be read: {error}") from None
        self._tokenizer.encode_special_tokens = True  # what looks like a control token is split like any text
        self._control_ids = control_ids
        decoder = json.loads(self._tokenizer.to_str()).get("decoder") or {}
        kinds = {step.get("type") for step in decoder.get("decoders") or [decoder]}
        self._byte_level = "ByteLevel" in kinds
        if not self._byte_level and not kinds & {"Metaspace", "ByteFallback", "Replace"}:
            raise ModelError(f"{path}: decoder {'+'.join(map(str, kinds))} is not supported")
        self.adds_space = b"".join(map(self._bytes, self.encode("a"))).startswith(b" ")

    def encode(self, text: str) -> list[int]:
        """The ids of `text`."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._control_ids.isdisjoint(ids):
            return ids
        # A Unigram vocabulary may still choose one: cut the text inside of it.
        return [i for character in text for i in self.encode(character)] if len(text) > 1 else []

    def token_bytes(self) -> list[bytes]:
        """The bytes of every token, by id."""
        return [self._bytes(i) for i in range(self._tokenizer.get_vocab_size(with_added_tokens=True))]

    def _bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id) or ""
        if self._byte_level:
            return byte_level(token)
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace(SPACE, " ").encode()
