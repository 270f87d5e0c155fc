"""Rules of the contract: messages, columns, sampling parameters, control words, instances."""

from __future__ import annotations

import os
from pathlib import Path

import msgpack
import numpy as np
import pytest

from pagedserve.contract import control, instance, segments
from pagedserve.contract.errors import ConfigError, EndpointInUseError, ProtocolError, RequestError, SegmentError
from pagedserve.contract.instance import Instance
from pagedserve.contract.messages import ClientMessage, Generate, Hello, decode, encode, pack_ids, unpack_ids
from pagedserve.contract.sampling import SamplingParams, sampling_params


@pytest.fixture(autouse=True)
def own_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_a_message_comes_back_as_it_was() -> None:
    sampling = SamplingParams(temperature=0.5, logit_bias={5: -1.0}, stop_token_ids=(2,))
    message = Generate(request_id="a", prompt_token_ids=pack_ids([1, 2, -3]), sampling=sampling)
    assert decode(encode(message), ClientMessage) == message


def test_columns_are_little_endian_int32() -> None:
    assert pack_ids([1, 256]) == b"\x01\x00\x00\x00\x00\x01\x00\x00"
    assert unpack_ids(b"\xff\xff\xff\xff").tolist() == [-1]


def test_a_column_of_odd_length_is_refused() -> None:
    with pytest.raises(ProtocolError, match="multiple of 4 bytes long, got 3"):
        unpack_ids(b"abc")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"\xc1 not msgpack", "not a msgpack message"),
        (msgpack.packb([1, 2]), "malformed message"),
        (msgpack.packb({"type": "Bogus"}), "Invalid value 'Bogus'"),
        (msgpack.packb({"type": "Hello"}), "missing required field `protocol`"),
        (msgpack.packb({"type": "Hello", "protocol": "one"}), r"Expected `int`, got `str` - at `\$.protocol`"),
    ],
)
def test_a_message_that_cannot_be_read_is_refused_with_the_reason(body: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        decode(body, ClientMessage)


def test_unknown_keys_of_a_newer_peer_are_ignored() -> None:
    assert decode(msgpack.packb({"type": "Hello", "protocol": 1, "new": 2}), ClientMessage) == Hello(protocol=1)


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"logit_bias": {1: 101.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1, "min_tokens": 2}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"beam_width": 2}, "temperature"),
        ({"logprobs": 65}, "logprobs"),
        ({"seed": 2**64}, "seed"),
        ({"temprature": 1.0}, "temprature"),
        ({"top_k": "many"}, "top_k"),
    ],
)
def test_a_sampling_value_out_of_range_is_refused_with_its_name(values: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError, match=param) as caught:
        sampling_params(values)
    assert caught.value.param == param


def test_reset_readies_all_control_words_but_the_generation() -> None:
    words = np.full(control.CONTROL_BYTES // 4, 7, dtype=np.int32)
    hand = control.Control(words.view(np.uint8))
    hand.abort()
    assert words[control.ABORT] == 1
    hand.reset()
    counters = [words[control.COUNTERS + 16 * i] for i in range(control.NUM_COUNTERS)]
    assert [words[control.ABORT], words[control.ARRIVED], words[control.SLEEPERS], *counters] == [0] * 11
    assert words[control.GENERATION] == 7


def test_a_second_owner_is_refused_and_told_the_endpoint() -> None:
    one = Instance("one")
    lock = instance.own(one)
    with pytest.raises(EndpointInUseError, match=one.client_endpoint):
        instance.own(one)
    lock.release()
    assert not one.run_dir.exists()
    instance.own(one).release()


def test_segments_of_a_dead_owner_are_reaped_and_those_of_a_live_one_are_not() -> None:
    living, dead = Instance("living"), Instance("dead")
    lock = instance.own(living)
    segments.create(segments.segment_name(living.tag, "kv"), 100)
    child = os.fork()
    if child == 0:
        instance.own(dead)
        segments.create(segments.segment_name(dead.tag, "kv"), 100)
        os._exit(0)  # like kill -9: nothing is cleaned up
    os.waitpid(child, 0)
    assert segments.exists(segments.segment_name(dead.tag, "kv"))
    assert instance.reap_dead_instances() == ["dead"]
    assert not segments.exists(segments.segment_name(dead.tag, "kv"))
    assert segments.exists(segments.segment_name(living.tag, "kv"))
    lock.release()
    assert not segments.exists(segments.segment_name(living.tag, "kv"))


def test_the_same_instance_name_in_two_run_folders_does_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Instance("same").tag
    (tmp_path / "other").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "other"))
    assert Instance("same").tag != first


@pytest.mark.parametrize("name", ["", "a/b", "-x", "a" * 42, "ü"])
def test_an_instance_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="instance: expected letters"):
        Instance(name)


def test_too_little_shared_memory_is_refused_with_needed_and_free_bytes() -> None:
    with pytest.raises(SegmentError, match=r"needed 1,000,000,000,000,000 bytes, free [\d,]+ bytes"):
        segments.create("pagedserve-test-huge", 10**15)
    assert not segments.exists("pagedserve-test-huge")


def test_a_segment_is_private_zeroed_and_gone_after_unlink() -> None:
    made = segments.create("pagedserve-test-small", 5000)
    assert (Path("/dev/shm/pagedserve-test-small").stat().st_mode & 0o777) == 0o600
    assert bytes(made.buf[:5000]) == bytes(5000)
    attached = segments.attach("pagedserve-test-small")
    made.buf[7] = 9
    assert attached.buf[7] == 9
    segments.unlink("pagedserve-test-small")
    with pytest.raises(SegmentError, match="no shared segment"):
        segments.attach("pagedserve-test-small")
