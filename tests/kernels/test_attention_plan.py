"""Work items of attention: every row once, balanced, bounded."""

from __future__ import annotations

import numpy as np
import pytest

from workers.kernels.attention import max_partial_states
from workers.kernels.attention_plan import (
    ITEM_BYTES,
    MAX_VECTORS,
    SPLIT,
    attention_plan_bytes,
    max_items,
    plan_attention,
)

HEADS, KV_HEADS = 9, 3
FIELDS = ("row", "num_rows", "position", "table_start", "split_begin", "split_end", "partial", "unused")


def make_plan(
    query_lens: list[int], seq_lens: list[int], *, window: int = 0, states: int = 5000
) -> tuple[np.ndarray, np.ndarray]:
    """Items and combines, as records."""
    bounds = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    computed = (np.array(seq_lens) - np.array(query_lens)).astype(np.int32)
    starts = (np.arange(len(seq_lens) + 1) * 1000).astype(np.int32)
    group, num_tokens = HEADS // KV_HEADS, int(bounds[-1])
    capacity = max_items(num_tokens, len(seq_lens), group)
    buffer = np.full(attention_plan_bytes(num_tokens, len(seq_lens), group) + 64, 0x55, dtype=np.uint8)
    num_items, num_combines = plan_attention(
        bounds.ctypes.data, computed.ctypes.data, starts.ctypes.data, len(seq_lens), HEADS, KV_HEADS, window, states,
        buffer.ctypes.data, capacity,
    )  # fmt: skip
    assert num_items <= capacity
    assert (buffer[-64:] == 0x55).all()
    records = buffer[: (num_items + num_combines) * ITEM_BYTES].view(np.dtype([(name, "<i4") for name in FIELDS]))
    return records[:num_items], records[num_items:]


@pytest.mark.parametrize("window", [0, 300])
def test_every_row_meets_every_split_that_it_sees_exactly_once(window: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        count = int(rng.integers(1, 40))
        seq_lens = rng.integers(1, 5000, count)
        query_lens = np.minimum(seq_lens, rng.choice([1, 1, 1, 5, 400], count))
        items, _ = make_plan(query_lens.tolist(), seq_lens.tolist(), window=window)
        bounds = np.concatenate([[0], np.cumsum(query_lens)])
        for s in range(count):
            seen: set[tuple[int, int]] = set()
            for item in items[(items["table_start"] == s * 1000)]:
                assert item["position"] - (item["row"] - bounds[s]) == seq_lens[s] - query_lens[s]
                assert 0 < item["num_rows"] * 3 <= MAX_VECTORS
                for row in range(item["row"], item["row"] + item["num_rows"]):
                    pairs = {(row, split) for split in range(item["split_begin"], item["split_end"])}
                    assert not pairs & seen
                    seen |= pairs
            for row in range(bounds[s], bounds[s + 1]):
                position = seq_lens[s] - query_lens[s] + row - bounds[s]
                low = max(0, position - window + 1) if window else 0
                assert {(row, split) for split in range(low // SPLIT, position // SPLIT + 1)} <= seen


def test_a_single_long_context_is_shared_out() -> None:
    items, combines = make_plan([1], [4096])
    assert len(items) >= 4
    assert len(combines) == 1
    assert (combines[0]["split_begin"], combines[0]["split_end"]) == (0, 16)
    assert items["split_end"].max() == 16
    sizes = items["split_end"] - items["split_begin"]
    assert sizes.max() - sizes.min() <= 1


def test_equal_requests_that_are_many_are_not_split() -> None:
    items, combines = make_plan([1] * 32, [2048] * 32)
    assert len(items) == 32
    assert len(combines) == 0
    assert (items["partial"] == -1).all()


def test_the_largest_items_come_first() -> None:
    lens = [17, 900, 300, 2000, 64, 5] * 6
    items, _ = make_plan([1] * len(lens), lens)
    costs = (np.minimum(items["split_end"] * SPLIT, items["position"] + 1) - items["split_begin"] * SPLIT).tolist()
    assert max(costs[-6:]) == 5
    assert min(costs[:6]) >= 900


def test_one_giant_among_small_ones_is_cut_to_their_measure() -> None:
    items, combines = make_plan([1] * 21, [20] * 20 + [6000])
    assert len(combines) == 1
    assert (items["split_end"] - items["split_begin"]).max() <= 6


def test_partial_states_stay_within_their_limit() -> None:
    for states in (0, 100, 1000, max_partial_states(8192, 9)):
        items, combines = make_plan([1, 16, 2], [8192, 6000, 4000], states=states)
        used = sum(int(c["num_rows"] * 9 * (c["split_end"] - c["split_begin"])) for c in combines)
        assert used <= states
        assert (items["partial"] < max(states, 1)).all()
