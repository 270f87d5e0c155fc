"""Conversation: what has been said, the settings for what comes next, and its prompt as token ids.

No terminal, and no I/O but saving and loading.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pagedserve.contract.errors import PagedServeError, RequestError
from pagedserve.contract.sampling import SamplingParams, sampling_params
from pagedserve.models.spec import GenerationDefaults
from pagedserve.text.load import TextModel
from pagedserve.text.tokenizer import Tokenizer

# What suits small instruction models, where their makers say nothing; max_tokens ends one that repeats itself.
_SETTINGS: dict[str, Any] = {"temperature": 0.2, "top_p": 0.9, "max_tokens": 1024}

# Small models answer better with an instruction than with the empty or vain one of their template.
SYSTEM = "You are a helpful assistant. Answer briefly and to the point."


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    """The file of /save."""

    system: str
    settings: dict[str, Any]
    messages: list[dict[str, str]]


class Conversation:
    """Messages in turn, user first. `settings` are fields of SamplingParams.

    `system` "" leaves the system prompt to the model's template.
    """

    def __init__(self, generation: GenerationDefaults = GenerationDefaults(), system: str = SYSTEM) -> None:
        self.system = system
        self.messages: list[dict[str, str]] = []
        makers = {name: getattr(generation, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        self.settings = {**_SETTINGS, **{name: value for name, value in makers.items() if value is not None}}
        self._computed: list[int] = []  # prompt and answer of the last turn: what the prefix cache may hold

    @property
    def sampling(self) -> SamplingParams:
        """The settings as a record."""
        return sampling_params(self.settings)

    def set(self, name: str, text: str) -> None:
        """Change one setting; `text` is JSON (0.7, [1, 2], null). RequestError when it is unknown or out of range."""
        try:
            value = msgspec.json.decode(text)
        except msgspec.DecodeError:
            raise RequestError(
                f"{name}: expected a number, true, false, null or a list, got {text}", param=name
            ) from None
        changed = {**self.settings, name: value}
        sampling_params(changed)
        self.settings = changed

    def prompt(self, text: TextModel, question: str) -> list[int]:
        """The token ids that ask `question` after all that was said; what was computed before keeps its ids."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, *self.messages, {"role": "user", "content": question}]
        return keep_computed(text.tokenizer, text.chat_prompt(messages), self._computed)

    def add(self, question: str, answer: str, token_ids: Sequence[int]) -> None:
        """A turn has ended; `token_ids` are its prompt's and its answer's."""
        self.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        self._computed = list(token_ids)

    def clear(self) -> None:
        """Forget what was said; settings and system prompt stay."""
        self.messages = []
        self._computed = []

    def save(self, path: Path) -> None:
        """Write a JSON file that `load` reads; PagedServeError when that fails."""
        saved = _Saved(self.system, self.settings, self.messages)
        try:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(saved)) + b"\n")
        except OSError as error:
            raise PagedServeError(f"{path}: {error.strerror}") from None

    def load(self, path: Path) -> None:
        """Take over a saved conversation; PagedServeError, and nothing changed, when the file is none."""
        try:
            saved = msgspec.json.decode(path.read_bytes(), type=_Saved)
            sampling_params(saved.settings)
        except OSError as error:
            raise PagedServeError(f"{path}: {error.strerror}") from None
        except (msgspec.DecodeError, RequestError) as error:
            raise PagedServeError(f"{path}: not a saved conversation: {error}") from None
        self.system, self.settings, self.messages = saved.system, saved.settings, saved.messages
        self._computed = []


def keep_computed(tokenizer: Tokenizer, prompt: list[int], computed: list[int]) -> list[int]:
    """`prompt` with `computed` as its beginning, if both spell the same text up to there; else `prompt`.

    A model may have written its answer in other tokens than the tokenizer would choose for the same text; the ones it
    wrote are those whose blocks are in the prefix cache.
    """

    def spelled(token_ids: Sequence[int]) -> bytes:
        return b"".join(tokenizer.token_bytes(token_id, skip_special_tokens=False) for token_id in token_ids)

    known, length = spelled(computed), 0
    for count, token_id in enumerate(prompt, 1):
        length += len(tokenizer.token_bytes(token_id, skip_special_tokens=False))
        if length >= len(known):
            beginning = prompt[:count]
            same_control = [i for i in beginning if tokenizer.is_control(i)] == [
                i for i in computed if tokenizer.is_control(i)
            ]
            return computed + prompt[count:] if spelled(beginning) == known and same_control else prompt
    return prompt
