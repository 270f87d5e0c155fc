"""Every message of the wire protocol: frozen records, packed with msgpack, validated where they arrive.

A body is one msgpack map with a key `type`. Integer columns travel as little-endian int32 bytes (`Ids`). PROTOCOL is
sent in the first message of each connection (Hello, Join); another version is refused.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar, get_args

import msgpack
import msgspec
import numpy as np
import numpy.typing as npt

from pagedserve.contract.errors import ProtocolError
from pagedserve.contract.sampling import SamplingParams

PROTOCOL = 1

Ids = bytes  # little-endian int32 column
Int32 = npt.NDArray[np.int32]


def pack_ids(values: Sequence[int] | Int32) -> Ids:
    """A column of int32 as little-endian bytes."""
    if isinstance(values, np.ndarray):
        return values.astype("<i4", copy=False).tobytes()
    return array("i", values).tobytes()  # quicker for few numbers; little-endian on every CPU that we run on


def unpack_ids(column: Ids) -> Int32:
    """The int32 array of a column; ProtocolError when its length is no multiple of four."""
    if len(column) % 4:
        raise ProtocolError(f"an int32 column must be a multiple of 4 bytes long, got {len(column)}")
    return np.frombuffer(column, dtype="<i4")


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all messages; the tag is the class name."""


# ---- client -> scheduler ----------------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag=True):
    """First message of a client. Answer: Welcome or Failure."""

    protocol: int
    client: str = ""


class Generate(Message, frozen=True, tag=True):
    """Add one request. request_id is the client's own, unique among its live requests. Answers: Tokens… or Failure."""

    request_id: str
    prompt_token_ids: Ids
    sampling: SamplingParams = SamplingParams()
    priority: int = 0  # lower runs first, as in vLLM
    cache_salt: str = ""


class Abort(Message, frozen=True, tag=True):
    """End one request (all its sequences). Answered by its last Tokens; unknown ids are ignored."""

    request_id: str
    finish_reason: str = "abort"  # "stop" when the client matched a stop string


class Fork(Message, frozen=True, tag=True):
    """Copy a running request, sharing all its blocks; the copy goes on under `new_request_id` with its own seed."""

    request_id: str
    new_request_id: str
    seed: int | None = None


class GetStatus(Message, frozen=True, tag=True):
    """Ask for Status. `blocks` asks for the state of every block as well."""

    blocks: bool = False


ClientMessage = Hello | Generate | Abort | Fork | GetStatus


# ---- scheduler -> client ----------------------------------------------------------------------------------------


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a client must know of the model. `path` is the file or folder to read the tokenizer from."""

    name: str
    path: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()


class Welcome(Message, frozen=True, tag=True):
    """Answer to Hello, sent at once: `ready` is False while the team still loads (Generate is queued until then).

    `scheduler_id` differs from one scheduler process to the next: a client that sees it change has lost its requests.
    """

    protocol: int
    instance: str
    model: ModelInfo
    block_size: int
    num_blocks: int
    max_num_seqs: int
    ready: bool
    scheduler_id: str = ""


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Logprobs of one position, from raw logits: the chosen token's, its rank (1 = most likely), the top k by value."""

    logprob: float
    rank: int
    top_token_ids: Ids = b""
    top_logprobs: bytes = b""  # little-endian float32


