"""Bodies of requests: which prompts there are, and how fields become SamplingParams."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from pagedserve.api.schemas import ChatRequest, CompletionRequest
from pagedserve.contract.errors import RequestError
from pagedserve.contract.sampling import SamplingParams
from pagedserve.models.spec import GenerationDefaults

NONE = GenerationDefaults()


def completion(**fields: Any) -> SamplingParams:
    """The sampling of a completion request."""
    return CompletionRequest(**{"prompt": "x", **fields}).sampling(NONE)


def chat(**fields: Any) -> SamplingParams:
    """The sampling of a chat request."""
    return ChatRequest(**{"messages": [{"role": "user", "content": "x"}], **fields}).sampling(NONE)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ([1, 2],)),
        ([[1], [2, 3]], ([1], [2, 3])),
    ],
)
def test_a_prompt_is_a_text_texts_ids_or_lists_of_ids(prompt: Any, prompts: tuple[Any, ...]) -> None:
    assert CompletionRequest(prompt=prompt).prompt == prompts


@pytest.mark.parametrize("prompt", [5, [], None, [1, "a"], ["a", 1], [[1], "a"], [True], [1.5], {"a": 1}, "\ud800"])
def test_another_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionRequest(prompt=prompt)
    assert caught.value.errors()[0]["loc"] == ("prompt",)


def test_defaults_are_openais() -> None:
    assert completion() == SamplingParams(max_tokens=16)
    assert chat() == SamplingParams()


def test_a_null_is_a_field_that_is_not_given() -> None:
    names = [name for name in CompletionRequest.model_fields if name != "prompt"]
    assert completion(**dict.fromkeys(names)) == completion()


def test_unknown_fields_are_ignored() -> None:
    assert completion(parallel_tool_calls=True, user="me") == completion()


def test_what_the_makers_of_the_model_advise_is_used_where_the_request_is_silent() -> None:
    defaults = GenerationDefaults(temperature=0.6, top_k=20, top_p=0.9)
    sampling = CompletionRequest(prompt="x", top_p=0.5).sampling(defaults)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 0.5)


def test_vllms_fields_arrive() -> None:
    sampling = completion(
        top_k=-1,
        min_p=0.1,
        repetition_penalty=1.2,
        min_tokens=2,
        stop_token_ids=[3, 4],
        ignore_eos=True,
        seed=9,
        logit_bias={"5": -100, "6": 1.5},
        prompt_logprobs=2,
        num_speculative_tokens=4,
    )
    assert sampling == SamplingParams(
        max_tokens=16,
        top_k=0,
        min_p=0.1,
        repetition_penalty=1.2,
        min_tokens=2,
        stop_token_ids=(3, 4),
        ignore_eos=True,
        seed=9,
        logit_bias={5: -100, 6: 1.5},
        prompt_logprobs=2,
        num_speculative_tokens=4,
    )


def test_beam_search_is_greedy_and_as_wide_as_vllm_makes_it() -> None:
    assert completion(use_beam_search=True, n=3) == SamplingParams(max_tokens=16, temperature=0, n=3, beam_width=3)
    assert completion(use_beam_search=True, best_of=4).beam_width == 4
    assert completion(use_beam_search=True, best_of=4).n == 1
    wide = completion(beam_width=5, n=2, length_penalty=0.5, early_stopping=True)
    assert (wide.beam_width, wide.n, wide.length_penalty, wide.early_stopping) == (5, 2, 0.5, True)


def test_echo_with_logprobs_scores_the_prompt() -> None:
    assert completion(echo=True, logprobs=2, max_tokens=0).prompt_logprobs == 2
    assert completion(echo=True).prompt_logprobs is None
    assert completion(logprobs=2).prompt_logprobs is None


def test_chats_logprobs_are_a_flag_and_a_number() -> None:
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).logprobs == 3
    assert chat(logprobs=False).logprobs is None


def test_max_completion_tokens_counts_before_max_tokens() -> None:
    assert chat(max_tokens=5).max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=7).max_tokens == 7


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logprobs": 65}, "logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"suffix": "b"}, "suffix"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"use_beam_search": True, "n": 2, "temperature": 0.5}, "temperature"),
    ],
)
def test_a_completion_field_out_of_range_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        completion(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_a_chat_field_that_cannot_be_served_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [{"temperature": "hot"}, {"n": 1.5}, {"stream": 1}, {"stop": 5}, {"stop": ["a"] * 65}, {"priority": 2**40}],
)
def test_a_field_of_another_type_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        completion(**fields)
    assert caught.value.errors()[0]["loc"][0] == next(iter(fields))
