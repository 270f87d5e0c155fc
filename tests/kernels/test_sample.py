"""Sampling of one row of logits: against sorting twins, exactly, and by its distribution."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from pagedserve.contract.messages import SAMPLE_ROW
from tests import reference
from workers.kernels import sample as kernel

SEED = 20240229


class Row:
    """One row of logits and the columns of its plan; `run` calls the kernel."""

    def __init__(self, logits: np.ndarray, vocab_size: int | None = None) -> None:
        self.vocab_size = len(logits) if vocab_size is None else vocab_size
        self.logits = np.full(-(-len(logits) // 16) * 16, 1e9, dtype=np.float32)  # what is behind is never looked at
        self.logits[: len(logits)] = logits
        self.history: list[int] = []
        self.num_prompt = 0
        self.bias: list[tuple[int, float]] = []
        self.logprob, self.rank = math.nan, -1
        self.top_ids = np.full(64, -9, dtype=np.int32)
        self.top_logprobs = np.full(64, np.nan, dtype=np.float32)
        self.work = np.full(kernel.sample_work_bytes(self.vocab_size), 0xFF, dtype=np.uint8)

    def run(self, **fields: Any) -> int:
        """The chosen token; `logprob`, `rank` and the top ones are attributes."""
        row = np.zeros(1, dtype=SAMPLE_ROW)
        defaults = {"target": -1, "num_logprobs": -1, "top_p": 1, "repetition_penalty": 1, "seed": SEED}
        for name, value in {**defaults, **fields}.items():
            row[name] = value
        padding = 3  # offsets into the ragged columns are not 0
        row["history_start"], row["history_end"] = padding, padding + len(self.history)
        row["history_prompt"] = self.num_prompt
        row["bias_start"], row["bias_end"] = padding, padding + len(self.bias)
        history = np.array([7] * padding + self.history, dtype=np.int32)
        bias_ids = np.array([7] * padding + [token for token, _ in self.bias], dtype=np.int32)
        bias_values = np.array([50] * padding + [value for _, value in self.bias], dtype=np.float32)
        sampled, rank = np.full(1, -1, dtype=np.int32), np.full(1, -1, dtype=np.int32)
        logprob = np.full(1, np.nan, dtype=np.float32)
        before = self.logits[: self.vocab_size].copy()
        kernel.sample(
            self.logits.ctypes.data, self.vocab_size, row.ctypes.data, history.ctypes.data, bias_ids.ctypes.data,
            bias_values.ctypes.data, sampled.ctypes.data, logprob.ctypes.data, rank.ctypes.data,
            self.top_ids.ctypes.data, self.top_logprobs.ctypes.data, self.work.ctypes.data,
        )  # fmt: skip
        np.testing.assert_array_equal(self.logits[: self.vocab_size], before)  # logits are left as they were
        self.logprob, self.rank = float(logprob[0]), int(rank[0])
        return int(sampled[0])


def random_logits(size: int, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)


def weights_of(logits: np.ndarray, temperature: float) -> np.ndarray:
    """The kernel's own integer weights."""
    padded = np.full(-(-len(logits) // 16) * 16, -np.inf, dtype=np.float32)
    padded[: len(logits)] = logits
    weights = np.zeros(len(padded), dtype=np.int32)
    total = kernel.weigh(padded.ctypes.data, len(padded), padded.max(), temperature, weights.ctypes.data)
    assert total == int(weights.astype(np.int64).sum())
    return weights[: len(logits)]


def test_row_offsets_are_those_of_the_contract() -> None:
    fields = {name.upper(): offset for name, (_, offset) in SAMPLE_ROW.fields.items() if name != "token_index"}
    assert {name: getattr(kernel, name) for name in fields} == fields
    assert SAMPLE_ROW.itemsize == kernel.ROW_BYTES


# ---- greedy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 15, 16, 17, 31, 32, 33, 1000, 49152])
def test_greedy_takes_the_largest_logit(size: int) -> None:
    for seed in range(20):
        logits = random_logits(size, seed)
        assert Row(logits).run() == int(logits.argmax())


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = random_logits(100)
    logits[[13, 40, 41, 99]] = 50
    assert Row(logits).run() == 13


def test_padded_ids_are_never_chosen() -> None:
    logits = random_logits(40)
    logits[37:] = 100
    row = Row(logits, vocab_size=37)
    assert row.run(num_logprobs=37) == int(logits[:37].argmax())
    assert sorted(row.top_ids[:37]) == list(range(37))
    assert all(Row(logits, vocab_size=37).run(temperature=5, position=p) < 37 for p in range(200))


def test_nan_logits_are_passed_over() -> None:
    logits = random_logits(64)
    logits[::2] = np.nan
    row = Row(logits)
    best = int(np.nanargmax(logits))
    assert row.run() == best
    assert row.run(temperature=1, top_k=1) == best
    assert row.run(temperature=1, top_p=0.9) % 2 == 1
    assert Row(np.full(20, np.nan, dtype=np.float32)).run() == 0


def test_if_all_is_banned_the_lowest_id_is_chosen() -> None:
    row = Row(random_logits(20))
    row.bias = [(token, -math.inf) for token in range(20)]
    assert row.run() == 0
    assert row.run(temperature=1) == 0


# ---- penalties and bias ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "penalties", [(1.3, 0.0, 0.0), (0.7, 0.0, 0.0), (1.0, 1.5, 0.0), (1.0, 0.0, 0.7), (1.2, -2.0, 0.4)]
)
def test_penalties_equal_their_twin(penalties: tuple[float, float, float]) -> None:
    rng = np.random.default_rng(1)
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    for seed in range(30):
        logits = random_logits(50, seed)
        prompt, output = rng.integers(0, 50, 20).tolist(), rng.integers(0, 50, 30).tolist()
        row = Row(logits)
        row.history, row.num_prompt = prompt + output, len(prompt)
        expected = reference.penalized(logits, prompt, output, *penalties)
        assert row.run(**dict(zip(names, penalties, strict=True))) == int(expected.argmax())


def test_a_token_is_penalised_once_for_repetition_and_as_often_as_it_came_for_frequency() -> None:
    logits = np.array([0.0, 8.0, 5.0, -5.0] + [-50.0] * 12, dtype=np.float32)
    row = Row(logits)
    row.history, row.num_prompt = [1, 1, 1], 3
    assert row.run(repetition_penalty=1.5) == 1  # 8 / 1.5 > 5
    assert row.run(repetition_penalty=1.7) == 2
    assert row.run(presence_penalty=2.0, frequency_penalty=2.0) == 1  # the prompt does not count
    row.num_prompt = 0
    assert row.run(frequency_penalty=0.9) == 1  # 8 - 3 * 0.9 > 5
    assert row.run(frequency_penalty=1.1) == 2
    assert row.run(presence_penalty=2.0) == 1


def test_bias_is_added_after_penalties_and_bans_are_final() -> None:
    row = Row(np.array([1.0, 2.0, 3.0] + [-9.0] * 13, dtype=np.float32))
    row.bias = [(0, 2.5)]
    assert row.run() == 0
    row.bias = [(0, 100.0), (0, -math.inf), (2, -1.5)]
    assert row.run() == 1
    row.history, row.bias = [0], [(0, 2.5)]
    assert row.run(repetition_penalty=1.9) == 0  # 1 / 1.9 + 2.5 > 3, though (1 + 2.5) / 1.9 is not
    assert row.run(repetition_penalty=2.1) == 2


def test_ids_outside_the_vocabulary_touch_nothing() -> None:
    row = Row(random_logits(30))
    row.history, row.bias = [-1, 30, 10**6], [(-5, 100.0), (30, 100.0), (31, 100.0)]
    assert row.run(repetition_penalty=2.0, frequency_penalty=1.0) == int(row.logits[:30].argmax())


# ---- drawing --------------------------------------------------------------------------------------------------------


def test_random_bits_equal_their_twin() -> None:
    for seed in (0, 1, 2**63, 2**64 - 1, SEED):
        for position in (0, 1, 8191, 2**31 - 1):
            signed = seed - 2**64 if seed >= 2**63 else seed
            assert int(kernel.random_bits(signed, position)) == reference.random_bits(seed, position)


@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 10.0])
def test_weights_are_exponentials_as_integers(temperature: float) -> None:
    logits = random_logits(3000)
    exact = 2.0**30 * np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    np.testing.assert_allclose(weights_of(logits, temperature), exact, rtol=3e-6, atol=1.01)


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 12.0])
def test_every_draw_equals_the_sorting_twins(spread: float) -> None:
    rng = np.random.default_rng(2)
    for trial in range(60):
        size = int(rng.choice([1, 17, 100, 999]))
        logits = np.round(random_logits(size, trial, spread), 1)  # many equals
        fields = {
            "temperature": float(rng.choice([0.2, 1.0, 4.0])),
            "top_k": int(rng.choice([0, 1, 2, 40, 10**6])),
            "top_p": float(rng.choice([1.0, 0.95, 0.5, 0.01])),
            "min_p": float(rng.choice([0.0, 0.05, 0.5, 1.0])),
            "position": trial,
        }
        weights = weights_of(logits, fields["temperature"]).tolist()
        bits = reference.random_bits(SEED, trial)
        expected = reference.draw(weights, fields["top_k"], fields["top_p"], fields["min_p"], bits)
        assert Row(logits).run(**fields) == expected, fields


