"""The wire protocol with nothing but pyzmq and msgpack, as a client in another language would speak it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import zmq

from tests.server import RunFolder, Running

Shared = tuple[RunFolder, Running]


class Bare:
    """A DEALER socket that sends and receives msgpack maps."""

    def __init__(self, endpoint: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 20_000)
        self.socket.connect(endpoint)

    def ask(self, **message: Any) -> dict[str, Any]:
        self.socket.send(msgpack.packb(message))
        return self.receive()

    def receive(self) -> dict[str, Any]:
        answer: dict[str, Any] = msgpack.unpackb(self.socket.recv())
        return answer


@pytest.fixture
def bare(shared: Shared) -> Iterator[Bare]:
    client = Bare(shared[0].endpoint())
    yield client
    client.socket.close()


def ids(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def test_hello_generate_and_tokens(bare: Bare) -> None:
    welcome = bare.ask(type="Hello", protocol=1)
    assert welcome["type"] == "Welcome" and welcome["model"]["name"] == "demo" and welcome["block_size"] == 16
    sampling = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
    bare.socket.send(
        msgpack.packb({"type": "Generate", "request_id": "a", "prompt_token_ids": ids(72, 105), "sampling": sampling})
    )
    tokens: list[int] = []
    while True:
        message = bare.receive()
        assert message["type"] == "Tokens"
        for record in message["outputs"]:
            assert record["request_id"] == "a"
            tokens += struct.unpack(f"<{len(record.get('token_ids', b'')) // 4}i", record.get("token_ids", b""))
            if record.get("finished"):
                assert record["finish_reason"] == "length"
                assert len(tokens) == 5
                return


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"GET / HTTP/1.1\r\n\r\n",
        msgpack.packb([1, 2, 3]),
        msgpack.packb({"type": "Generate"}),
        msgpack.packb({"type": "StepPlan", "step_id": 1}),
        msgpack.packb({"type": "Generate", "request_id": "x", "prompt_token_ids": b"abc"}),
        b"\x00" * 100_000,
    ],
)
def test_a_foreign_message_is_answered_or_dropped_and_the_server_goes_on(bare: Bare, body: bytes) -> None:
    bare.ask(type="Hello", protocol=1)
    bare.socket.send(body)
    assert bare.ask(type="GetStatus")["type"] in ("Failure", "Status")
    other = Bare(bare.socket.LAST_ENDPOINT.decode().rstrip("\0"))
    assert other.ask(type="Hello", protocol=1)["type"] == "Welcome"
    assert other.ask(type="GetStatus")["ready"] is True
    other.socket.close()


def test_messages_of_three_frames_are_dropped(bare: Bare) -> None:
    bare.ask(type="Hello", protocol=1)
    bare.socket.send_multipart([b"one", b"two"])
    assert bare.ask(type="GetStatus")["type"] == "Status"


def test_another_protocol_version_is_refused(bare: Bare) -> None:
    answer = bare.ask(type="Hello", protocol=99)
    assert answer["type"] == "Failure" and answer["param"] == "protocol"
    assert answer["message"] == "protocol 99 is not spoken here, expected 1"


def test_a_request_before_hello_is_refused(bare: Bare) -> None:
    answer = bare.ask(type="Generate", request_id="a", prompt_token_ids=ids(1))
    assert answer["type"] == "Failure" and answer["request_id"] == "a"


@pytest.mark.parametrize(
    ("sampling", "param"),
    [({"temperature": -1.0}, "temperature"), ({"top_p": 2.0}, "top_p"), ({"n": 0}, "n")],
)
def test_a_sampling_value_out_of_range_is_refused_by_name(bare: Bare, sampling: dict[str, Any], param: str) -> None:
    bare.ask(type="Hello", protocol=1)
    answer = bare.ask(type="Generate", request_id="a", prompt_token_ids=ids(1), sampling=sampling)
    assert (answer["type"], answer["request_id"], answer["param"]) == ("Failure", "a", param)


def test_what_can_never_fit_is_refused_with_both_numbers(bare: Bare) -> None:
    bare.ask(type="Hello", protocol=1)
    answer = bare.ask(type="Generate", request_id="a", prompt_token_ids=ids(*[65] * 4090), sampling={"max_tokens": 100})
    assert answer["type"] == "Failure" and answer["code"] in ("context_length_exceeded", "pool_exceeded")
    assert "4190" in answer["message"].replace(",", "") and "4096" in answer["message"].replace(",", "")
