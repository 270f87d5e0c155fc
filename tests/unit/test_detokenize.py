"""Incremental decoding: never half a character, nothing lost, at most three bytes held back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedserve.text.decoder import IncrementalDecoder
from pagedserve.text.load import load_text
from pagedserve.text.tokenizer import Tokenizer

BYTES: Tokenizer = load_text("demo").tokenizer  # a token a byte: every character of more bytes is cut
IM_END = 257


def test_character_comes_out_with_its_last_byte() -> None:
    decoder = IncrementalDecoder(BYTES)
    assert [decoder.decode([byte]) for byte in "é🙂a".encode()] == ["", "é", "", "", "", "🙂", "a"]
    assert decoder.flush() == ""


def test_text_around_an_incomplete_character_is_not_held_back() -> None:
    decoder = IncrementalDecoder(BYTES)
    assert decoder.decode([*b"abc", 0xF0, 0x9F]) == "abc"
    assert decoder.decode([0x99, 0x82, ord("d")]) == "🙂d"


def test_byte_that_can_start_no_character_comes_out_at_once() -> None:
    decoder = IncrementalDecoder(BYTES)
    assert decoder.decode([0xFF]) == "\ufffd"
    assert decoder.decode([0xE2]) == ""
    assert decoder.decode([ord("x")]) == "\ufffdx"


def test_flush_gives_the_character_that_was_never_completed() -> None:
    decoder = IncrementalDecoder(BYTES)
    assert decoder.decode([0xE2, 0x82]) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


def test_control_tokens_are_left_out_unless_asked_for() -> None:
    assert IncrementalDecoder(BYTES).decode([ord("a"), IM_END]) == "a"
    assert IncrementalDecoder(BYTES, skip_special_tokens=False).decode([ord("a"), IM_END]) == "a<|im_end|>"


@pytest.mark.parametrize("skip", [True, False])
@given(st.lists(st.lists(st.integers(0, 258), max_size=6), max_size=12))
def test_portions_join_to_the_decoding_of_the_whole(skip: bool, portions: list[list[int]]) -> None:
    decoder = IncrementalDecoder(BYTES, skip_special_tokens=skip)
    joined = "".join(decoder.decode(portion) for portion in portions) + decoder.flush()
    assert joined == BYTES.decode((i for portion in portions for i in portion), skip_special_tokens=skip)


@given(st.text(), st.data())
def test_held_back_bytes_are_fewer_than_one_character(text: str, data: st.DataObject) -> None:
    encoded = BYTES.encode(text)
    cut = data.draw(st.integers(0, len(encoded)))
    decoder = IncrementalDecoder(BYTES)
    released = decoder.decode(encoded[:cut])
    assert text.startswith(released)
    assert cut - len(released.encode()) <= 3
