"""The chat page in a real browser, in front of a scheduler that answers at a pace."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagedserve.contract.messages import Abort, Generate, SequenceTokens, unpack_ids
from tests.api_server import serving
from tests.browser import Tab, browsing
from tests.fake_scheduler import FakeScheduler, byte_steps
from tests.server import eventually

RICH = """# Title

Some **bold**, *slanted*, `code` and [a link](https://example.org/x_(y)).

- one
- two
  1. deep

> quoted

| a | b |
|---|---|
| 1 | 2 |

```python
print("<b>not bold</b>")
```
<img src=x onerror="window.hacked=1"> <script>window.hacked=2</script>
[bad](javascript:window.hacked=3) [worse](data:text/html,x)
"""


def script(message: Generate) -> list[list[SequenceTokens]]:
    """What the last user message asks for: RICH, something without end, or the number of user messages."""
    prompt = "".join(chr(i) if i < 256 else "§" for i in unpack_ids(message.prompt_token_ids).tolist())
    last = prompt.rsplit("user\n", 1)[1]
    if last.startswith("rich"):
        return byte_steps(RICH.encode(), size=8, finish_reason="stop")(message)
    if last.startswith("endless"):
        return byte_steps(b"on and " * 300, size=7)(message)
    text = f"{prompt.count('user' + chr(10))} user messages, the last is {last.split('§')[0]}"
    return byte_steps(text.encode(), size=4, finish_reason="stop")(message)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeScheduler, str]]:
    """The scheduler, and the page's address."""
    path = tmp_path_factory.mktemp("s") / "s"
    with FakeScheduler(path, script, step_s=0.02) as fake, serving(fake.endpoint) as url:
        yield fake, url


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """One browser for all tests."""
    with browsing(tmp_path_factory.mktemp("browser")) as tab:
        yield tab


@pytest.fixture
def tab(browser: Tab, server: tuple[FakeScheduler, str]) -> Tab:
    """The page, opened by somebody who was never here before; it must not complain."""
    browser.resize(1200, 800)
    browser.open(server[1])
    browser.evaluate("localStorage.clear()")
    browser.open(server[1])
    browser.wait("document.getElementById('model').textContent.startsWith('demo')")
    browser.errors.clear()
    browser.requested.clear()
    return browser


def say(tab: Tab, text: str) -> None:
    """Type a message and send it with Enter."""
    tab.click("#input")
    tab.type(text)
    tab.press("Enter")


def answered(tab: Tab) -> str:
    """The last answer, once it is complete."""
    tab.wait("document.getElementById('stop').hidden && document.querySelector('article:last-of-type.assistant')")
    return tab.text("article:last-of-type .body")


def test_a_message_is_answered_as_a_stream_and_the_next_one_continues(tab: Tab) -> None:
    say(tab, "hello")
    tab.wait("document.querySelector('article.assistant.running .body')?.innerText.length > 3")
    assert answered(tab) == "1 user messages, the last is hello"
    say(tab, "again")
    assert answered(tab) == "2 user messages, the last is again"
    stats = tab.text("article:last-of-type .stats")
    assert "tokens/s" in stats and "prompt tokens from cache" in stats
    assert tab.errors == []


def test_stop_ends_the_answer_and_the_request(tab: Tab, server: tuple[FakeScheduler, str]) -> None:
    aborts = len(server[0].of_kind(Abort))
    say(tab, "endless")
    tab.wait("document.querySelector('article.running .body')?.innerText.length > 20")
    tab.click("#stop")
    assert answered(tab).startswith("on and on and")
    assert "stopped" in tab.text("article:last-of-type .stats")
    assert eventually(lambda: len(server[0].of_kind(Abort)) == aborts + 1, 1.0)
    say(tab, "endless")
    tab.wait("document.querySelector('article.running .body')?.innerText.length > 20")
    tab.press("Escape")
    answered(tab)
    assert eventually(lambda: len(server[0].of_kind(Abort)) == aborts + 2, 1.0)


def test_a_reload_keeps_conversations_and_going_back_to_one_works(tab: Tab, server: tuple[FakeScheduler, str]) -> None:
    say(tab, "first")
    answered(tab)
    tab.click("#new")
    say(tab, "second")
    answered(tab)
    tab.open(server[1])
    assert answered(tab) == "1 user messages, the last is second"
    assert tab.text("#conversations").split() == ["second", "×", "first", "×"]
    tab.click("#conversations li:nth-child(2) .title")
    assert answered(tab) == "1 user messages, the last is first"
    tab.click("#conversations li:nth-child(2) button:last-child")
    assert tab.text("#conversations").split() == ["second", "×"]


def test_an_answer_can_be_made_again_and_both_stay(tab: Tab) -> None:
    say(tab, "hello")
    answered(tab)
    tab.click("article.assistant [aria-label='Answer once more']")
    answered(tab)
    assert tab.text(".branch").split() == ["‹", "2/2", "›"]
    tab.click("[aria-label='Earlier version']")
    assert tab.text(".branch").split() == ["‹", "1/2", "›"]


def test_an_edit_begins_a_branch_and_the_old_one_stays(tab: Tab) -> None:
    say(tab, "hello")
    answered(tab)
    say(tab, "more")
    answered(tab)
    tab.click("article.user [aria-label='Edit this message and branch off']")
    tab.evaluate("document.activeElement.select()")
    tab.type("changed")
    tab.press("Enter")
    assert answered(tab) == "1 user messages, the last is changed"
    tab.click("[aria-label='Earlier version']")
    assert answered(tab) == "2 user messages, the last is more"


def test_settings_reach_the_request(tab: Tab, server: tuple[FakeScheduler, str]) -> None:
    tab.click("summary")
    for name, value in {
        "system": "Be brief.",
        "temperature": "0.5",
        "top_k": "7",
        "seed": "3",
        "max_tokens": "50",
    }.items():
        tab.click(f"#settings [name={name}]")
        tab.evaluate("document.activeElement.select()")
        tab.type(value)
    tab.click("summary")
    say(tab, "hello")
    answered(tab)
    message = server[0].of_kind(Generate)[-1]
    assert isinstance(message, Generate)
    assert b"Be brief." in bytes(i % 256 for i in unpack_ids(message.prompt_token_ids).tolist())
    sampling = message.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed, sampling.max_tokens) == (0.5, 7, 3, 50)


