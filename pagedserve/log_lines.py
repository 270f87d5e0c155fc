"""LogLines: the lines of many processes on one output, each with time, name and the name's colour on a terminal."""

from __future__ import annotations

import contextlib
from datetime import datetime
from typing import TextIO

_COLOURS = (36, 32, 33, 35, 34, 31)  # ANSI; cyan first
_NAME_WIDTH = len("scheduler")


class LogLines:
    """Writes to `output`. A reader who went away (a closed pipe) does not end the server: its lines are dropped."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._coloured = output.isatty()
        self._colours: dict[str, int] = {}

    def write(self, name: str, line: str) -> None:
        """One line of the process `name`."""
        prefix = f"{datetime.now():%H:%M:%S} {name:<{_NAME_WIDTH}} |"
        if self._coloured:
            colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
            prefix = f"\x1b[{colour}m{prefix}\x1b[0m"
        with contextlib.suppress(BrokenPipeError):
            self._output.write(f"{prefix} {line}\n")
            self._output.flush()
