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
    """The text side of a model: a GGUF file, a Hugging Face folder, or "demo". ModelError as in open_checkpoint."""
    if str(path) == demo.DEMO:
        return _demo_text()
    path = Path(path)
    if not path.exists():
        raise ModelError(f"{path}: no such file or folder")
    return _hf_text(path) if path.is_dir() else _gguf_text(GgufFile(path))


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


def _hf_text(folder: Path) -> TextModel:
    # Not needed for a GGUF file, and a client should be up at once.
    from pagedserve.models import hf
    from pagedserve.text.hf_tokenizer import hf_tokenizer, special_tokens

    config_path = folder / "tokenizer_config.json"
    config = hf.read_json(config_path) if config_path.exists() else {}
    template_path, source = folder / "chat_template.jinja", config.get("chat_template")
    if template_path.exists():
        source, origin = template_path.read_text(encoding="utf-8"), template_path
    else:
        origin = config_path
        if isinstance(source, list):  # several templates by name
            source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
        if source is not None and not isinstance(source, str):
            raise ModelError(f"{config_path}: chat_template: expected a string")
    template = ChatTemplate(source, str(origin), special_tokens(config))
    return TextModel(hf_tokenizer(folder), template, hf.generation_defaults(folder))


class _Bytes:
    """A PieceEncoder for the demo model: a token is a byte."""

    def encode(self, text: str) -> list[int]:
        """The bytes of `text`."""
        return list(text.encode())


def _demo_text() -> TextModel:
    token_bytes = [bytes([byte]) for byte in range(256)] + [name.encode() for name in demo.CONTROL_TOKENS]
    tokenizer = Tokenizer(_Bytes(), Vocabulary(token_bytes, control=demo.CONTROL_TOKENS))
    return TextModel(tokenizer, ChatTemplate(_CHATML, demo.DEMO), demo.GENERATION)
