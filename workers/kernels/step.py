"""One step as the program reads it: a StepPlan's columns where they lie, checked, and completed by what follows from
them (positions, slots, ids that the step before has sampled, the attention's work items).

A plan comes from another process. Whatever it says, no address outside the pool and the arena follows from it.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from workers.kernels.attention_plan import lowest_visible, plan_attention
from workers.kernels.kv import KvPool
from workers.kernels.sample import (
    BIAS_END,
    BIAS_START,
    FREQUENCY_PENALTY,
    HISTORY_END,
    HISTORY_PROMPT,
    HISTORY_START,
    NUM_LOGPROBS,
    POSITION,
    PRESENCE_PENALTY,
    REPETITION_PENALTY,
    ROW_BYTES,
    TARGET,
)
from workers.kernels.vector import read_f32, read_i32, write_i32

# The step, int64 [STEP_COLUMNS]: first the addresses of a plan's columns, then in the same order their bytes.
COLUMNS = (
    "token_ids",
    "query_start_loc",
    "num_computed_tokens",
    "block_tables",
    "block_table_start",
    "copies",
    "rows",
    "history",
    "bias_token_ids",
    "bias_values",
)
(
    TOKEN_IDS,
    QUERY_START_LOC,
    NUM_COMPUTED_TOKENS,
    BLOCK_TABLES,
    BLOCK_TABLE_START,
    COPIES,
    ROWS,
    HISTORY,
    BIAS_IDS,
    BIAS_VALUES,
) = range(10)
LENGTHS = 10
# Addresses of int32 [MAX_TOKENS] each: two that are filled here, where sampled ids go, what the step before sampled.
POSITIONS, SLOTS, SAMPLED, SAMPLED_BEFORE = range(20, 24)
NUM_TOKENS, NUM_SEQS, NUM_SAMPLED, NUM_COPIES, MAX_NUM_LOGPROBS = range(24, 29)  # found here
MAX_TOKENS, MAX_SEQS, MAX_POSITIONS, VOCAB_SIZE, NUM_BLOCKS, NUM_HEADS, MAX_STATES, MAX_ITEMS = range(29, 37)  # limits
IS_SAMPLED = 37  # address of int32 [MAX_TOKENS], filled here: 1 for the tokens whose logits are wanted
NUM_ROUNDS = 38
STEP_COLUMNS = 39

MAX_LOGPROBS = 64  # of contract.sampling: room that each row has for its most likely tokens

# One row for each sliding window (0: none) that layers of the model have.
WINDOW, WINDOW_PLAN, WINDOW_ITEMS, WINDOW_COMBINES, WINDOW_COLUMNS = range(5)

# What lay_out finds: 0, or the number of what does not fit.
MISFITS = (
    "",
    "token_ids: expected 1 to max_num_batched_tokens of them, each within the vocabulary or sampled by the step before",
    "num_computed_tokens: expected 1 to max_num_seqs of them, and no position beyond max_model_len",
    "query_start_loc: expected num_seqs + 1 rising numbers from 0 to the number of tokens",
    "block_table_start: expected num_seqs + 1 numbers from 0 to the number of block_tables, enough for all tokens",
    "block_tables: expected block ids of the pool, and -1 only where no token of the step sees the block",
    "copies: expected pairs of block ids of the pool",
    "rows: expected at most one for each token, that refer to tokens, history and biases of this plan",
    "history: expected token ids of the vocabulary or of the step before",
    "bias_token_ids: expected token ids of the vocabulary, and as many bias_values",
    "num_rounds: expected 1 or more, max_num_batched_tokens sampled ids in all; with more than 1, of each sequence one "
    "token and one row, without target or logprobs, and room behind its history",
)
_TOKENS, _SEQS, _STARTS, _TABLE_STARTS, _TABLES, _COPIES, _ROWS, _HISTORY, _BIASES, _ROUNDS = range(1, 11)


@njit(cache=True)
def lay_out(step: Any, windows: Any, pool: KvPool) -> int:
    """Check and complete a step whose addresses, lengths and limits are there; 0, or an index of MISFITS."""
    misfit = _count(step)
    if misfit == 0:
        misfit = _place(step, pool.block_size, _widest(windows))
    if misfit == 0:
        misfit = _check_rows(step)
    if misfit == 0 and step[NUM_ROUNDS] > 1:
        misfit = _check_rounds(step)
    if misfit == 0:
        _plan_attention(step, windows, pool)
    return misfit


@njit(cache=True)
def next_round(step: Any, windows: Any, pool: KvPool) -> int:
    """Lay out the round after the one that every member has ended: each sequence one token further. 0, or a misfit.

    What lay_out has checked holds for all rounds; only the ids that were sampled are new.
    """
    if not _are_within(step[SAMPLED], step[NUM_SAMPLED], 0, step[VOCAB_SIZE]):
        return _TOKENS
    for i in range(step[NUM_SEQS]):
        token_id, row = read_i32(step[SAMPLED] + 4 * i), step[ROWS] + i * ROW_BYTES
        position = read_i32(step[POSITIONS] + 4 * i) + 1
        table = step[BLOCK_TABLES] + 4 * read_i32(step[BLOCK_TABLE_START] + 4 * i)
        write_i32(step[TOKEN_IDS] + 4 * i, token_id)
        write_i32(step[NUM_COMPUTED_TOKENS] + 4 * i, position)
        _place_token(step, i, position, table, pool.block_size)
        write_i32(row + POSITION, position + 1)
        if _sees_history(row):
            end = read_i32(row + HISTORY_END)
            write_i32(step[HISTORY] + 4 * end, token_id)
            write_i32(row + HISTORY_END, end + 1)
    step[SAMPLED] += 4 * step[NUM_SAMPLED]
    step[NUM_COPIES] = 0  # they were made before the first round
    _plan_attention(step, windows, pool)
    return 0


@njit(cache=True)
def _plan_attention(step: Any, windows: Any, pool: KvPool) -> None:
    for row in windows:
        row[WINDOW_ITEMS], row[WINDOW_COMBINES] = plan_attention(
            step[QUERY_START_LOC], step[NUM_COMPUTED_TOKENS], step[BLOCK_TABLE_START], step[NUM_SEQS], step[NUM_HEADS],
            pool.num_kv_heads, row[WINDOW], step[MAX_STATES], row[WINDOW_PLAN], step[MAX_ITEMS],
        )  # fmt: skip


@njit(cache=True)
def _widest(windows: Any) -> int:
    """The widest window of any layer; 0 when one of them sees everything."""
    widest = windows[0, WINDOW]
    for row in windows:
        widest = 0 if widest == 0 or row[WINDOW] == 0 else max(widest, row[WINDOW])
    return widest


@njit(cache=True)
def _count(step: Any) -> int:
    """Numbers of everything, and whether the columns' lengths agree."""
    num_tokens, num_seqs = step[LENGTHS + TOKEN_IDS] // 4, step[LENGTHS + NUM_COMPUTED_TOKENS] // 4
    num_rows, num_rounds = step[LENGTHS + ROWS] // ROW_BYTES, step[NUM_ROUNDS]
    step[NUM_TOKENS], step[NUM_SEQS], step[NUM_SAMPLED] = num_tokens, num_seqs, num_rows
    step[NUM_COPIES] = step[LENGTHS + COPIES] // 8
    if num_tokens < 1 or num_tokens > step[MAX_TOKENS] or step[LENGTHS + TOKEN_IDS] % 4 != 0:
        return _TOKENS
    if num_seqs < 1 or num_seqs > step[MAX_SEQS] or step[LENGTHS + NUM_COMPUTED_TOKENS] % 4 != 0:
        return _SEQS
    if step[LENGTHS + QUERY_START_LOC] != 4 * (num_seqs + 1):
        return _STARTS
    if step[LENGTHS + BLOCK_TABLE_START] != 4 * (num_seqs + 1):
        return _TABLE_STARTS
    if step[LENGTHS + BLOCK_TABLES] % 4 != 0:
        return _TABLES
    if step[LENGTHS + COPIES] % 8 != 0:
        return _COPIES
    if num_rows > step[MAX_TOKENS] or step[LENGTHS + ROWS] % ROW_BYTES != 0:
        return _ROWS
    if step[LENGTHS + HISTORY] % 4 != 0:
        return _HISTORY
    if step[LENGTHS + BIAS_IDS] % 4 != 0 or step[LENGTHS + BIAS_IDS] != step[LENGTHS + BIAS_VALUES]:
        return _BIASES
    if num_rounds < 1 or num_rounds > step[MAX_TOKENS] or num_rounds * num_rows > step[MAX_TOKENS]:
        return _ROUNDS
    if num_rounds > 1 and not num_tokens == num_seqs == num_rows:
        return _ROUNDS
    return 0


