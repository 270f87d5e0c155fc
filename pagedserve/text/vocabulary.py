"""Vocabulary: what each token id stands for, as bytes, and which ids are control tokens. Encodes nothing itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's printable stand-in for each byte, as a table for str.translate: code point -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + i: byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_alphabet()


def byte_level(token: str) -> bytes:
    """The bytes of a token written in GPT-2's byte alphabet ("Ġthe" is b" the").

    Letters outside the alphabet (an added token in plain Unicode) stand for themselves.
    """
    translated = token.translate(_BYTE_OF_LETTER)
    try:
        return translated.encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


@dataclass(frozen=True)
class Vocabulary:
    """Token ids and their bytes.

    `control` tokens never come from user text; `user_defined` ones are cut out of any text before it is split further.
    `add_bos` and `add_eos` say what a plain prompt is wrapped in.
    """

    token_bytes: Sequence[bytes]  # by id
    control: Mapping[str, int] = field(default_factory=dict)
    user_defined: Mapping[str, int] = field(default_factory=dict)
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    add_bos: bool = False
    add_eos: bool = False
