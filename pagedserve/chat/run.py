"""One chat from start to end: finds or starts a server, then one question or a conversation in turns."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pagedserve.chat.commands import ChatState, run_command
from pagedserve.chat.conversation import SYSTEM, Conversation
from pagedserve.chat.terminal import Terminal, figures, interrupts
from pagedserve.client import Client
from pagedserve.config import Config
from pagedserve.contract.errors import PagedServeError, RequestError, ServerUnavailableError
from pagedserve.private_server import running_or_private


def run_chat(
    config: Config, question: str, *, system: str | None, stats: bool, settings: Sequence[str], endpoint: str | None
) -> None:
    """Answer `question` (and what a pipe holds) and return; without one, talk until the user leaves."""
    if not sys.stdin.isatty():
        question = "\n\n".join(part for part in (question, sys.stdin.read().strip()) if part)
        if not question:
            raise RequestError("nothing to ask: give a question, or text on standard input")
    terminal = Terminal(Path(config.home) / "chat_history")
    with contextlib.ExitStack() as stack:
        client = _connect(config, endpoint, terminal, stack)
        text = client.text
        state = ChatState(Conversation(text.generation, SYSTEM if system is None else system), stats)
        for setting in settings:
            name, equals, value = setting.partition("=")
            if not equals:
                raise RequestError(f"--set: expected NAME=VALUE, got {setting}")
            state.conversation.set(name, value)
        if question:
            _answer(client, state, terminal, question)
        else:
            terminal.tell(f"{client.model.name}. /help for help, Ctrl-D to leave.")
            with interrupts():  # between an answer's end and the next line Ctrl-C means nothing
                _talk(client, state, terminal)


def _talk(client: Client, state: ChatState, terminal: Terminal) -> None:
    while not state.leaving and (line := terminal.ask()) is not None:
        if not line.strip():
            continue
        try:
            if line.startswith("/"):
                if reply := run_command(line.strip(), state):
                    terminal.tell(reply)
            else:
                _answer(client, state, terminal, line)
        except ServerUnavailableError:
            raise
        except PagedServeError as error:
            terminal.tell(f"error: {error}")


def _answer(client: Client, state: ChatState, terminal: Terminal, question: str) -> None:
    conversation, text = state.conversation, client.text
    prompt = conversation.prompt(text, question)
    room = client.model.max_model_len - len(prompt)
    if room < 1:
        raise RequestError(
            f"the conversation has {len(prompt)} tokens, the context {client.model.max_model_len}; /clear begins anew",
            code="context_length_exceeded",
        )
    sampling = conversation.sampling
    max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    sampling = msgspec.structs.replace(sampling, max_tokens=max_tokens)
    with client.generate(prompt, sampling=sampling, stop=text.template.stop_strings) as stream:
        answer = terminal.show(stream)
    completion = stream.result()
    if answer:
        conversation.add(question, answer, (*completion.prompt_token_ids, *completion.outputs[0].token_ids))
    if completion.outputs[0].finish_reason == "length":
        terminal.tell(f"(cut at {max_tokens} tokens)")
    if state.stats:
        terminal.tell(figures(completion.usage, completion.timing))


def _connect(config: Config, endpoint: str | None, terminal: Terminal, stack: contextlib.ExitStack) -> Client:
    """A client of the server that runs, or of one that is started for this chat and ends with it."""
    client = stack.enter_context(Client(stack.enter_context(running_or_private(config, endpoint, terminal.tell))))
    if not client.welcome.ready:
        terminal.tell("waiting for the server to be ready")
        client.wait_ready()
    return client