@njit(cache=True)
def _place(step: Any, block_size: int, window: int) -> int:
    """Positions and slots of all tokens, with their ids. A block may be missing only where no token sees it.

    Later rounds have only their positions and blocks checked here: next_round goes there.
    """
    starts, tables, table_starts = step[QUERY_START_LOC], step[BLOCK_TABLES], step[BLOCK_TABLE_START]
    num_seqs, num_blocks = step[NUM_SEQS], step[NUM_BLOCKS]
    if not _ids_hold(step, step[TOKEN_IDS], step[NUM_TOKENS], True):
        return _TOKENS
    if read_i32(starts) != 0 or read_i32(starts + 4 * num_seqs) != step[NUM_TOKENS]:
        return _STARTS
    if read_i32(table_starts) != 0 or read_i32(table_starts + 4 * num_seqs) != step[LENGTHS + BLOCK_TABLES] // 4:
        return _TABLE_STARTS
    if not _are_within(tables, step[LENGTHS + BLOCK_TABLES] // 4, -1, num_blocks):
        return _TABLES
    if not _are_within(step[COPIES], 2 * step[NUM_COPIES], 0, num_blocks):
        return _COPIES
    for s in range(num_seqs):
        row, end = read_i32(starts + 4 * s), read_i32(starts + 4 * s + 4)
        table, table_end = read_i32(table_starts + 4 * s), read_i32(table_starts + 4 * s + 4)
        position = read_i32(step[NUM_COMPUTED_TOKENS] + 4 * s)
        last = position + end - row + step[NUM_ROUNDS] - 1
        if row < 0 or row >= end or end > step[NUM_TOKENS]:
            return _STARTS
        if position < 0 or last > step[MAX_POSITIONS]:
            return _SEQS
        if table < 0 or table_end > step[LENGTHS + BLOCK_TABLES] // 4 or (table_end - table) * block_size < last:
            return _TABLE_STARTS
        first_seen, last_seen = lowest_visible(position, window) // block_size, (last - 1) // block_size
        if not _are_within(tables + 4 * (table + first_seen), last_seen + 1 - first_seen, 0, num_blocks):
            return _TABLES
        for i in range(row, end):
            _place_token(step, i, position, tables + 4 * table, block_size)
            position += 1
    return 0


@njit(cache=True)
def _place_token(step: Any, token: int, position: int, table: int, block_size: int) -> None:
    """A token's position, and the slot that its sequence's block table has for it."""
    block_id = read_i32(table + 4 * (position // block_size))
    write_i32(step[POSITIONS] + 4 * token, position)
    write_i32(step[SLOTS] + 4 * token, block_id * block_size + position % block_size)


@njit(cache=True)
def _check_rows(step: Any) -> int:
    """The rows that sample, and what they refer to."""
    num_history, num_biases = step[LENGTHS + HISTORY] // 4, step[LENGTHS + BIAS_IDS] // 4
    if not _ids_hold(step, step[HISTORY], num_history, True):
        return _HISTORY
    if not _ids_hold(step, step[BIAS_IDS], num_biases, False):
        return _BIASES
    step[MAX_NUM_LOGPROBS] = -1
    for i in range(step[NUM_TOKENS]):
        write_i32(step[IS_SAMPLED] + 4 * i, 0)
    for i in range(step[NUM_SAMPLED]):
        row = step[ROWS] + i * ROW_BYTES
        token, num_logprobs = read_i32(row), read_i32(row + NUM_LOGPROBS)
        begin, end, prompt = read_i32(row + HISTORY_START), read_i32(row + HISTORY_END), read_i32(row + HISTORY_PROMPT)
        bias, bias_end = read_i32(row + BIAS_START), read_i32(row + BIAS_END)
        if token < 0 or token >= step[NUM_TOKENS] or read_i32(row + TARGET) >= step[VOCAB_SIZE]:
            return _ROWS
        if begin < 0 or begin > end or end > num_history or prompt < 0 or prompt > end - begin:
            return _ROWS
        if bias < 0 or bias > bias_end or bias_end > num_biases:
            return _ROWS
        if num_logprobs > MAX_LOGPROBS:
            return _ROWS
        step[MAX_NUM_LOGPROBS] = max(step[MAX_NUM_LOGPROBS], num_logprobs)
        write_i32(step[IS_SAMPLED] + 4 * token, 1)
    return 0


@njit(cache=True)
def _check_rounds(step: Any) -> int:
    """Whether each sequence's row is one that later rounds can go on with."""
    if step[MAX_NUM_LOGPROBS] >= 0:
        return _ROUNDS
    for i in range(step[NUM_SAMPLED]):
        row = step[ROWS] + i * ROW_BYTES
        next_position = read_i32(step[NUM_COMPUTED_TOKENS] + 4 * i) + 1
        if read_i32(row) != i or read_i32(row + TARGET) >= 0 or read_i32(row + POSITION) != next_position:
            return _ROUNDS
        num_history = read_i32(row + HISTORY_END) + step[NUM_ROUNDS] - 1
        if _sees_history(row) and num_history > step[LENGTHS + HISTORY] // 4:
            return _ROUNDS
    return 0


@njit(cache=True)
def _sees_history(row: int) -> bool:
    """Whether a row has penalties: an empty history cannot tell, since it may be one that grows from nothing."""
    repetition, presence = read_f32(row + REPETITION_PENALTY), read_f32(row + PRESENCE_PENALTY)
    return repetition != 1.0 or presence != 0.0 or read_f32(row + FREQUENCY_PENALTY) != 0.0


@njit(cache=True)
def _ids_hold(step: Any, ids: int, count: int, may_be_sampled: bool) -> bool:
    """Whether all are token ids; -1 - n, where it may be, becomes number n of what the step before has sampled."""
    for i in range(count):
        token_id = read_i32(ids + 4 * i)
        if token_id < 0:
            number = -1 - token_id
            if not may_be_sampled or number >= step[MAX_TOKENS]:
                return False
            token_id = read_i32(step[SAMPLED_BEFORE] + 4 * number)
            write_i32(ids + 4 * i, token_id)
        if token_id < 0 or token_id >= step[VOCAB_SIZE]:
            return False
    return True


@njit(cache=True)
def _are_within(numbers: int, count: int, low: int, high: int) -> bool:
    """Whether low <= number < high for all of them."""
    for i in range(count):
        number = read_i32(numbers + 4 * i)
        if number < low or number >= high:
            return False
    return True
