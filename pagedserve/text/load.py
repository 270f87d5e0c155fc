"""load_text: everything a client needs to know of a model's text, from the model's path. Touches no weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedserve.contract.errors import ModelError
from pagedserve.models import demo
from pagedserve.models.gguf import generation_defaults
from pagedserve.models.gguf_file import GgufFile
from pagedserve.models.spec import GenerationDefaults
from pagedserve.text.gguf_tokenizer import gguf_tokenizer
from pagedserve.text.template import ChatTemplate, Message
from pagedserve.text.tokenizer import Tokenizer
from pagedserve.text.vocabulary import Vocabulary

_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class TextModel:
    """A model's text side. `generation` are its makers' defaults; a request overrides them."""

    tokenizer: Tokenizer
    template: ChatTemplate
    generation: GenerationDefaults

    def prompt(self, text: str) -> list[int]:
        """The token ids of a raw prompt."""
        return self.tokenizer.encode_prompt(text)

    def chat_prompt(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """The token ids of a conversation, ready for the answer. RequestError as in ChatTemplate.render."""
        return self.template.encode(self.tokenizer, messages, add_generation_prompt=add_generation_prompt, **variables)


def load_text(path: str | Path) -> TextModel:
    """The text side of the model at `path` (a GGUF file, or "demo"); ModelError as in open_checkpoint."""
    if str(path) == demo.DEMO:
        return _demo_text()
    path = Path(path)
    if not path.exists():
        raise ModelError(f"{path}: no such file or folder")
    return _gguf_text(GgufFile(path))


def _gguf_text(file: GgufFile) -> TextModel:
    settings = file.settings("tokenizer.")
    source = settings.text("chat_template") if settings.has("chat_template") else None
    names = {}
    for name in ("bos", "eos"):
        if settings.has(f"ggml.{name}_token_id"):
            token_id = settings.integer(f"ggml.{name}_token_id")
            tokens = settings.strings("ggml.tokens")
            if token_id >= len(tokens):
                raise settings.wrong(f"ggml.{name}_token_id", f"less than {len(tokens)}", token_id)
            names[f"{name}_token"] = tokens[token_id]
    return TextModel(gguf_tokenizer(file), ChatTemplate(source, str(file.path), names), generation_defaults(file))


class _Bytes:
    """A PieceEncoder for the demo model: a token is a byte."""

    def encode(self, text: str) -> list[int]:
        """The bytes of `text`."""
        return list(text.encode())


def _demo_text() -> TextModel:
    token_bytes = [bytes([byte]) for byte in range(256)] + [name.encode() for name in demo.CONTROL_TOKENS]
    tokenizer = Tokenizer(_Bytes(), Vocabulary(token_bytes, control=demo.CONTROL_TOKENS))
    return TextModel(tokenizer, ChatTemplate(_CHATML, demo.DEMO), demo.GENERATION)
