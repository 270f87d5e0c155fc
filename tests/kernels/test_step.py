"""Rules of the border between a plan and the kernels: what a plan says is checked before an address follows from it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from pagedserve.contract.errors import ProtocolError
from pagedserve.contract.messages import SAMPLE_ROW, StepPlan, pack_ids, pack_sample_row, unpack_ids
from pagedserve.contract.sampling import MAX_LOGPROBS, sampling_params
from tests.engine import Engine
from workers.kernels import step

VALUES = (3, -1, 2, 7, 2**63 + 1, 9, 0.5, 0.75, 0.25, 1.5, -0.5, 2.0, 4, 6, 1, 0, 2)


def test_a_packed_row_has_the_fields_of_sample_row_in_their_order() -> None:
    [row] = np.frombuffer(pack_sample_row(*VALUES), dtype=SAMPLE_ROW)
    assert row.tolist() == VALUES


def test_each_row_has_room_for_as_many_logprobs_as_may_be_asked_for() -> None:
    assert step.MAX_LOGPROBS == MAX_LOGPROBS


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine("demo", num_blocks=16, max_num_batched_tokens=32, max_num_seqs=4, max_model_len=64)


@pytest.fixture(scope="module")
def plan(engine: Engine) -> StepPlan:
    """Two sequences of 5 and 20 tokens, with history and a bias."""
    for name, length in (("a", 5), ("b", 20)):
        params = sampling_params({"max_tokens": 4, "repetition_penalty": 1.5, "logit_bias": {3: 1.0}, "logprobs": 2})
        engine.add(name, list(range(length)), params)
    plan = engine.scheduler.plan(0.0)
    assert plan is not None and len(unpack_ids(plan.num_computed_tokens)) == 2
    engine.compute(plan)
    return plan


def ids(column: str, index: int, value: int) -> Callable[[StepPlan], StepPlan]:
    """Another number at one place of a column."""

    def change(plan: StepPlan) -> StepPlan:
        numbers = unpack_ids(getattr(plan, column)).copy()
        numbers[index] = value
        return msgspec.structs.replace(plan, **{column: pack_ids(numbers)})

    return change


def row(name: str, value: int) -> Callable[[StepPlan], StepPlan]:
    """Another number in the second row that samples."""

    def change(plan: StepPlan) -> StepPlan:
        rows = np.frombuffer(plan.rows, dtype=SAMPLE_ROW).copy()
        rows[name][1] = value
        return msgspec.structs.replace(plan, rows=rows.tobytes())

    return change


def with_a_block_that_is_only_read(plan: StepPlan) -> StepPlan:
    """16 tokens of the first sequence, and 9 of the second behind a computed block."""
    return ids("query_start_loc", 1, 16)(ids("num_computed_tokens", 1, 16)(plan))


def cut(column: str, num_bytes: int) -> Callable[[StepPlan], StepPlan]:
    """A column without its end."""
    return lambda plan: msgspec.structs.replace(plan, **{column: getattr(plan, column)[:-num_bytes]})


@pytest.mark.parametrize(
    ("change", "column"),
    [
        (ids("token_ids", 3, 1_000_000), "token_ids"),
        (ids("token_ids", 3, -33), "token_ids"),
        (lambda plan: msgspec.structs.replace(plan, token_ids=b""), "token_ids"),
        (lambda plan: msgspec.structs.replace(plan, token_ids=pack_ids(range(33))), "token_ids"),
        (cut("token_ids", 2), "token_ids"),
        (ids("num_computed_tokens", 1, 45), "num_computed_tokens"),
        (ids("num_computed_tokens", 0, -1), "num_computed_tokens"),
        (lambda plan: msgspec.structs.replace(plan, num_computed_tokens=pack_ids([0] * 5)), "num_computed_tokens"),
        (ids("query_start_loc", 0, 1), "query_start_loc"),
        (ids("query_start_loc", 1, 0), "query_start_loc"),
        (ids("query_start_loc", 1, 26), "query_start_loc"),
        (ids("query_start_loc", 2, 24), "query_start_loc"),
        (cut("query_start_loc", 4), "query_start_loc"),
        (ids("block_table_start", 1, 2), "block_table_start"),
        (ids("block_table_start", 1, -1), "block_table_start"),
        (ids("block_table_start", 2, 2), "block_table_start"),
        (cut("block_table_start", 4), "block_table_start"),
        (ids("block_tables", 0, -1), "block_tables"),
        (ids("block_tables", 1, 16), "block_tables"),
        (ids("block_tables", 1, -2), "block_tables"),
        (cut("block_tables", 1), "block_tables"),
        (lambda plan: ids("block_tables", 1, -1)(with_a_block_that_is_only_read(plan)), "block_tables"),
        (lambda plan: msgspec.structs.replace(plan, copies=pack_ids([0, 16])), "copies"),
        (lambda plan: msgspec.structs.replace(plan, copies=pack_ids([1])), "copies"),
        (row("token_index", 25), "rows"),
        (row("token_index", -1), "rows"),
        (row("target", 1_000_000), "rows"),
        (row("num_logprobs", 65), "rows"),
        (row("history_end", 26), "rows"),
        (row("history_start", -1), "rows"),
        (row("history_prompt", 21), "rows"),
        (row("bias_end", 3), "rows"),
        (row("bias_start", 3), "rows"),
        (cut("rows", 1), "rows"),
        (lambda plan: msgspec.structs.replace(plan, rows=plan.rows[:72] * 33), "rows"),
        (ids("history", 2, 1_000_000), "history"),
        (ids("history", 2, -33), "history"),
        (ids("bias_token_ids", 1, -1), "bias_token_ids"),
        (cut("bias_values", 4), "bias_token_ids"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_with_the_column(
    engine: Engine, plan: StepPlan, change: Callable[[StepPlan], StepPlan], column: str
) -> None:
    before = engine.pool_bytes()
    with pytest.raises(ProtocolError, match=f"step 0: {column}: expected"):
        engine.compute(change(plan))
    assert engine.pool_bytes() == before


def test_a_plan_that_only_reads_a_block_fits(engine: Engine, plan: StepPlan) -> None:
    assert engine.compute(with_a_block_that_is_only_read(plan)).ok


def test_a_sampled_id_comes_from_the_step_before(engine: Engine, plan: StepPlan) -> None:
    sampled = unpack_ids(engine.compute(plan).sampled_token_ids).tolist()
    after = msgspec.structs.replace(ids("token_ids", 2, -2)(plan), step_id=plan.step_id + 1)
    known = msgspec.structs.replace(ids("token_ids", 2, sampled[1])(plan), step_id=plan.step_id + 1)
    assert engine.compute(after) == engine.compute(known)
    assert unpack_ids(engine.compute(plan).sampled_token_ids).tolist() == sampled


# ---- rounds ---------------------------------------------------------------------------------------------------------

PROMPTS = ((1, 2, 3), (4, 5), (6, 7, 8, 9, 10))
OPTIONS = ({"repetition_penalty": 1.5, "temperature": 1.0, "seed": 4}, {}, {"presence_penalty": 0.5})


def add_all(engine: Engine) -> None:
    for name, prompt, options in zip("abc", PROMPTS, OPTIONS, strict=True):
        params = sampling_params({"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **options})
        engine.add(name, prompt, params)


@pytest.fixture(scope="module")
def decoding() -> tuple[Engine, StepPlan]:
    """Three sequences that decode, and their plan of four rounds: histories of 4, 0 and 1 ids, each with room for 3."""
    engine = Engine("demo", num_blocks=16, max_num_batched_tokens=13, max_num_seqs=4, max_model_len=64)
    add_all(engine)
    prompts = engine.scheduler.plan(0.0, 4)
    assert prompts is not None and prompts.num_rounds == 1
    engine.scheduler.apply(engine.compute(prompts))
    plan = engine.scheduler.plan(0.0, 4)
    assert plan is not None and plan.num_rounds == 4
    return engine, plan


def with_(**columns: object) -> Callable[[StepPlan], StepPlan]:
    """Other columns altogether."""
    return lambda plan: msgspec.structs.replace(plan, **columns)


def with_a_history_without_room(name: str, penalty: float) -> Callable[[StepPlan], StepPlan]:
    """The second row has one penalty, and its empty history is at the end of the column."""

    def change(plan: StepPlan) -> StepPlan:
        end = len(plan.history) // 4
        return row("history_start", end)(row("history_end", end)(row(name, penalty)(plan)))

    return change


def without_the_last_row(plan: StepPlan) -> StepPlan:
    return msgspec.structs.replace(plan, rows=plan.rows[:-72])


def with_two_tokens_of_the_first_sequence(plan: StepPlan) -> StepPlan:
    """Two sequences of three tokens, and three rows that look right, were there a third sequence behind the second."""
    rows = np.frombuffer(plan.rows, dtype=SAMPLE_ROW).copy()
    behind = unpack_ids(plan.block_tables)[0]
    rows["position"] = [*(1 + unpack_ids(plan.num_computed_tokens)[:2]), 1 + behind]
    return msgspec.structs.replace(
        plan,
        rows=rows.tobytes(),
        query_start_loc=pack_ids([0, 2, 3]),
        num_computed_tokens=plan.num_computed_tokens[:8],
        block_table_start=pack_ids([0, 1, 3]),
    )


@pytest.mark.parametrize(
    ("change", "column"),
    [
        (with_(num_rounds=0), "num_rounds"),
        (with_(num_rounds=-1), "num_rounds"),
        (lambda plan: msgspec.structs.replace(plan, num_rounds=5, history=plan.history + pack_ids([0])), "num_rounds"),
        (with_(num_rounds=2**62), "num_rounds"),
        (with_(num_rounds=2**63 - 1), "num_rounds"),
        (without_the_last_row, "num_rounds"),
        (with_two_tokens_of_the_first_sequence, "num_rounds"),
        (row("token_index", 0), "num_rounds"),
        (row("target", 3), "num_rounds"),
        (row("num_logprobs", 0), "num_rounds"),
        (row("position", 4), "num_rounds"),
        (ids("num_computed_tokens", 1, 3), "num_rounds"),
        (cut("history", 4), "num_rounds"),
        (with_a_history_without_room("repetition_penalty", 1.5), "num_rounds"),
        (with_a_history_without_room("presence_penalty", -0.5), "num_rounds"),
        (with_a_history_without_room("frequency_penalty", 0.5), "num_rounds"),
        (ids("history", 4, -14), "history"),
        (ids("num_computed_tokens", 1, 61), "num_computed_tokens"),
        (ids("num_computed_tokens", 1, 13), "block_table_start"),
        (ids("block_tables", 1, -1), "block_tables"),
    ],
)
def test_a_plan_whose_later_rounds_do_not_fit_is_refused_and_nothing_is_written(
    decoding: tuple[Engine, StepPlan], change: Callable[[StepPlan], StepPlan], column: str
) -> None:
    engine, plan = decoding
    before, sampled = engine.pool_bytes(), engine.arena.sampled(plan.step_id, 13)
    with pytest.raises(ProtocolError, match=f"step {plan.step_id}: {column}: expected"):
        engine.compute(change(plan))
    assert engine.pool_bytes() == before
    assert engine.arena.sampled(plan.step_id, 13) == sampled


def test_a_row_without_penalties_needs_no_room_and_leaves_the_histories_of_others_alone(
    decoding: tuple[Engine, StepPlan],
) -> None:
    engine, plan = decoding
    assert engine.compute(with_a_history_without_room("repetition_penalty", 1.0)(plan)) == engine.compute(plan)


def test_rounds_write_and_sample_what_as_many_steps_do(decoding: tuple[Engine, StepPlan]) -> None:
    engine, plan = decoding
    result, pool = engine.compute(plan), engine.pool_bytes()
    assert engine.compute(plan) == result  # from the first round again
    assert engine.pool_bytes() == pool
    one_by_one = Engine("demo", num_blocks=16, max_num_batched_tokens=13, max_num_seqs=4, max_model_len=64)
    add_all(one_by_one)
    sampled = []
    for _ in range(5):
        step = one_by_one.scheduler.plan(0.0)
        assert step is not None
        answer = one_by_one.compute(step)
        one_by_one.scheduler.apply(answer)
        sampled.append(answer.sampled_token_ids)
    assert result.sampled_token_ids == b"".join(sampled[1:])
    assert one_by_one.pool_bytes() == pool


@pytest.mark.parametrize("token_id", [-1, 1_000_000])
def test_no_round_begins_with_an_id_outside_the_vocabulary(decoding: tuple[Engine, StepPlan], token_id: int) -> None:
    engine, plan = decoding
    engine.compute(plan)
    forward = engine.forward
    last_of_last_round = forward._step[step.SAMPLED] + 8 - engine.arena.control
    engine.arena._segment.memory[last_of_last_round : last_of_last_round + 4].view(np.int32)[0] = token_id
    assert step.MISFITS[step.next_round(forward._step, forward._windows, forward._pool)].startswith("token_ids: ")


def test_blocks_are_copied_before_the_first_round_only() -> None:
    outputs = []
    for max_rounds in (1, 4):
        engine = Engine("demo", num_blocks=16, max_num_seqs=4, max_model_len=64, max_rounds=max_rounds)
        [answers] = engine.generate([range(5)], n=3, temperature=1.0, seed=2, max_tokens=9)  # they share half a block
        outputs.append([answer.token_ids for answer in answers])
        assert (engine.num_later_rounds > 0) == (max_rounds > 1)
    assert outputs[0] == outputs[1]
    assert len({tuple(tokens) for tokens in outputs[0]}) == 3
