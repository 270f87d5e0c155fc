"""Settings: typed, checked access to a model file's metadata (GGUF key-values, config.json), with one-line errors.

It owns the error texts; it knows no key by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagedserve.contract.errors import ModelError


class Settings:
    """Key-values of one file. A key that is absent or null gives the default, or a ModelError when there is none.

    `prefix` is put before every key (GGUF's `llama.`).
    """

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self._values = values
        self._prefix = prefix

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._values.get(self._prefix + key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number of 0 or more."""
        value = self._get(key, default, "a whole number")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.wrong(key, "a whole number", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number."""
        value = self._get(key, default, "a number")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "a number", value)
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default, "a string")
        if not isinstance(value, str):
            raise self.wrong(key, "a string", value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self._get(key, default, "true or false")
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false", value)
        return value

    def strings(self, key: str) -> list[str]:
        """A list of strings."""
        value = self._get(key, None, "a list of strings")
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "a list of strings", value)
        return value

    def integers(self, key: str) -> list[int]:
        """A list of whole numbers; one number alone is a list of one."""
        value = self._get(key, None, "a list of whole numbers")
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            raise self.wrong(key, "a list of whole numbers", value)
        return items

    def numbers(self, key: str) -> list[float]:
        """A list of numbers."""
        value = self._get(key, None, "a list of numbers")
        if not isinstance(value, list) or not all(isinstance(item, int | float) for item in value):
            raise self.wrong(key, "a list of numbers", value)
        return value

    def section(self, key: str) -> Settings:
        """A nested mapping (config.json's rope_scaling); empty when absent."""
        value = self._values.get(self._prefix + key) or {}
        if not isinstance(value, dict):
            raise self.wrong(key, "a mapping", value)
        return Settings(self.path, value)

    def wrong(self, key: str, expected: str, value: object) -> ModelError:
        """The error for a value that cannot be used."""
        shown = repr(value)
        if len(shown) > 60:
            shown = shown[:57] + "..."
        return ModelError(f"{self.path}: {self._prefix}{key}: expected {expected}, got {shown}")

    def _get(self, key: str, default: object, expected: str) -> Any:
        value = self._values.get(self._prefix + key)
        if value is not None:
            return value
        if default is None:
            raise ModelError(f"{self.path}: {self._prefix}{key} is missing, expected {expected}")
        return default
