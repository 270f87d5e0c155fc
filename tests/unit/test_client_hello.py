"""A connection that outlives its scheduler: requests that meet the next one before it knows us."""

from __future__ import annotations

from pagedserve.client.live import TextOptions
from pagedserve.client.session import Session
from pagedserve.contract.messages import (
    ClientMessage,
    Failure,
    Generate,
    Hello,
    Message,
    SequenceTokens,
    Tokens,
    Welcome,
    decode,
    encode,
    pack_ids,
)
from pagedserve.contract.sampling import SamplingParams
from tests.fake_scheduler import MODEL

OPTIONS = TextOptions(detokenize=False)


def welcome(scheduler_id: str) -> Welcome:
    """The answer of one scheduler."""
    return Welcome(
        protocol=1,
        instance="x",
        model=MODEL,
        block_size=16,
        num_blocks=4,
        max_num_seqs=4,
        ready=True,
        scheduler_id=scheduler_id,
    )


def receive(session: Session, message: Message) -> list[Message]:
    """What the session sends in answer."""
    return [decode(body, ClientMessage) for body in session.receive(encode(message), 0.0).replies]


def connected() -> Session:
    """A session that met scheduler "one"."""
    session = Session()
    receive(session, welcome("one"))
    return session


def stranger(request_id: str) -> Failure:
    """What a scheduler answers to somebody who did not say Hello."""
    return Failure(code="protocol", message="say Hello first", request_id=request_id)


def test_a_request_that_meets_a_restarted_scheduler_says_hello_and_is_sent_again() -> None:
    session = connected()
    request, _ = session.generate([1], SamplingParams(seed=1), OPTIONS, now=0.0)
    (hello,) = receive(session, stranger(request.request_id))
    assert isinstance(hello, Hello)
    assert receive(session, welcome("two")) == [request.message]
    assert not request.finished


def test_it_is_sent_again_too_when_the_same_scheduler_had_forgotten_us() -> None:
    session = connected()
    request, _ = session.generate([1], SamplingParams(seed=1), OPTIONS, now=0.0)
    receive(session, stranger(request.request_id))
    assert receive(session, welcome("one")) == [request.message]
    assert receive(session, welcome("one")) == []


def test_a_request_that_reached_the_new_scheduler_before_its_welcome_is_not_refused_for_being_there_twice() -> None:
    session = connected()
    first, _ = session.generate([1], SamplingParams(seed=1), OPTIONS, now=0.0)
    receive(session, stranger(first.request_id))
    second, _ = session.generate([2], SamplingParams(seed=1), OPTIONS, now=0.0)  # goes out behind the Hello
    again = receive(session, welcome("two"))
    assert [m.request_id for m in again if isinstance(m, Generate)] == [first.request_id, second.request_id]
    twice = Failure(code="invalid_value", message="called so already", request_id=second.request_id, param="request_id")
    assert receive(session, twice) == []
    last = SequenceTokens(request_id=second.request_id, token_ids=pack_ids([7]), finish_reason="length", finished=True)
    receive(session, Tokens(outputs=(last,)))
    assert second.error is None
    assert second.completion().outputs[0].token_ids == (7,)
