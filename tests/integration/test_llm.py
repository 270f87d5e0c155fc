"""pagedserve.LLM: a script's own server, its answers in order, and nothing left behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import pagedserve
from pagedserve import LLM, SamplingParams
from pagedserve.contract.errors import PagedServeError, RequestError
from pagedserve.contract.segments import PREFIX
from tests.server import RunFolder, eventually

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def segments() -> set[str]:
    """The shared segments of private servers, of whomever."""
    return {file.name for file in Path("/dev/shm").glob(f"{PREFIX}private-*")}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """One server for all tests here."""
    with LLM("demo", workers=1, pool_tokens=4096, max_num_seqs=8, progress=False) as llm:
        yield llm


def test_completions_come_in_the_order_of_the_prompts_whatever_ends_first(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=60 - i, ignore_eos=True) for i in range(50)]
    completions = llm.generate([f"prompt {i}" for i in range(50)], params)
    assert [bytes(c.prompt_token_ids) for c in completions] == [b"prompt %d" % i for i in range(50)]
    assert [c.usage.completion_tokens for c in completions] == [60 - i for i in range(50)]
    alone = llm.generate("prompt 17", params[17])
    assert [c.outputs[0].token_ids for c in alone] == [completions[17].outputs[0].token_ids]


def test_a_prompt_may_be_a_text_token_ids_or_several_of_them(llm: LLM) -> None:
    by_text, by_ids = (llm.generate(prompt, GREEDY) for prompt in ("ab", [97, 98]))
    assert by_text[0].outputs == by_ids[0].outputs
    assert [len(c.prompt_token_ids) for c in llm.generate([[97, 98], [99]], GREEDY)] == [2, 1]
    assert llm.generate([], GREEDY) == []


def test_chat_takes_one_conversation_or_several(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hello"}]
    (one,) = llm.chat(conversation, GREEDY)
    several = llm.chat([conversation, conversation], GREEDY)
    assert [c.text for c in several] == [one.text] * 2
    assert bytes(one.prompt_token_ids[1:6]) == b"user\n"


def test_many_outputs_for_a_prompt_and_options_of_the_client(llm: LLM) -> None:
    (completion,) = llm.generate("x", SamplingParams(n=8, max_tokens=4, seed=1), stop=["e"])
    assert len(completion.outputs) == 8 and all("e" not in output.text for output in completion.outputs)


def test_a_request_that_cannot_be_served_is_told_and_the_server_goes_on(llm: LLM) -> None:
    with pytest.raises(RequestError, match="context is 4096 tokens") as caught:
        llm.generate(["fine", "x" * 5000, "fine"], GREEDY)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(RequestError, match="expected one for each of 2 prompts, got 1"):
        llm.generate(["a", "b"], [GREEDY])
    assert eventually(lambda: llm.client.status().num_referenced_blocks == 0, 2.0)
    assert len(llm.generate("fine", GREEDY)) == 1


def test_it_leaves_nothing_behind() -> None:
    segments_before, processes_before = segments(), set(psutil.Process().children(recursive=True))
    with LLM("demo", workers=1, pool_tokens=1024, progress=False) as llm:
        assert llm.generate("x", GREEDY)[0].usage.completion_tokens == 8
        assert len(segments() - segments_before) == 3
        assert len(set(psutil.Process().children(recursive=True)) - processes_before) >= 3
    assert segments() == segments_before
    assert set(psutil.Process().children(recursive=True)) <= processes_before


def test_a_model_that_cannot_be_served_is_told_in_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    with pytest.raises(PagedServeError, match=r"broken\.gguf") as caught:
        LLM(str(broken), workers=1, progress=False)
    assert "\n" not in str(caught.value)


def test_a_script_shows_a_progress_bar_only_to_a_terminal_and_its_server_ends_with_it() -> None:
    script = """
from pagedserve import LLM, SamplingParams
llm = LLM("demo", workers=1, pool_tokens=1024)
print(len(llm.generate(["a", "b"], SamplingParams(max_tokens=4))))
"""
    folder, before = RunFolder(), segments()
    try:
        result = subprocess.run(
            [sys.executable, "-c", script],
            env=folder.environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert (result.stdout, result.returncode) == ("2\n", 0), result.stderr
        assert "/2" not in result.stderr
        assert eventually(lambda: segments() == before, 5.0)
    finally:
        folder.remove()


def test_importing_the_package_does_not_load_the_client() -> None:
    code = "import pagedserve, sys; print(sorted(m for m in sys.modules if m.startswith('pagedserve')))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "['pagedserve']\n"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pagedserve.nothing  # type: ignore[attr-defined]
