"""Both clients against a scripted scheduler: text, stops, errors, aborts, restarts and a server that goes away."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path

import pytest

from pagedserve.client import AsyncClient, Client, Completion, Delta
from pagedserve.contract.errors import ProtocolError, RequestError, ServerUnavailableError
from pagedserve.contract.messages import Abort, Failure, Fork, Generate, SequenceTokens
from pagedserve.contract.sampling import SamplingParams
from tests.fake_scheduler import FakeScheduler, byte_steps

HELLO = "Grüße, 🙂!".encode()


def echo_thrice(message: Generate) -> list[list[SequenceTokens]]:
    """A script that answers with the prompt, three times over."""
    return byte_steps(message.prompt_token_ids[::4] * 3)(message)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the fake scheduler listens."""
    return tmp_path / "s"


def test_a_stream_gives_whole_characters_and_every_token(path: Path) -> None:
    with FakeScheduler(path, byte_steps(HELLO)) as server, Client(server.endpoint) as client:
        deltas = list(client.generate("hi", max_tokens=20))
    assert "".join(delta.text for delta in deltas) == "Grüße, 🙂!"
    assert all("\ufffd" not in delta.text for delta in deltas)
    assert bytes(i for delta in deltas for i in delta.token_ids) == HELLO
    assert [delta.finish_reason for delta in deltas[-2:]] == [None, "length"]


def test_a_completion_has_text_counts_and_the_prompts_ids(path: Path) -> None:
    with FakeScheduler(path, byte_steps(HELLO)) as server, Client(server.endpoint) as client:
        completion = client.generate("hi", max_tokens=20).result()
    assert completion.text == "Grüße, 🙂!"
    assert completion.prompt_token_ids == (104, 105)
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (2, len(HELLO), 16)
    assert completion.timing.ttft_s is not None


def test_a_character_cut_by_the_end_is_marked_not_lost(path: Path) -> None:
    with FakeScheduler(path, byte_steps("a🙂".encode()[:3])) as server, Client(server.endpoint) as client:
        assert client.generate("x").result().text == "a\ufffd"


def test_params_travel_and_a_missing_seed_is_drawn(path: Path) -> None:
    with FakeScheduler(path, byte_steps(b"a")) as server, Client(server.endpoint) as client:
        client.generate([1, 2], temperature=0.5, top_k=3, priority=7, cache_salt="s").result()
        client.generate([1, 2], sampling=SamplingParams(seed=5)).result()
        first, second = server.of_kind(Generate)
    assert isinstance(first, Generate) and isinstance(second, Generate)
    assert (first.sampling.temperature, first.sampling.top_k, first.priority, first.cache_salt) == (0.5, 3, 7, "s")
    assert isinstance(first.sampling.seed, int)
    assert second.sampling.seed == 5


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_stop_string_ends_the_text_before_it_whatever_the_tokens(path: Path, size: int) -> None:
    with FakeScheduler(path, byte_steps(b"one END two", size=size)) as server, Client(server.endpoint) as client:
        completion = client.generate("x", stop=["END", "never"]).result()
        output = completion.outputs[0]
        assert (output.text, output.finish_reason, output.stop) == ("one ", "stop", "END")
        assert bytes(output.token_ids) == b"one END"
        assert completion.usage.completion_tokens == 7
        client.status()
        assert [(a.request_id, a.finish_reason) for a in server.of_kind(Abort)] == [(completion.request_id, "stop")]


def test_a_stop_string_can_be_included(path: Path) -> None:
    with FakeScheduler(path, byte_steps(b"one END two")) as server, Client(server.endpoint) as client:
        assert client.generate("x", stop="END", include_stop_str=True).result().text == "one END"


def test_below_min_tokens_stop_strings_are_not_searched(path: Path) -> None:
    with FakeScheduler(path, byte_steps(b"a. b. c.")) as server, Client(server.endpoint) as client:
        assert client.generate("x", stop=".", min_tokens=3).result().text == "a. b"


def test_what_looked_like_a_stop_string_comes_out_at_the_end(path: Path) -> None:
    with FakeScheduler(path, byte_steps(b"one EN")) as server, Client(server.endpoint) as client:
        assert client.generate("x", stop="END").result().text == "one EN"


def test_sequences_of_one_request_stop_each_by_themselves(path: Path) -> None:
    with FakeScheduler(path, byte_steps(b"aXb")) as server, Client(server.endpoint) as client:
        completion = client.generate("x", n=3, stop="X").result()
    assert [(o.index, o.text, o.finish_reason) for o in completion.outputs] == [(i, "a", "stop") for i in range(3)]


