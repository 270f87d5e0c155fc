"""Builders for scheduler tests: requests, results, and a FakeTeam that computes through the block tables.

The fake model is a hash: the "K and V" of a token is a number made from the token and the whole prefix as the pool
holds it, and logits are made from such numbers. A wrong table, a missing copy or a false cache hit changes the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pagedserve.contract.messages import (
    SAMPLE_ROW,
    Generate,
    Int32,
    SequenceTokens,
    StepPlan,
    StepResult,
    pack_ids,
    unpack_ids,
)
from pagedserve.contract.sampling import SamplingParams
from pagedserve.scheduler.limits import Limits
from pagedserve.scheduler.scheduler import Scheduler

Float32 = npt.NDArray[np.float32]
UInt64 = npt.NDArray[np.uint64]
CLIENT = b"client"
UNWRITTEN = np.uint64(0xDEADBEEF)


def small_limits(**changes: Any) -> Limits:
    """Limits of a small instance: 64 blocks of 4 tokens, 32 tokens and 8 sequences a step, 32 token ids."""
    values: dict[str, Any] = {
        "block_size": 4,
        "num_blocks": 64,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 8,
        "max_model_len": 200,
        "max_waiting": 100,
        "vocab_size": 32,
        "eos_token_ids": (),
    }
    return Limits(**{**values, **changes})


def generate(
    request_id: str, prompt: Sequence[int], *, priority: int = 0, cache_salt: str = "", **sampling: Any
) -> Generate:
    """A request; greedy and 8 tokens long unless told otherwise."""
    return Generate(
        request_id=request_id,
        prompt_token_ids=pack_ids(prompt),
        sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **sampling}),
        priority=priority,
        cache_salt=cache_salt,
    )


def prompt_of(length: int, seed: int = 0, vocab_size: int = 32) -> list[int]:
    """A random prompt."""
    prompt: list[int] = np.random.default_rng(seed).integers(0, vocab_size, length).tolist()
    return prompt


# ---- the fake model -------------------------------------------------------------------------------------------------


def _mix(values: UInt64 | np.uint64) -> Any:
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def _key(seen: UInt64, token_id: int, position: int) -> np.uint64:
    """The "K and V" of a token after the keys `seen` (all of them, or those inside the window)."""
    with np.errstate(over="ignore"):
        weights = 2 * np.arange(position - len(seen), position, dtype=np.uint64) + np.uint64(1)
        total = np.sum(seen * weights, dtype=np.uint64)
        mixed: np.uint64 = _mix(total + np.uint64(token_id + 1) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(position))
        return mixed


@dataclass(frozen=True)
class FakeModel:
    """Logits from keys. `memory`: how many of the last tokens the logits see (0: all); small ones make loops."""

    vocab_size: int = 32
    sliding_window: int = 0
    memory: int = 0

    def logits(self, keys: UInt64, token_ids: Sequence[int]) -> Float32:
        """Of the token after those whose keys are given (with a window: only the last ones matter)."""
        if self.memory:
            state = np.uint64(hash(tuple(token_ids[-self.memory :])) & (2**64 - 1))
        else:
            state = keys[-1]
        with np.errstate(over="ignore"):
            bits = _mix(state + np.arange(1, self.vocab_size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        logits: Float32 = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-21)  # 0 to 8
        return logits


def log_softmax(logits: Float32) -> Float32:
    """Float32 log-probabilities, computed in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    logprobs: Float32 = (wide - np.log(np.exp(wide).sum())).astype(np.float32)
    return logprobs


def sample(row: Any, logits: Float32, history: Int32, bias: list[tuple[int, float]]) -> int:
    """One token as the contract of SamplingParams says (top_p and min_p left out), from one row's fields."""
    logits = logits.astype(np.float64)
    for token_id in set(history.tolist()):
        value = logits[token_id]
        logits[token_id] = value / row["repetition_penalty"] if value > 0 else value * row["repetition_penalty"]
    for token_id in history[row["history_prompt"] :].tolist():
        logits[token_id] -= row["frequency_penalty"]
    for token_id in set(history[row["history_prompt"] :].tolist()):
        logits[token_id] -= row["presence_penalty"]
    for token_id, value in bias:
        logits[token_id] += value
    if row["temperature"] == 0.0:
        return int(np.argmax(logits))
    uniform = float(_mix(np.uint64(row["seed"]) ^ _mix(np.uint64(row["position"] + 1))) >> np.uint64(11)) / 2**53
    weights = np.exp((logits - logits.max()) / row["temperature"])
    return int(np.searchsorted(np.cumsum(weights) / weights.sum(), uniform, side="right"))


