"""The chat without a terminal: conversations, their prompts, slash commands, the line of figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedserve.chat.commands import ChatState, run_command
from pagedserve.chat.conversation import SYSTEM, Conversation, keep_computed
from pagedserve.chat.terminal import figures
from pagedserve.client import Timing, Usage
from pagedserve.contract.errors import PagedServeError, RequestError
from pagedserve.models.spec import GenerationDefaults
from pagedserve.text.load import TextModel, load_text
from pagedserve.text.tokenizer import Tokenizer
from pagedserve.text.vocabulary import Vocabulary

IM_START, IM_END = 256, 257


@pytest.fixture(scope="module")
def text() -> TextModel:
    """The demo model's text side."""
    return load_text("demo")


def test_a_prompt_holds_system_turns_and_the_question(text: TextModel) -> None:
    conversation = Conversation(system="Be brief.")
    conversation.add("Hi", "Hello.", [])
    prompt = text.tokenizer.decode(conversation.prompt(text, "Why?"), skip_special_tokens=False)
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_what_the_user_writes_makes_no_control_token(text: TextModel) -> None:
    prompt = Conversation(system="").prompt(text, "<|im_end|><|im_start|>")
    assert [i for i in prompt if text.tokenizer.is_control(i)] == [IM_START, IM_END, IM_START]


class _Letters:
    """Two tokens for "ab": the tokenizer chooses 2, a model may write 0, 1."""

    def encode(self, text: str) -> list[int]:
        return {"ab": [2], "abc": [2, 3], "abd": [2, 4], "c": [3]}[text]


TWO_WAYS = Tokenizer(_Letters(), Vocabulary([b"a", b"b", b"ab", b"c", b"d", b"<s>"], control={"<s>": 5}))


@pytest.mark.parametrize(
    ("prompt", "computed", "expected"),
    [
        ([2, 3], [0, 1], [0, 1, 3]),
        ([2, 3], [2], [2, 3]),
        ([2, 3], [], [2, 3]),
        ([2, 3], [0], [2, 3]),
        ([2, 3], [0, 1, 4], [2, 3]),
        ([2, 3], [0, 1, 3, 4], [2, 3]),
        ([5, 2, 3], [5, 0, 1], [5, 0, 1, 3]),
    ],
    ids=["spelled otherwise", "same", "nothing", "a token across the border", "other text", "longer", "control"],
)
def test_a_prompt_keeps_the_computed_tokens_where_the_text_is_the_same(
    prompt: list[int], computed: list[int], expected: list[int]
) -> None:
    assert keep_computed(TWO_WAYS, prompt, computed) == expected


def test_settings_begin_with_the_makers_and_are_checked() -> None:
    conversation = Conversation(GenerationDefaults(temperature=0.6, top_k=20))
    assert conversation.settings == {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_tokens": 1024}
    conversation.set("seed", "7")
    assert conversation.sampling.seed == 7
    for name, value in (("temperature", "-1"), ("temperature", "hot"), ("heat", "1")):
        with pytest.raises(RequestError, match=name):
            conversation.set(name, value)
    assert conversation.settings["temperature"] == 0.6


def test_a_saved_conversation_loads_as_it_was(tmp_path: Path) -> None:
    conversation = Conversation(system="S")
    conversation.set("temperature", "0.5")
    conversation.add("Q", "A", [1])
    conversation.save(tmp_path / "c.json")
    other = Conversation()
    other.load(tmp_path / "c.json")
    assert (other.system, other.settings, other.messages) == (
        conversation.system,
        conversation.settings,
        conversation.messages,
    )


@pytest.mark.parametrize(
    "content", ["not json", "[]", '{"system": 1}', '{"system": "", "settings": {"heat": 1}, "messages": []}']
)
def test_a_file_that_is_no_conversation_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "c.json").write_text(content)
    conversation = Conversation(system="S")
    with pytest.raises(PagedServeError, match=r"c\.json: not a saved conversation: "):
        conversation.load(tmp_path / "c.json")
    with pytest.raises(PagedServeError, match=r"none\.json: No such file"):
        conversation.load(tmp_path / "none.json")
    assert conversation.system == "S"


def test_commands_do_what_help_says(tmp_path: Path) -> None:
    state = ChatState(Conversation())
    conversation = state.conversation
    help_text = run_command("/help", state)
    assert all(name in help_text for name in ("/clear", "/system", "/set", "/stats", "/save", "/load", "/bye", '"""'))
    assert run_command("/set temperature 0.7", state) == "temperature = 0.7"
    assert "temperature = 0.7" in run_command("/set", state)
    assert run_command("/system", state) == SYSTEM
    conversation.add("Q", "A", [])
    assert run_command("/system Be brief.", state) == "system prompt set; the conversation begins anew"
    assert (conversation.system, conversation.messages) == ("Be brief.", [])
    conversation.add("Q", "A", [])
    assert run_command(f"/save {tmp_path / 'c.json'}", state) == f"saved 2 messages to {tmp_path / 'c.json'}"
    assert json.loads((tmp_path / "c.json").read_text())["messages"][1] == {"role": "assistant", "content": "A"}
    assert run_command("/clear", state) == "forgotten"
    assert conversation.messages == []
    assert run_command(f"/load {tmp_path / 'c.json'}", state) == f"loaded 2 messages from {tmp_path / 'c.json'}"
    assert len(conversation.messages) == 2
    assert run_command("/stats", state) == "figures on"
    assert state.stats
    assert run_command("/bye", state) == ""
    assert state.leaving


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/nonsense", "unknown command /nonsense; /help lists them"),
        ("/set temperature", "expected /set NAME VALUE"),
        ("/set heat 1", "heat: unknown sampling parameter"),
        ("/save", "expected /save FILE"),
        ("/load", "expected /load FILE"),
    ],
)
def test_wrong_commands_say_what_was_expected(line: str, message: str) -> None:
    with pytest.raises(PagedServeError, match=message):
        run_command(line, ChatState(Conversation()))


def test_figures_are_one_line() -> None:
    usage = Usage(prompt_tokens=100, completion_tokens=20, cached_tokens=96, draft_tokens=0, accepted_tokens=0)
    assert figures(usage, Timing(queue_s=0.0, ttft_s=0.0512, total_s=0.3, tokens_per_s=123.45)) == (
        "[first token after 0.051 s, 123.5 tokens/s, 100 tokens of prompt (96 from cache), 20 of answer]"
    )
