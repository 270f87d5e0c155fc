"""StopMatcher: ends an output at a stop string, wherever its letters fall. No text beyond the stop ever leaves it."""

from __future__ import annotations

from collections.abc import Sequence

from pagedserve.contract.errors import RequestError


class StopMatcher:
    """Feed it an output's text in any portions; what it releases does not depend on how the text was cut.

    The stop string that ends first wins, among those that end together the longest. Text is held back only while it
    is the beginning of a stop string. `include_stop_str` releases the stop string too. RequestError on an empty one.
    """

    def __init__(self, stop: Sequence[str], *, include_stop_str: bool = False) -> None:
        if any(not s for s in stop):
            raise RequestError("stop: a stop string must not be empty", param="stop")
        self._stop = tuple(stop)
        self._include_stop_str = include_stop_str
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that may go out now; nothing more after a match (`matched` names it)."""
        if self.matched is not None:
            return ""
        if not self._stop:
            return text
        self._held += text
        found = [(start + len(s), start, s) for s in self._stop if (start := self._held.find(s)) >= 0]
        if found:
            end, start, self.matched = min(found)
            released, self._held = self._held[: end if self._include_stop_str else start], ""
            return released
        keep = max(self._overlap(s) for s in self._stop)
        released, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return released

    def flush(self) -> str:
        """The text held back, when the output ends without a stop string."""
        released, self._held = self._held, ""
        return released

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that is a beginning of `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
