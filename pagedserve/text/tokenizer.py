"""Tokenizer: text to token ids and back. Control tokens come from templates only, never from user text.

How a stretch of plain text is split is a PieceEncoder's business (byte_bpe, sentencepiece, hf_tokenizer).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from pagedserve.contract.errors import RequestError
from pagedserve.text.added_tokens import AddedTokens
from pagedserve.text.vocabulary import Vocabulary


class PieceEncoder(Protocol):
    """Splits plain text, which holds no added token, into token ids."""

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; any text encodes."""
        ...


class Tokenizer:
    """A model's tokenizer. Text is any str: lone surrogates count as U+FFFD.

    `add_space_prefix`: a space goes before a text, and before what follows a control token (Llama 2 was trained so);
    `strip_leading_space`: decoding drops it again. `written_space`: the character that spaces are written with in the
    vocabulary; in text it counts as a space (SentencePiece).
    """

    def __init__(
        self,
        pieces: PieceEncoder,
        vocabulary: Vocabulary,
        *,
        add_space_prefix: bool = False,
        strip_leading_space: bool = False,
        written_space: str = " ",
    ) -> None:
        self._pieces = pieces
        self._vocabulary = vocabulary
        self._add_space_prefix = add_space_prefix
        self._written_space = written_space
        self._strip_leading_space = strip_leading_space
        self._control_ids = frozenset(vocabulary.control.values())
        self._control = AddedTokens(vocabulary.control)
        self._user_defined = AddedTokens(vocabulary.user_defined)
        self._added = AddedTokens({**vocabulary.user_defined, **vocabulary.control})

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self._vocabulary.token_bytes)

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, if the vocabulary names one."""
        return self._vocabulary.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, if the vocabulary names one."""
        return self._vocabulary.eos_token_id

    def encode(self, text: str) -> list[int]:
        """The ids of plain text: what looks like a control token in it is text like any other."""
        return self._encode(text, self._user_defined)

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a raw prompt: `encode`, wrapped in the BOS and EOS the model was trained to see there."""
        vocabulary = self._vocabulary
        ids = self.encode(text)
        if vocabulary.add_bos and vocabulary.bos_token_id is not None:
            ids.insert(0, vocabulary.bos_token_id)
        if vocabulary.add_eos and vocabulary.eos_token_id is not None:
            ids.append(vocabulary.eos_token_id)
        return ids

    def encode_with_special(self, text: str, remove: str = "") -> list[int]:
        """The ids of a rendered template: control tokens in it count. `remove` is a mark taken out afterwards.

        Never call it on text that a user wrote (ChatTemplate.encode shows how the mark protects it).
        """
        return self._encode(text, self._added, remove)

    def break_up_control(self, text: str, mark: str) -> str:
        """`text` with `mark` put into whatever `encode_with_special` could take for a control token."""
        return self._control.break_up(text, mark)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD, control tokens nothing (or their name).

        RequestError when an id is not in the vocabulary.
        """
        joined = b"".join(self.token_bytes(i, skip_special_tokens=skip_special_tokens) for i in token_ids)
        text = joined.decode("utf-8", "replace")
        return text[1:] if self._strip_leading_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
        """The bytes of one token; b"" for a control token when those are skipped. RequestError for an unknown id."""
        if skip_special_tokens and token_id in self._control_ids:
            return b""
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(f"token ids are 0 to {self.vocab_size - 1}, got {token_id}", param="token_ids")
        return self._vocabulary.token_bytes[token_id]

    def is_control(self, token_id: int) -> bool:
        """Whether the id is a control token."""
        return token_id in self._control_ids

    def _encode(self, text: str, added: AddedTokens, remove: str = "") -> list[int]:
        ids: list[int] = []
        for part in added.split(text.replace(self._written_space, " ")):
            if isinstance(part, int):
                ids.append(part)
            else:
                starts = not ids or ids[-1] in self._control_ids
                ids += self._plain(" " + part if starts and self._add_space_prefix else part, remove)
        return ids

    def _plain(self, text: str, remove: str) -> list[int]:
        if remove:
            text = text.replace(remove, "")
        if not text:
            return []
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return self._pieces.encode(text)
