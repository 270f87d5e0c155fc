"""TextStream: one output from token ids to the text that may be shown: incremental decoding, then stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from pagedserve.text.decoder import IncrementalDecoder
from pagedserve.text.stop_strings import StopMatcher
from pagedserve.text.tokenizer import Tokenizer


class TextStream:
    """Push tokens, get text. After a stop string was complete (`matched` names it) no more text comes."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop_str: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
        self._matcher = StopMatcher(stop, include_stop_str=include_stop_str)

    @property
    def matched(self) -> str | None:
        """The stop string that ended the output, if one did."""
        return self._matcher.matched

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """The text that this token releases; with `may_stop` False (below min_tokens) it is not searched for stops."""
        text = self._decoder.decode((token_id,))
        return self._matcher.feed(text) if may_stop else text

    def finish(self) -> str:
        """The text held back, at the end of the output."""
        return self._matcher.feed(self._decoder.flush()) + self._matcher.flush()