def test_streams_of_one_client_do_not_mix_whatever_the_order_of_reading(path: Path) -> None:
    with FakeScheduler(path, echo_thrice) as server, Client(server.endpoint) as client:
        streams = [client.generate(f"<{i}>") for i in range(20)]
        texts = [stream.result().text for stream in reversed(streams)]
    assert texts == [f"<{i}>" * 3 for i in reversed(range(20))]


def test_a_refused_request_raises_its_code_and_field(path: Path) -> None:
    with FakeScheduler(path, byte_steps(b"a")) as server, Client(server.endpoint) as client:
        server.refusal = Failure(code="context_length_exceeded", message="5000 > 4096", request_id="r0", param="prompt")
        with pytest.raises(RequestError, match="5000 > 4096") as caught:
            client.generate("x").result()
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize(
    ("params", "field"),
    [({"temperature": -1}, "temperature"), ({"top_q": 1}, "top_q"), ({"n": "two"}, "n"), ({"stop": ""}, "stop")],
)
def test_wrong_parameters_are_refused_before_anything_is_sent(
    path: Path, params: dict[str, object], field: str
) -> None:
    with FakeScheduler(path, byte_steps(b"a")) as server, Client(server.endpoint) as client:
        with pytest.raises(RequestError) as caught:
            client.generate("x", **params)  # type: ignore[arg-type]
        client.status()
        assert caught.value.param == field
        assert server.of_kind(Generate) == []


def test_abort_ends_the_stream_with_finish_reason_abort(path: Path) -> None:
    with FakeScheduler(path, byte_steps(b"abc"), hold_after=2) as server, Client(server.endpoint) as client:
        stream = client.generate("x")
        assert next(stream).text == "a"
        stream.abort()
        assert [(d.text, d.finish_reason) for d in stream] == [("b", None), ("", "abort")]


def test_leaving_a_stream_aborts_its_request(path: Path) -> None:
    with FakeScheduler(path, byte_steps(b"abc"), hold_after=2) as server, Client(server.endpoint) as client:
        with client.generate("x") as stream:
            next(stream)
        client.status()
        assert [a.request_id for a in server.of_kind(Abort)] == [stream.request_id]


def test_a_fork_is_a_stream_of_its_own(path: Path) -> None:
    with FakeScheduler(path, byte_steps(b"abc"), hold_after=2) as server, Client(server.endpoint) as client:
        stream = client.generate("x")
        next(stream)
        assert stream.fork(seed=9).result().text == "fork"
        (fork,) = server.of_kind(Fork)
        assert isinstance(fork, Fork)
        assert (fork.request_id, fork.seed) == (stream.request_id, 9)


def test_another_protocol_version_is_refused(path: Path) -> None:
    with FakeScheduler(path, byte_steps(b"a")) as server:
        server.protocol = 99
        with pytest.raises(ProtocolError, match="protocol 1 is not spoken here"):
            Client(server.endpoint)


