"""The slash commands of the chat. Each changes the conversation and says one thing; none touches the terminal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pagedserve.chat.conversation import Conversation
from pagedserve.contract.errors import PagedServeError

HELP = """\
/help               this text
/clear              forget the conversation
/system [TEXT]      set the system prompt and begin anew; without TEXT show it
/set [NAME VALUE]   set a sampling parameter, as /set temperature 0.7; without arguments show them
/stats              figures after each answer: on or off
/save FILE          write the conversation to a file
/load FILE          go on with a saved conversation
/bye                leave (so does Ctrl-D)
\"\"\"                 begins and ends a text of many lines
Ctrl-C              stops the answer"""


@dataclass
class ChatState:
    """What commands may change."""

    conversation: Conversation
    stats: bool = False
    leaving: bool = False


def run_command(line: str, state: ChatState) -> str:
    """Run one line that begins with "/"; what to tell the user. PagedServeError when it cannot be done."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    conversation = state.conversation
    if name in ("/help", "/?"):
        return HELP
    if name == "/clear":
        conversation.clear()
        return "forgotten"
    if name == "/system":
        if not rest:
            return conversation.system or "no system prompt"
        conversation.system = rest
        conversation.clear()
        return "system prompt set; the conversation begins anew"
    if name == "/set":
        return _set(rest, conversation)
    if name == "/stats":
        state.stats = not state.stats
        return f"figures {'on' if state.stats else 'off'}"
    if name == "/save":
        path = _path(name, rest)
        conversation.save(path)
        return f"saved {len(conversation.messages)} messages to {path}"
    if name == "/load":
        path = _path(name, rest)
        conversation.load(path)
        return f"loaded {len(conversation.messages)} messages from {path}"
    if name in ("/bye", "/exit", "/quit"):
        state.leaving = True
        return ""
    raise PagedServeError(f"unknown command {name}; /help lists them")


def _set(rest: str, conversation: Conversation) -> str:
    name, _, value = rest.partition(" ")
    if name and not value:
        raise PagedServeError("expected /set NAME VALUE")
    if name:
        conversation.set(name, value.strip())
        return f"{name} = {conversation.settings[name]}"
    return "\n".join(f"{name} = {value}" for name, value in conversation.settings.items())


def _path(command: str, rest: str) -> Path:
    if not rest:
        raise PagedServeError(f"expected {command} FILE")
    return Path(rest).expanduser()
