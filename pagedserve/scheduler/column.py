"""Int32Column: a growing int32 array that can be sliced without a copy (token ids, block tables)."""

from __future__ import annotations

from collections.abc import Sequence as Values

import numpy as np

from pagedserve.contract.messages import Int32


class Int32Column:
    """`values[:length]` is the content; capacity doubles, so that appending costs O(1)."""

    __slots__ = ("length", "values")

    def __init__(self, content: Values[int] | Int32 = ()) -> None:
        self.values: Int32 = np.array(content, dtype=np.int32)
        self.length = len(self.values)

    def append(self, value: int) -> None:
        """Add one value at the end."""
        if self.length == len(self.values):
            grown: Int32 = np.empty(max(8, 2 * self.length), dtype=np.int32)
            grown[: self.length] = self.values
            self.values = grown
        self.values[self.length] = value
        self.length += 1

    def view(self, start: int = 0) -> Int32:
        """The content from `start` on; valid until the next append."""
        return self.values[start : self.length]

    def truncate(self, length: int) -> None:
        """Forget everything from `length` on."""
        self.length = min(self.length, length)

    def copy(self) -> Int32Column:
        """An independent column with the same content."""
        return Int32Column(self.view())
