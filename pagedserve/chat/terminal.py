"""The chat's terminal: lines in, with editing and history; answers out as they stream, with a spinner until they begin.

Ctrl-C is a request to stop the answer. Knows nothing of conversations.
"""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pagedserve.client import Stream, Timing, Usage

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_FRAME_S = 0.1
_QUOTES = '"""'


class Terminal:
    """`history` is the file of earlier lines; it is made when something is asked."""

    def __init__(self, history: Path) -> None:
        self._history = history
        self._session: PromptSession[str] | None = None
        self.output_is_terminal = sys.stdout.isatty()

    def ask(self) -> str | None:
        """The next text; lines between triple quotes are one. None at Ctrl-D. Ctrl-C forgets the line."""
        while True:
            try:
                text = self._line(">>> ")
                if not text.lstrip().startswith(_QUOTES):
                    return text
                text = text.lstrip().removeprefix(_QUOTES)
                while not text.rstrip().endswith(_QUOTES):
                    text += "\n" + self._line("... ")
                return text.rstrip().removesuffix(_QUOTES)
            except KeyboardInterrupt:
                continue
            except EOFError:
                return None

    def tell(self, text: str) -> None:
        """A line that is not part of an answer."""
        print(text, file=sys.stderr, flush=True)

    def show(self, stream: Stream) -> str:
        """Print an answer as it comes; its text, as far as it came until its end or Ctrl-C."""
        text = ""
        spinner = itertools.cycle(_FRAMES) if self.output_is_terminal else None
        with interrupts() as interrupted:
            stopping = False
            while not stream.finished:
                if interrupted() and not stopping:
                    stopping = True
                    stream.abort()
                delta = stream.poll(_FRAME_S)
                if delta is not None and delta.text and not stopping:
                    self._print("\r\x1b[K" * (not text and spinner is not None) + delta.text)
                    text += delta.text
                elif not text and spinner is not None:
                    self._print(f"\r\x1b[2m{next(spinner)}\x1b[0m")
            if not text and spinner is not None:
                self._print("\r\x1b[K")
        if text and not text.endswith("\n"):
            self._print("\n")
        if stopping:
            self.tell("(stopped)")
        return text

    def _print(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def _line(self, prompt: str) -> str:
        if self._session is None:
            # Slow to import, and not needed for one question.
            from prompt_toolkit import PromptSession
            from prompt_toolkit.history import FileHistory

            self._history.parent.mkdir(parents=True, exist_ok=True)
            self._session = PromptSession(history=FileHistory(str(self._history)))
        return self._session.prompt(prompt)


def figures(usage: Usage, timing: Timing) -> str:
    """One line: time to first token, speed, counts."""
    ttft = "-" if timing.ttft_s is None else f"{timing.ttft_s:.3f} s"
    rate = "-" if timing.tokens_per_s is None else f"{timing.tokens_per_s:.1f} tokens/s"
    return (
        f"[first token after {ttft}, {rate}, {usage.prompt_tokens} tokens of prompt "
        f"({usage.cached_tokens} from cache), {usage.completion_tokens} of answer]"
    )


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets a flag instead of raising, so that it cannot hit the middle of reading a message; gives the flag."""
    seen = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal seen
        seen = True

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: seen
    finally:
        signal.signal(signal.SIGINT, previous)
