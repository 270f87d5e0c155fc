"""ChatTemplate: a conversation to a prompt, by the model's own Jinja template in a sandbox.

Message texts stay plain text whatever they hold: a mark breaks up what looks like a control token in them before the
template runs, and is taken out of what is encoded afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pagedserve.contract.errors import ModelError, RequestError
from pagedserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jinja2 import Template

Message = Mapping[str, Any]  # {"role": …, "content": …}, as in OpenAI's API

ROLES = ("system", "developer", "user", "assistant", "tool")
_TRANSCRIPT_NAMES = {"user": "User", "assistant": "Assistant", "tool": "Tool"}


class ChatTemplate:
    """A model's chat template. With `source` None it is the plain transcript, for base models without a template:

    the system texts, each a paragraph of its own, then lines `User: …` and `Assistant: …`, and `Assistant:` at the
    end for the answer; `stop_strings` then end the answer where the model would go on as the user.
    ModelError when the template cannot be parsed; `origin` names the file in it.
    """

    def __init__(self, source: str | None, origin: str, variables: Mapping[str, str] | None = None) -> None:
        self.is_plain_transcript = source is None
        self.stop_strings: tuple[str, ...] = ("\nUser:",) if source is None else ()
        self._origin = origin
        self._variables = dict(variables or {})
        self._template = None if source is None else _compile(source, origin)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt as text. RequestError naming `messages` for a conversation that the template does not take."""
        return self._render(_normal(messages), add_generation_prompt, variables)

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """The prompt as token ids; control tokens come from the template alone. Errors as in `render`."""
        if self.is_plain_transcript:
            return tokenizer.encode_prompt(self.render(messages, add_generation_prompt=add_generation_prompt))
        values = {"messages": _normal(messages), "variables": variables}
        mark = _unused_character(_strings(values))
        marked = _break_up(values, tokenizer, mark)
        text = self._render(marked["messages"], add_generation_prompt, marked["variables"])
        return tokenizer.encode_with_special(text, remove=mark)

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        if self._template is None:
            return _transcript(messages, add_generation_prompt)
        from jinja2 import TemplateError

        values = {**self._variables, **variables}
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **values)
        except TemplateError as error:
            raise RequestError(f"messages: the chat template refuses them: {error}", param="messages") from None
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise RequestError(
                f"messages: the chat template of {self._origin} fails on them: {error}", param="messages"
            ) from None


def _compile(source: str, origin: str) -> Template:
    # Jinja takes as long to import as a vocabulary to load, and a base model needs none of it.
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], keep_trailing_newline=False
    )
    # What Hugging Face gives to templates.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ModelError(f"{origin}: the chat template cannot be read: {error}") from None


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _normal(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages with checked roles, and text parts joined to one string."""
    if not messages:
        raise RequestError("messages: expected at least one message", param="messages")
    normal = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{i}]: expected a mapping with role and content", param="messages")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise RequestError(
                f"messages[{i}].role: expected one of {', '.join(ROLES)}, got {role!r}", param="messages"
            )
        if isinstance(content, list):
            content = "".join(_part_text(i, part) for part in content)
        if content is None and role == "assistant":
            content = ""  # an assistant message that only calls tools
        if not isinstance(content, str):
            raise RequestError(f"messages[{i}].content: expected text or a list of text parts", param="messages")
        normal.append({**message, "role": role, "content": content})
    return normal


def _part_text(message: int, part: object) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise RequestError(f"messages[{message}].content: only text parts are supported", param="messages")


def _transcript(messages: Iterable[dict[str, Any]], add_generation_prompt: bool) -> str:
    lines = [
        f"{_TRANSCRIPT_NAMES[m['role']]}: {m['content']}\n" if m["role"] in _TRANSCRIPT_NAMES else f"{m['content']}\n\n"
        for m in messages
    ]
    return "".join(lines) + ("Assistant:" if add_generation_prompt else "")


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _unused_character(strings: Iterable[str]) -> str:
    """A private-use character that occurs in none of the strings."""
    used = set().union(*strings)
    return next(c for c in map(chr, range(0x10FFFD, 0xFFFFF, -1)) if c not in used)


def _break_up(value: Any, tokenizer: Tokenizer, mark: str) -> Any:
    """A copy of nested values in which no text, and no key, holds a control token."""
    if isinstance(value, str):
        return tokenizer.break_up_control(value, mark)
    if isinstance(value, dict):
        return {_break_up(key, tokenizer, mark): _break_up(item, tokenizer, mark) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_break_up(item, tokenizer, mark) for item in value]
    return value