class SequenceTokens(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one sequence of one request. `index` is 0..n-1; beam search and best_of send a sequence at its end.

    The first record of a request carries num_cached_tokens and prompt_logprobs (its first entry is None: nothing
    precedes token 0). finish_reason is set in the last record of each sequence; `finished` in the last of the request.
    num_draft_tokens and num_accepted_tokens are this record's own: the sum over all is the request's.
    """

    request_id: str
    index: int = 0
    token_ids: Ids = b""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: str | None = None  # stop, length, abort, error
    stop_token_id: int | None = None
    cumulative_logprob: float | None = None
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    queue_time_s: float = 0.0
    finished: bool = False
    error: str | None = None


class Tokens(Message, frozen=True, tag=True):
    """All new tokens of one client's requests in one step."""

    outputs: tuple[SequenceTokens, ...]


class Failure(Message, frozen=True, tag=True):
    """A refused request or message. `request_id` is None when the message named none."""

    code: str
    message: str
    request_id: str | None = None
    param: str | None = None


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as the scheduler sees it. state: loading, ready, busy, lost."""

    worker_id: int
    pid: int
    state: str
    isa: str = ""


class Status(Message, frozen=True, tag=True):
    """The server at one moment. Counters are totals since start; rates are the clients' to derive."""

    instance: str
    model: ModelInfo
    ready: bool
    uptime_s: float
    scheduler_pid: int
    workers: tuple[WorkerStatus, ...]
    num_running: int
    num_waiting: int
    block_size: int
    num_blocks: int
    pool_bytes: int
    weights_bytes: int
    num_free_blocks: int
    num_cached_blocks: int
    num_referenced_blocks: int
    num_steps: int  # forward passes: a plan of several rounds counts each
    num_prompt_tokens: int
    num_generation_tokens: int
    num_cached_tokens: int  # prefix cache hits, tokens
    num_queried_tokens: int  # prefix cache queries, tokens
    num_preemptions: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_finished: dict[str, int]  # by finish_reason
    step_time_s: float = 0.0  # of all steps, as rank 0 measured them
    kernel_time_s: float = 0.0
    num_steps_ahead: int = 0  # of them, those planned while the plan before was computed
    block_states: bytes = b""  # one byte a block: 0 free, 1 cached, 2 private, 3 shared


SchedulerMessage = Welcome | Tokens | Failure | Status


# ---- worker <-> scheduler ---------------------------------------------------------------------------------------


class Join(Message, frozen=True, tag=True):
    """First message of a worker process. Answer: Setup (at once, or when the preparing worker is Ready) or Failure."""

    protocol: int
    worker_id: int  # -1: any
    pid: int


class Setup(Message, frozen=True, tag=True):
    """What a worker needs to map the segments. `prepare`: this one packs the weights and makes the arena, for all."""

    worker_id: int  # as asked for in Join, or the next free one where that was -1
    tag: str  # of the segments' names
    prepare: bool
    model_path: str
    compute: str  # auto, f32
    quantize: str  # none, q8_0, q4_0: of float matrices
    block_size: int
    num_blocks: int
    pool_dtype: str  # float16, float32
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    max_team: int


class Ready(Message, frozen=True, tag=True):
    """The worker has mapped everything, its kernels are compiled, it can run a step. Answer: StepPlan or Shutdown."""

    worker_id: int
    isa: str
    weights_bytes: int
    team_bytes: int


class StepPlan(Message, frozen=True, tag=True):
    """One forward pass for the whole team, or several rounds of it. Shapes: N tokens, S sequences, R rows that sample.

    Sequence s owns tokens query_start_loc[s]:query_start_loc[s+1]; its first token has position
    num_computed_tokens[s]; its blocks are block_tables[block_table_start[s]:block_table_start[s+1]], -1 where a
    sliding window has freed the block. `copies` (pairs source, destination) happen before anything is written.
    Sampling columns are described at SAMPLE_ROW; `history` and `bias_*` are ragged, cut by offsets in the rows.
    In token_ids and history a negative id -1 - i is element i of what step step_id - 1 has sampled (of its row r in its
    last round: (num_rounds - 1) * R + r): a plan may be sent before the result of the step before it is known.

    With num_rounds > 1 the pass is run so many times: in each later round every sequence goes one token further, with
    the token that the round before sampled for it. Each sequence has one token and one row then (N == S == R), row i is
    of token i, without a target or logprobs; block_tables reach to the last round's position, copies happen before the
    first, and behind the history of a row with penalties there is room for num_rounds - 1 more ids.
    """

    step_id: int
    team: tuple[int, ...]  # worker_ids; a worker's rank is its place in it
    token_ids: Ids  # [N]
    query_start_loc: Ids  # [S+1]
    num_computed_tokens: Ids  # [S]
    block_tables: Ids
    block_table_start: Ids  # [S+1]
    copies: Ids = b""  # [num_copies, 2]
    rows: bytes = b""  # SAMPLE_ROW [R]
    history: Ids = b""  # token ids for the penalties
    bias_token_ids: Ids = b""
    bias_values: bytes = b""  # float32; -inf bans a token
    num_rounds: int = 1


class StepResult(Message, frozen=True, tag=True):
    """A worker's reply to a StepPlan. Only rank 0 carries columns; `ok` False: the abort flag ended the step."""

    step_id: int
    worker_id: int
    ok: bool
    sampled_token_ids: Ids = b""  # [num_rounds, R]
    logprobs: bytes = b""  # float32 [R], of the sampled (or target) token, from raw logits
    ranks: Ids = b""  # [R], 1 = most likely; 0 where no logprobs were asked
    top_token_ids: Ids = b""  # ragged, num_logprobs of each row
    top_logprobs: bytes = b""  # float32, ragged
    step_time_s: float = 0.0  # from the plan's arrival to this reply
    kernel_time_s: float = 0.0  # of it, inside the forward pass


class Shutdown(Message, frozen=True, tag=True):
    """Ask a worker to end (instead of a plan)."""


WorkerMessage = Join | Ready | StepResult
TeamMessage = Setup | StepPlan | Shutdown | Failure

SAMPLE_ROW = np.dtype(
    [
        ("token_index", "<i4"),  # which of the N tokens' logits
        ("target", "<i4"),  # -1: sample; else report this token's logprob and return it (prompt logprobs)
        ("num_logprobs", "<i4"),  # -1: none; k: the chosen token's logprob and rank, and the top k
        ("top_k", "<i4"),  # 0: off
        ("seed", "<u8"),
        ("position", "<i4"),  # position of the token being sampled: with the seed, all the randomness there is
        ("temperature", "<f4"),
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("repetition_penalty", "<f4"),
        ("presence_penalty", "<f4"),
        ("frequency_penalty", "<f4"),
        ("history_start", "<i4"),  # history[start:end]; the first `history_prompt` of them are the prompt's
        ("history_end", "<i4"),
        ("history_prompt", "<i4"),
        ("bias_start", "<i4"),
        ("bias_end", "<i4"),
    ]
)

pack_sample_row = struct.Struct("<4iQi6f5i").pack  # the fields of one SAMPLE_ROW, in its order

M = TypeVar("M")


def encode(message: Message) -> bytes:
    """The msgpack body of a message."""
    body: bytes = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)))
    return body


def decode(body: bytes, kind: Any) -> Any:
    """The message of a body, one of the union `kind`; ProtocolError says which field is wrong."""
    try:
        fields = msgpack.unpackb(body, strict_map_key=False)
        tag = fields.get("type") if isinstance(fields, dict) else None
        one = _by_tag(kind).get(tag, kind) if isinstance(tag, str) else kind  # quicker than to let msgspec choose
        return msgspec.convert(fields, one, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise ProtocolError(f"malformed message: {error}") from None
    except Exception as error:  # msgpack raises many kinds; none of them is more than "not msgpack"
        raise ProtocolError(f"not a msgpack message: {error}") from None


@lru_cache
def _by_tag(kind: Any) -> dict[str, Any]:
    return {member.__name__: member for member in get_args(kind) or (kind,)}