@pytest.mark.parametrize("fields", [{"top_k": 50}, {"top_p": 0.9}, {"top_p": 0.9, "top_k": 4000, "min_p": 0.001}, {}])
def test_draws_from_a_full_vocabulary_equal_the_sorting_twins(fields: dict[str, float]) -> None:
    for spread in (0.001, 2.0):  # almost all weights within one power of two; and a usual row
        logits = random_logits(49152, spread=spread)
        weights = weights_of(logits, 1.0).tolist()
        keywords = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **fields}
        row = Row(logits)
        for position in range(3):
            bits = reference.random_bits(SEED, position)
            expected = reference.draw(weights, bits=bits, **keywords)
            assert row.run(temperature=1.0, position=position, **fields) == expected


def chi_square(counts: Counter[int], probabilities: np.ndarray, draws: int) -> float:
    expected = probabilities * draws
    return float(sum((counts[i] - e) ** 2 / e for i, e in enumerate(expected) if e > 0))


def test_draws_follow_the_softmax_over_positions_and_over_seeds() -> None:
    logits = np.log(np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])).astype(np.float32)
    draws = 8_000
    row = Row(logits)
    over_positions = Counter(row.run(temperature=1.0, position=p) for p in range(draws))
    over_seeds = Counter(row.run(temperature=1.0, seed=s, position=5) for s in range(draws))
    for counts in (over_positions, over_seeds):
        assert chi_square(counts, np.exp(logits.astype(np.float64)), draws) < 20.5  # 5 degrees of freedom: p = 0.001


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    row = Row(np.log(np.array([0.5, 0.3, 0.1, 0.06, 0.04])).astype(np.float32))
    for top_p, num_kept in ((0.01, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.85, 3), (0.97, 5)):
        assert {row.run(temperature=1.0, top_p=top_p, position=p) for p in range(400)} == set(range(num_kept))