def test_markdown_is_shown_and_what_a_model_writes_never_becomes_markup(tab: Tab) -> None:
    say(tab, "rich")
    answered(tab)
    body = "article:last-of-type .body"
    counts = {
        name: tab.evaluate(f"document.querySelectorAll('{body} {name}').length")
        for name in (
            "h1",
            "strong",
            "em",
            "p code",
            "ul > li",
            "ul ol > li",
            "blockquote",
            "td",
            "pre code",
            "a",
            "b",
            "img",
            "script",
        )
    }
    assert counts == {
        "h1": 1, "strong": 1, "em": 1, "p code": 1, "ul > li": 2, "ul ol > li": 1, "blockquote": 1, "td": 2,
        "pre code": 1, "a": 1, "b": 0, "img": 0, "script": 0,
    }  # fmt: skip
    assert tab.evaluate(f"document.querySelector('{body} a').href") == "https://example.org/x_(y)"
    assert tab.text(f"{body} pre") == 'print("<b>not bold</b>")'
    assert '<img src=x onerror="window.hacked=1">' in tab.text(body)
    assert tab.evaluate("window.hacked") is None
    assert tab.errors == []


def test_markdown_survives_whatever_a_small_model_may_write(tab: Tab) -> None:
    hard = [
        "**" * 3000,
        ">" * 5000,
        "- " * 2000,
        "`" * 4001,
        "[" * 3000 + "](" * 3000,
        "* a\n" * 2000,
        "|" * 3000 + "\n|-|",
        "_" * 9999,
    ]
    result = tab.evaluate(
        f"""(async () => {{
            const {{ render }} = await import("/page/markdown.js");
            const begin = performance.now();
            for (const text of {hard!r}) render(text);
            return performance.now() - begin;
        }})()"""
    )
    assert result < 4000


def test_a_refusal_is_shown_and_the_conversation_goes_on(tab: Tab) -> None:
    say(tab, "x" * 5000)
    answered(tab)
    assert "maximum context length is 4096 tokens" in tab.text("[role=alert]")


def test_the_keyboard_is_enough(tab: Tab, server: tuple[FakeScheduler, str]) -> None:
    assert tab.evaluate("document.activeElement.id") == "input"
    tab.type("line one")
    tab.press("Enter", modifiers=8)
    tab.type("line two")
    tab.press("Enter")
    assert answered(tab) == "1 user messages, the last is line one\nline two"
    tab.press("n", modifiers=1)
    assert tab.evaluate("document.querySelectorAll('article').length") == 0
    tab.evaluate("document.getElementById('tab-chat').focus()")
    tab.press("ArrowRight")
    assert tab.evaluate("document.activeElement.id") == "tab-server"
    assert tab.evaluate("document.getElementById('view-chat').hidden") is True


def test_on_a_phone_nothing_is_wider_than_the_screen_and_the_menu_opens(tab: Tab) -> None:
    say(tab, "rich")
    answered(tab)
    tab.resize(360, 740, phone=True)
    wide = "document.documentElement.scrollWidth"
    assert tab.evaluate(wide) == 360
    tab.wait("document.getElementById('sidebar').getBoundingClientRect().right <= 0")
    tab.click("#menu")
    tab.wait("document.getElementById('sidebar').getBoundingClientRect().left === 0")
    tab.press("Escape")
    tab.wait("document.getElementById('sidebar').getBoundingClientRect().right <= 0")
    tab.click("#tab-server")
    assert tab.evaluate(wide) == 360


def test_the_theme_is_the_users_and_is_kept(tab: Tab, server: tuple[FakeScheduler, str]) -> None:
    before = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    tab.click("#theme")
    after = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert before != after
    tab.open(server[1])
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == after


def test_the_server_view_shows_the_state_and_asks_only_while_it_is_looked_at(tab: Tab) -> None:
    tab.click("#tab-server")
    tab.wait("document.querySelectorAll('#workers tr').length === 1")
    assert "State\nready" in tab.text("#figures")
    assert tab.text("#workers").split() == ["0", "2", "ready", "avx2"]
    pixels = (
        "[...new Uint32Array(document.getElementById('{}').getContext('2d').getImageData(0, 0, 300, 100).data.buffer)]"
    )
    for canvas in ("rate", "ttft", "blocks"):
        assert tab.evaluate(f"new Set({pixels.format(canvas)}).size") > 1
    tab.click("#tab-chat")
    tab.evaluate("new Promise(done => setTimeout(done, 1200))")
    tab.requested.clear()
    tab.evaluate("new Promise(done => setTimeout(done, 1500))")
    assert tab.requested == []


def test_nothing_is_loaded_from_another_host(tab: Tab, server: tuple[FakeScheduler, str]) -> None:
    for path in ("/", "/docs"):
        tab.open(server[1] + path)
        tab.wait("document.querySelector('h1, #model').textContent")
    tab.wait("document.querySelectorAll('section').length > 8")
    assert [url for url in tab.requested if not url.startswith(server[1])] == []
    assert tab.errors == []
