"""Stop strings: found across any cut, nothing beyond them leaks, text is held back only while it may begin one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedserve.contract.errors import RequestError
from pagedserve.text.stop_strings import StopMatcher


def feed(matcher: StopMatcher, *portions: str) -> list[str]:
    return [matcher.feed(portion) for portion in portions]


def test_without_stop_strings_text_passes() -> None:
    matcher = StopMatcher([])
    assert feed(matcher, "abc", "def") == ["abc", "def"]
    assert matcher.flush() == ""


def test_stop_string_across_portions_leaks_nothing() -> None:
    matcher = StopMatcher(["###"])
    assert feed(matcher, "ab#", "#", "#cd", "ef") == ["ab", "", "", ""]
    assert matcher.matched == "###"
    assert matcher.flush() == ""


def test_held_text_comes_out_when_it_cannot_become_a_stop_string() -> None:
    matcher = StopMatcher(["###"])
    assert feed(matcher, "a##", "b", "##") == ["a", "##b", ""]
    assert matcher.flush() == "##"
    assert matcher.matched is None


def test_only_the_beginning_of_a_stop_string_is_held_back() -> None:
    assert StopMatcher(["abc"]).feed("ababab") == "abab"
    assert StopMatcher(["aab"]).feed("aaaa") == "aa"


def test_stop_string_is_kept_when_asked_for() -> None:
    matcher = StopMatcher(["STOP"], include_stop_str=True)
    assert feed(matcher, "a ST", "OP b") == ["a ", "STOP"]


def test_the_stop_string_that_ends_first_wins() -> None:
    matcher = StopMatcher(["bcde", "cd"])
    assert matcher.feed("abcdef") == "ab"
    assert matcher.matched == "cd"


def test_among_those_that_end_together_the_longest_wins() -> None:
    matcher = StopMatcher(["d", "bcd"])
    assert matcher.feed("abcd") == "a"
    assert matcher.matched == "bcd"


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match=r"^stop: a stop string must not be empty$"):
        StopMatcher(["a", ""])


@given(
    st.lists(st.text(alphabet="ab", max_size=4), max_size=12),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
def test_outcome_does_not_depend_on_the_cut(portions: list[str], stop: list[str], include: bool) -> None:
    text = "".join(portions)
    ends = [(i, i - len(s), s) for s in stop for i in range(len(text) + 1) if text[:i].endswith(s)]
    end, start, matched = min(ends, default=(len(text), len(text), None))

    matcher = StopMatcher(stop, include_stop_str=include)
    released = "".join(feed(matcher, *portions)) + matcher.flush()

    assert matcher.matched == matched
    assert released == text[: end if include else start]