def test_top_p_is_of_what_top_k_keeps() -> None:
    row = Row(np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(np.float32))
    # Of the first two 0.4 / 0.7 is 57 %: enough for 0.55, though 0.4 alone is not.
    assert {row.run(temperature=1.0, top_k=2, top_p=0.55, position=p) for p in range(300)} == {0}
    assert {row.run(temperature=1.0, top_p=0.55, position=p) for p in range(300)} == {0, 1}


def test_equals_at_the_edge_are_kept_by_lowest_id() -> None:
    row = Row(np.zeros(40, dtype=np.float32))
    assert {row.run(temperature=1.0, top_k=3, position=p) for p in range(300)} == {0, 1, 2}
    assert {row.run(temperature=1.0, top_p=0.099, position=p) for p in range(300)} == {0, 1, 2, 3}
    assert {row.run(temperature=1.0, min_p=1.0, position=p) for p in range(2000)} == set(range(40))


def test_the_smallest_temperature_is_greedy_among_equals() -> None:
    logits = random_logits(50)
    logits[[3, 30]] = 9
    row = Row(logits)
    assert {row.run(temperature=1e-40, position=p) for p in range(100)} == {3, 30}


# ---- logprobs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [70, 1000, 49152])
def test_logprobs_and_ranks_equal_their_twin(size: int) -> None:
    logits = np.round(random_logits(size), 2)
    exact = reference.log_softmax(logits)
    order = sorted(range(size), key=lambda i: (-logits[i], i))
    row = Row(logits)
    for target in (0, order[0], order[1], order[-1], size - 1):
        assert row.run(target=target, num_logprobs=64, temperature=1.0) == target
        assert row.logprob == pytest.approx(exact[target], abs=2e-6)
        assert row.rank == order.index(target) + 1
        np.testing.assert_array_equal(row.top_ids, order[:64])
        np.testing.assert_allclose(row.top_logprobs, exact[order[:64]], atol=2e-6)


def test_logprobs_are_of_raw_logits_whatever_changed_the_choice() -> None:
    logits = random_logits(100)
    row = Row(logits)
    best = int(logits.argmax())
    row.history, row.bias = [best] * 3, [(17, 60.0), (best, -math.inf)]
    assert row.run(num_logprobs=2, repetition_penalty=1.8, frequency_penalty=2.0, temperature=0.5) == 17
    exact = reference.log_softmax(logits)
    assert row.logprob == pytest.approx(exact[17], abs=1e-6)
    assert row.top_ids[0] == best
    assert row.top_logprobs[0] == pytest.approx(exact[best], abs=1e-6)


def test_logprobs_are_finite_and_only_as_many_as_asked_for_are_written() -> None:
    logits = random_logits(20)
    logits[4] = -np.inf
    row = Row(logits)
    row.run(target=4, num_logprobs=3)
    assert math.isfinite(row.logprob)
    assert row.logprob < -1e38
    assert row.rank == 20
    assert (row.top_ids[3:] == -9).all()
    row.run(num_logprobs=-1)
    assert math.isnan(row.logprob)
    assert row.rank == -1