class FakeTeam:
    """Runs StepPlans on a pool of keys, exactly as workers must: copies first, then in each round all writes, then the
    rows."""

    def __init__(self, limits: Limits, model: FakeModel | None = None) -> None:
        self.limits = limits
        self.model = model or FakeModel(limits.vocab_size, limits.sliding_window)
        self.keys = np.full((limits.num_blocks, limits.block_size), UNWRITTEN, dtype=np.uint64)
        self.token_ids = np.full((limits.num_blocks, limits.block_size), -1, dtype=np.int64)
        self.sampled = [np.empty(0, dtype=np.int32)] * 3  # of a step, the one before and the one after it
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.num_copies = 0

    def run(self, plan: StepPlan) -> StepResult:
        """The result of a plan; running it twice gives the same."""
        self._copy(unpack_ids(plan.copies).reshape(-1, 2))
        token_ids, history = self._known(plan, plan.token_ids), self._known(plan, plan.history)
        computed = unpack_ids(plan.num_computed_tokens)
        rows = np.frombuffer(plan.rows, dtype=SAMPLE_ROW).copy()
        assert len(token_ids) <= self.limits.max_num_batched_tokens
        assert len(computed) <= self.limits.max_num_seqs
        assert len(rows) * plan.num_rounds <= self.limits.max_num_rows
        result = self._round(plan, token_ids, computed, rows, history)
        sampled = [unpack_ids(result.sampled_token_ids)]
        for _ in range(1, plan.num_rounds):
            assert len(computed) == len(rows) == len(token_ids) and rows["token_index"].tolist() == [*range(len(rows))]
            assert (rows["target"] < 0).all() and (rows["num_logprobs"] < 0).all()
            for row, token_id in zip(rows, sampled[-1], strict=True):
                if (row["repetition_penalty"], row["presence_penalty"], row["frequency_penalty"]) != (1.0, 0.0, 0.0):
                    assert history[row["history_end"]] == 0, "no room was left"
                    history[row["history_end"]] = token_id
                    row["history_end"] += 1
            computed = computed + 1
            rows["position"] += 1
            result = self._round(plan, sampled[-1], computed, rows, history)
            sampled.append(unpack_ids(result.sampled_token_ids))
        self.sampled[plan.step_id % 3] = np.concatenate(sampled)
        return msgspec.structs.replace(result, sampled_token_ids=pack_ids(np.concatenate(sampled)))

    def _round(self, plan: StepPlan, token_ids: Int32, computed: Int32, rows: Any, history: Int32) -> StepResult:
        starts = unpack_ids(plan.query_start_loc)
        tables = np.split(unpack_ids(plan.block_tables), unpack_ids(plan.block_table_start)[1:-1])
        assert starts[-1] == len(token_ids)
        self._check_writes(tables, computed, starts)
        place: list[tuple[Int32, int]] = []  # of each token: its table and position
        for table, first, begin, end in zip(tables, computed, starts[:-1], starts[1:], strict=True):
            for offset, token_id in enumerate(token_ids[begin:end].tolist()):
                self._write(table, int(first) + offset, token_id)
                place.append((table, int(first) + offset))
        self.num_steps += 1
        self.num_computed_tokens += len(token_ids)
        return self._rows(plan, place, rows, history)

    def _known(self, plan: StepPlan, column: bytes) -> Int32:
        before = self.sampled[(plan.step_id - 1) % 3].tolist()
        return np.array([before[-1 - i] if i < 0 else i for i in unpack_ids(column).tolist()], dtype=np.int32)

    def _copy(self, copies: Int32) -> None:
        assert not set(copies[:, 0].tolist()) & set(copies[:, 1].tolist()), "the order of copies would matter"
        self.num_copies += len(copies)
        for source, destination in copies.tolist():
            self.keys[destination] = self.keys[source]
            self.token_ids[destination] = self.token_ids[source]

    def _check_writes(self, tables: list[Int32], computed: Int32, starts: Int32) -> None:
        written: set[tuple[int, int]] = set()
        for table, first, num_tokens in zip(tables, computed.tolist(), np.diff(starts).tolist(), strict=True):
            for position in range(first, first + num_tokens):
                slot = (int(table[position // self.limits.block_size]), position % self.limits.block_size)
                assert slot not in written, f"two sequences write to slot {slot}"
                written.add(slot)

    def _seen(self, table: Int32, query: int, end: int) -> tuple[UInt64, list[int]]:
        """Keys and token ids of the positions before `end` that a query at position `query` sees, through the table."""
        window = self.model.sliding_window
        positions = np.arange(max(0, query - window + 1) if window else 0, end)
        blocks = table[positions // self.limits.block_size]
        assert (blocks >= 0).all(), "a block inside the window has been given back"
        offsets = positions % self.limits.block_size
        return self.keys[blocks, offsets], self.token_ids[blocks, offsets].tolist()

    def _write(self, table: Int32, position: int, token_id: int) -> None:
        seen, _ = self._seen(table, position, position)
        block_id, offset = table[position // self.limits.block_size], position % self.limits.block_size
        self.keys[block_id, offset] = _key(seen, token_id, position)
        self.token_ids[block_id, offset] = token_id

    def _rows(self, plan: StepPlan, place: list[tuple[Int32, int]], rows: Any, history: Int32) -> StepResult:
        bias_token_ids = unpack_ids(plan.bias_token_ids).tolist()
        bias_values = np.frombuffer(plan.bias_values, dtype="<f4").tolist()
        sampled, chosen, ranks, top_ids, top_values = [], [], [], [], []
        for row in rows:
            table, position = place[row["token_index"]]
            assert position + 1 == row["position"]
            logits = self.model.logits(*self._seen(table, position, position + 1))
            bias = list(zip(bias_token_ids, bias_values, strict=True))[row["bias_start"] : row["bias_end"]]
            token_id = int(row["target"])
            if token_id < 0:
                token_id = sample(row, logits, history[row["history_start"] : row["history_end"]], bias)
            logprobs = log_softmax(logits)
            sampled.append(token_id)
            chosen.append(logprobs[token_id])
            ranks.append(1 + int((logprobs > logprobs[token_id]).sum()) if row["num_logprobs"] >= 0 else 0)
            best = np.argsort(-logprobs, kind="stable")[: max(0, row["num_logprobs"])]
            top_ids.append(best)
            top_values.append(logprobs[best])
        return StepResult(
            step_id=plan.step_id,
            worker_id=0,
            ok=True,
            sampled_token_ids=pack_ids(sampled),
            logprobs=np.array(chosen, dtype="<f4").tobytes(),
            ranks=pack_ids(ranks),
            top_token_ids=pack_ids(np.concatenate(top_ids)) if top_ids else b"",
            top_logprobs=np.concatenate(top_values).astype("<f4").tobytes() if top_values else b"",
        )


# ---- running --------------------------------------------------------------------------------------------------------


class Engine:
    """A Scheduler with a FakeTeam and what its clients have received; `check()` runs after every event."""

    def __init__(self, limits: Limits | None = None, model: FakeModel | None = None) -> None:
        self.limits = limits or small_limits()
        self.scheduler = Scheduler(self.limits)
        self.team = FakeTeam(self.limits, model)
        self.records: dict[str, list[SequenceTokens]] = {}
        self.now = 0.0

    def add(self, message: Generate) -> None:
        """Add a request of CLIENT."""
        self.scheduler.add(CLIENT, message, self.now)
        self.scheduler.check()

    def step(self, max_rounds: int = 1) -> StepPlan | None:
        """Plan, run and apply one step; its plan."""
        self.now += 1.0
        plan = self.scheduler.plan(self.now, max_rounds)
        self.scheduler.check()
        if plan is not None:
            self.receive(self.scheduler.apply(self.team.run(plan)))
        return plan

    def receive(self, records: list[tuple[bytes, SequenceTokens]]) -> None:
        """Keep records as clients would."""
        self.scheduler.check()
        for _, record in records:
            self.records.setdefault(record.request_id, []).append(record)

    def run(self, *messages: Generate, max_steps: int = 10_000) -> None:
        """Add requests and step until nothing is left to do."""
        for message in messages:
            self.add(message)
        for _ in range(max_steps):
            if self.step() is None:
                break
        state = self.scheduler.snapshot()
        assert (state["num_running"], state["num_waiting"]) == (0, 0), "something waits in silence"

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        """All tokens that a client has got of one output."""
        return [
            token_id
            for record in self.records[request_id]
            if record.index == index
            for token_id in unpack_ids(record.token_ids).tolist()
        ]

    def last(self, request_id: str) -> SequenceTokens:
        """The last record of a request."""
        return self.records[request_id][-1]


def alone(message: Generate, limits: Limits, model: FakeModel | None = None, index: int = 0) -> list[int]:
    """The tokens of a request that has a big, fresh scheduler without a cache to itself."""
    engine = Engine(
        Limits(
            block_size=16,
            num_blocks=4096,
            max_num_batched_tokens=2048,
            max_num_seqs=64,
            max_model_len=limits.max_model_len,
            max_waiting=8,
            vocab_size=limits.vocab_size,
            eos_token_ids=limits.eos_token_ids,
            enable_prefix_caching=False,
        ),
        model or FakeModel(limits.vocab_size, limits.sliding_window),
    )
    engine.run(message)
    return engine.tokens(message.request_id, index)


def continuation(
    known: Sequence[int], num_prompt_tokens: int, sampling: SamplingParams, seed: int, limits: Limits, model: FakeModel
) -> list[int]:
    """The tokens that must follow `known` (prompt and output so far), by the model alone: no blocks, no batches.

    For temperature, penalties, logit_bias, max_tokens, min_tokens and stop tokens; without max_tokens: to the context.
    """
    token_ids = list(known)
    keys = np.empty(limits.max_model_len, dtype=np.uint64)
    window = model.sliding_window
    stop_token_ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else limits.eos_token_ids)}
    end = limits.max_model_len if sampling.max_tokens is None else num_prompt_tokens + sampling.max_tokens
    row = {name: getattr(sampling, name) for name in ("temperature", "repetition_penalty", "presence_penalty")}
    row |= {"frequency_penalty": sampling.frequency_penalty, "history_prompt": num_prompt_tokens, "seed": seed}
    num_keys = 0
    while len(token_ids) < end:
        for position in range(num_keys, len(token_ids)):
            seen = keys[max(0, position - window + 1) if window else 0 : position]
            keys[position] = _key(seen, token_ids[position], position)
        num_keys = len(token_ids)
        bias = [*sampling.logit_bias.items()]
        if num_keys - num_prompt_tokens < sampling.min_tokens:
            bias += [(token_id, -np.inf) for token_id in stop_token_ids]
        logits = model.logits(keys[max(0, num_keys - window) if window else 0 : num_keys], token_ids)
        history = np.array(token_ids, dtype=np.int32)
        token_ids.append(sample({**row, "position": num_keys}, logits, history, bias))
        if token_ids[-1] in stop_token_ids and len(token_ids) - num_prompt_tokens > sampling.min_tokens:
            break
    return token_ids[len(known) :]


def next_logprobs(token_ids: Sequence[int], model: FakeModel) -> Float32:
    """Raw log-probabilities [vocab_size] of the token after `token_ids`, by the model alone (no window)."""
    keys = np.empty(len(token_ids), dtype=np.uint64)
    for position, token_id in enumerate(token_ids):
        keys[position] = _key(keys[:position], token_id, position)
    return log_softmax(model.logits(keys, token_ids))
