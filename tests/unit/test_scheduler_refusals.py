"""What is refused when it arrives: the code, the field and both numbers; what is accepted can always be served."""

from __future__ import annotations

from typing import Any

import pytest

from pagedserve.contract.errors import ConfigError, RequestError
from pagedserve.contract.messages import Generate
from pagedserve.contract.sampling import SamplingParams
from tests.builders import CLIENT, Engine, alone, generate, prompt_of, small_limits


def refusal(message: Generate, **limits: Any) -> RequestError:
    engine = Engine(small_limits(**limits))
    with pytest.raises(RequestError) as refused:
        engine.add(message)
    engine.scheduler.check()
    assert engine.scheduler.plan(0.0) is None  # nothing of it is left
    return refused.value


def test_a_prompt_and_output_beyond_the_context_are_refused_with_both_numbers() -> None:
    error = refusal(generate("a", prompt_of(190), max_tokens=11))
    assert error.code == "context_length_exceeded"
    assert "200" in str(error) and "201" in str(error)


def test_a_prompt_that_fills_the_context_is_refused_unless_no_output_is_asked() -> None:
    error = refusal(generate("a", prompt_of(200), max_tokens=None))
    assert error.code == "context_length_exceeded"
    assert "200" in str(error) and "201" in str(error)
    engine = Engine()
    engine.run(generate("a", prompt_of(200), max_tokens=0))
    assert engine.last("a").finished


def test_what_needs_more_blocks_than_the_pool_has_is_refused_with_both_numbers() -> None:
    error = refusal(generate("a", prompt_of(30), max_tokens=12), num_blocks=10)
    assert error.code == "pool_exceeded"
    assert "10 blocks of 4 tokens" in str(error) and "11 for 41 tokens" in str(error)


def test_what_just_fits_into_the_pool_is_served() -> None:
    engine = Engine(small_limits(num_blocks=10))
    message = generate("a", prompt_of(30), max_tokens=11)  # 40 tokens stored; the last one needs no place
    engine.run(message)
    assert engine.tokens("a") == alone(message, engine.limits)


def test_the_queue_has_a_limit() -> None:
    engine = Engine(small_limits(max_waiting=2))
    for name in ("a", "b"):
        engine.add(generate(name, [1]))
    with pytest.raises(RequestError, match="2 sequences wait, at most 2 may") as refused:
        engine.add(generate("c", [1]))
    assert refused.value.code == "queue_full"
    engine.step()
    engine.add(generate("c", [1]))


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (b"", "at least one token"),
        (b"\1\0\0", "multiple of 4 bytes"),
        (b"\x20\0\0\0", r"within \[0, 31\], got 32"),
        (b"\xff\xff\xff\xff", r"within \[0, 31\], got -1"),
    ],
)
def test_prompts_that_are_no_token_ids_are_refused(prompt: bytes, reason: str) -> None:
    engine = Engine()
    with pytest.raises(RequestError, match=reason) as refused:
        engine.add(Generate(request_id="a", prompt_token_ids=prompt))
    assert refused.value.param == "prompt_token_ids"


@pytest.mark.parametrize(
    ("param", "sampling"),
    [
        ("temperature", {"temperature": -1.0}),
        ("stop_token_ids", {"stop_token_ids": (32,)}),
        ("logit_bias", {"logit_bias": {32: 1.0}}),
        ("n", {"n": 9}),
        ("best_of", {"best_of": 9}),
        ("beam_width", {"beam_width": 9}),
        ("repetition_penalty", {"beam_width": 2, "repetition_penalty": 1.1}),
        ("logit_bias", {"beam_width": 2, "logit_bias": {1: 1.0}}),
        ("min_tokens", {"beam_width": 2, "min_tokens": 2, "stop_token_ids": (1, 2, 3, 4)}),
    ],
)
def test_sampling_that_cannot_be_done_is_refused_by_the_name_of_its_field(param: str, sampling: dict[str, Any]) -> None:
    message = Generate(
        request_id="a",
        prompt_token_ids=b"\1\0\0\0",
        sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **sampling}),
    )
    error = refusal(message)
    assert (error.code, error.param) == ("invalid_value", param)
    assert param in str(error)


def test_an_id_is_unique_among_the_live_requests_of_its_client() -> None:
    engine = Engine()
    engine.add(generate("a", [1], max_tokens=1))
    with pytest.raises(RequestError, match="'a'"):
        engine.add(generate("a", [1]))
    engine.scheduler.add(b"another client", generate("a", [1], max_tokens=1), 0.0)
    engine.scheduler.abort(CLIENT, "a")
    engine.add(generate("a", [1], max_tokens=1))
    engine.run()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("num_blocks", {"num_blocks": 0}),
        ("max_num_batched_tokens", {"max_num_batched_tokens": 4, "max_num_seqs": 8}),
        ("max_num_rows", {"max_num_rows": 4, "max_num_seqs": 8}),
    ],
)
def test_limits_that_could_stop_everything_are_refused(name: str, changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=name):
        small_limits(**changes)