def test_without_a_server_the_client_says_so_at_once(path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(ServerUnavailableError, match=r"no server answers at ipc://.* \(start one: pagedserve up\)"):
        Client(f"ipc://{path}")
    assert time.monotonic() - started < 0.5


def test_wait_ready_waits_for_the_team(path: Path) -> None:
    with FakeScheduler(path, byte_steps(b"a")) as server, Client(server.endpoint) as client:
        server.ready = False
        with pytest.raises(ServerUnavailableError, match=r"not ready after 0\.3 s"):
            client.wait_ready(0.3)
        server.ready = True
        assert client.wait_ready(1).ready


def test_when_the_server_dies_a_waiting_stream_raises_within_seconds(path: Path) -> None:
    with (
        FakeScheduler(path, byte_steps(b"abc"), hold_after=1) as server,
        Client(server.endpoint, give_up_s=0.5) as client,
    ):
        stream = client.generate("x")
        assert next(stream).text == "a"
        server.close()
        started = time.monotonic()
        with pytest.raises(ServerUnavailableError):
            next(stream)
        assert time.monotonic() - started < 1.5


@pytest.mark.parametrize("held", [0, 1, 4])
def test_a_stream_goes_on_without_a_repeated_or_lost_token_when_the_scheduler_is_restarted(
    path: Path, held: int
) -> None:
    with (
        FakeScheduler(path, byte_steps(HELLO), hold_after=held) as server,
        Client(server.endpoint, give_up_s=0.5) as client,
    ):
        stream = client.generate("x", stop="!")
        deltas = [next(stream) for _ in range(held)]
        server.close()
        with FakeScheduler(path, byte_steps(HELLO, size=3), scheduler_id="two") as second:
            deltas += list(stream)
            assert len(second.of_kind(Generate)) == 1
    assert "".join(delta.text for delta in deltas) == "Grüße, 🙂"
    assert bytes(i for delta in deltas for i in delta.token_ids) == HELLO


def test_an_aborted_request_is_not_computed_again_by_a_restarted_scheduler(path: Path) -> None:
    with (
        FakeScheduler(path, byte_steps(HELLO), hold_after=1) as server,
        Client(server.endpoint, give_up_s=0.5) as client,
    ):
        stream = client.generate("x")
        next(stream)
        server.close()
        stream.abort()
        with FakeScheduler(path, byte_steps(HELLO), scheduler_id="two") as second:
            assert [delta.finish_reason for delta in stream] == ["abort"]
            assert second.of_kind(Generate) == []


def test_a_server_that_ended_in_order_is_known_to_be_gone_at_the_first_silence(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    server = FakeScheduler(folder / "s", byte_steps(b"abc"), hold_after=1)
    with server, Client(server.endpoint, give_up_s=2.5) as client:
        stream = client.generate("x")
        next(stream)
        server.close()
        shutil.rmtree(folder)
        started = time.monotonic()
        with pytest.raises(ServerUnavailableError):
            next(stream)
        assert time.monotonic() - started < 1.0


# ---- the same, asynchronous -------------------------------------------------------------------------------------


def test_the_async_client_runs_many_streams_at_once(path: Path) -> None:
    async def run(endpoint: str) -> list[Completion]:
        async with AsyncClient(endpoint) as client:
            streams = [await client.generate(f"<{i}>") for i in range(40)]
            return list(await asyncio.gather(*(stream.result() for stream in streams)))

    with FakeScheduler(path, echo_thrice) as server:
        completions = asyncio.run(run(server.endpoint))
    assert [completion.text for completion in completions] == [f"<{i}>" * 3 for i in range(40)]


def test_the_async_client_matches_stops_aborts_and_forks(path: Path) -> None:
    async def run(endpoint: str) -> tuple[Completion, list[Delta], Completion]:
        async with AsyncClient(endpoint) as client:
            stopped = await (await client.generate("x", stop="b")).result()
            stream = await client.generate("x")
            first = await anext(stream)
            fork = await stream.fork().result()
            stream.abort()
            return stopped, [first] + [delta async for delta in stream], fork

    with FakeScheduler(path, byte_steps(b"abcd"), hold_after=3) as server:
        stopped, deltas, fork = asyncio.run(run(server.endpoint))
    assert (stopped.text, stopped.outputs[0].finish_reason) == ("a", "stop")
    assert [(d.text, d.finish_reason) for d in deltas] == [("a", None), ("b", None), ("c", None), ("", "abort")]
    assert fork.text == "fork"


def test_async_refusals_and_a_missing_server_raise(path: Path) -> None:
    async def run(server: FakeScheduler) -> None:
        async with AsyncClient(server.endpoint) as client:
            server.refusal = Failure(code="queue_full", message="full", request_id="mine")
            stream = await client.generate("x", request_id="mine")
            with pytest.raises(RequestError, match="full"):
                await stream.result()
            server.protocol = 99
            with pytest.raises(ProtocolError):
                await AsyncClient(server.endpoint).connect()
        with pytest.raises(ServerUnavailableError):
            await AsyncClient(server.endpoint + "x").connect()

    with FakeScheduler(path, byte_steps(b"a")) as server:
        asyncio.run(run(server))


def test_async_streams_go_on_when_the_scheduler_is_restarted_and_raise_when_it_stays_away(path: Path) -> None:
    async def run() -> None:
        server = FakeScheduler(path, byte_steps(HELLO), hold_after=2)
        async with AsyncClient(server.endpoint, give_up_s=0.5) as client:
            streams = [await client.generate("x") for _ in range(3)]
            await anext(streams[0])
            await asyncio.to_thread(server.close)
            second = await asyncio.to_thread(lambda: FakeScheduler(path, byte_steps(HELLO), scheduler_id="two"))
            completions = await asyncio.gather(*(stream.result() for stream in streams))
            assert [completion.text for completion in completions] == ["Grüße, 🙂!"] * 3
            second.close()
            stream = await client.generate("x")
            started = time.monotonic()
            with pytest.raises(ServerUnavailableError):
                await stream.result()
            assert time.monotonic() - started < 1.5

    asyncio.run(run())
