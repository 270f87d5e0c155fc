"""Sampling: one row of logits to one token, and its logprobs. Nothing is sorted, no random state is kept.

A token's weight is an integer, floor(2^30 exp((x - max) / temperature)). What follows is integer arithmetic, exact in
any order: top_k, top_p and min_p each keep a beginning of the tokens by falling weight (lowest id first among equals),
and a random number below the kept weights' sum picks one. Twins: tests/reference.py.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from workers.kernels.vector import (
    compress_i32,
    exp_f32,
    lane_numbers,
    load_f32,
    load_i32,
    mask_bits,
    max_f32,
    maximum_f32,
    read_f32,
    read_i32,
    read_i64,
    select_i32,
    splat_f32,
    splat_i32,
    store_i32,
    sum_f32,
    sum_i32,
    sum_wide_u32,
    truncate_to_i32,
    write_f32,
    write_i32,
)

# Byte offsets of the fields of contract.messages.SAMPLE_ROW.
ROW_BYTES = 72
TARGET, NUM_LOGPROBS, TOP_K, SEED, POSITION = 4, 8, 12, 16, 24
TEMPERATURE, TOP_P, MIN_P = 28, 32, 36
REPETITION_PENALTY, PRESENCE_PENALTY, FREQUENCY_PENALTY = 40, 44, 48
HISTORY_START, HISTORY_END, HISTORY_PROMPT, BIAS_START, BIAS_END = 52, 56, 60, 64, 68

LARGEST_WEIGHT = 1 << 30
_LARGEST_RECIPROCAL = 1e30  # of a temperature: 0 times it is still 0
_LOWEST = float(np.finfo(np.float32).min)
_SUM_VECTORS = 64  # float32 lanes add so many exponentials before they go on in float64


def sample_work_bytes(vocab_size: int) -> int:
    """Bytes of the buffer, private to a worker, that sample works in."""
    return 3 * 4 * (vocab_size + 15)


@njit(cache=True)
def sample(
    logits: int,
    vocab_size: int,
    row: int,
    history: int,
    bias_token_ids: int,
    bias_values: int,
    sampled: int,
    logprob: int,
    rank: int,
    top_token_ids: int,
    top_logprobs: int,
    work: int,
) -> None:
    """Choose a row's token, or report on its target: write sampled (int32), and where num_logprobs >= 0 the rest.

    row is the address of one SAMPLE_ROW; logits of float32 [vocab_size, padded to a multiple of 16]: the padding is set
    to -inf, all else is as before in the end. history, bias_token_ids and bias_values are the StepPlan's columns; ids
    outside the vocabulary are passed over there. logprob (float32) and rank (int32, 1 for the largest logit) are of the
    chosen token, top_token_ids and top_logprobs of the num_logprobs largest, lowest id first among equals; all of them
    from raw logits, and finite. If every token is banned, the lowest id is chosen.
    """
    padded = (vocab_size + 15) // 16 * 16
    for token in range(vocab_size, padded):
        write_f32(logits + 4 * token, -np.inf)
    num_logprobs = read_i32(row + NUM_LOGPROBS)
    chosen = read_i32(row + TARGET)
    if chosen < 0:
        saved = work + 4 * padded
        _adjust(row, logits, vocab_size, history, bias_token_ids, bias_values, saved, work)
        chosen = _choose(row, logits, vocab_size, work, work + 8 * padded)
        _restore(row, logits, vocab_size, history, bias_token_ids, saved)
    write_i32(sampled, chosen)
    if num_logprobs >= 0:
        normalizer = _log_sum_exp(logits, padded)
        value = read_f32(logits + 4 * chosen)
        write_f32(logprob, _finite(value - normalizer))
        write_i32(rank, _rank(logits, padded, chosen, value))
        _top(logits, padded, num_logprobs, normalizer, top_token_ids, top_logprobs)


@njit(cache=True)
def random_bits(seed: int, position: int) -> np.uint64:
    """64 random bits, a function of (seed, position): element `position` of SplitMix64 started at a hash of the seed.

    Steele, Lea, Flood: Fast splittable pseudorandom number generators (2014), with Stafford's mixer 13.
    """
    gamma = np.uint64(0x9E3779B97F4A7C15)
    start = _mix(np.uint64(seed) + gamma)
    return _mix(start + gamma * np.uint64(position + 1))


@njit(cache=True)
def _mix(z: np.uint64) -> np.uint64:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@njit(cache=True)
def _below(bits: np.uint64, limit: int) -> int:
    """A random number in 0 … limit - 1: the upper 64 bits of bits * limit."""
    low32, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    a, b = bits >> shift, bits & low32
    c, d = np.uint64(limit) >> shift, np.uint64(limit) & low32
    middle = (b * d >> shift) + (a * d & low32) + (b * c & low32)
    return np.int64(a * c + (a * d >> shift) + (b * c >> shift) + (middle >> shift))


# ---- penalties and bias ---------------------------------------------------------------------------------------------


@njit(cache=True)
def _adjust(
    row: int, logits: int, vocab_size: int, history: int, bias_token_ids: int, bias_values: int, saved: int, counts: int
) -> None:
    """Apply penalties, then bias; `saved` [vocab_size] keeps the raw logits of the tokens that they touch."""
    start, end = read_i32(row + HISTORY_START), read_i32(row + HISTORY_END)
    for i in range(start, end):
        token = read_i32(history + 4 * i)
        if 0 <= token < vocab_size:
            write_i32(counts + 4 * token, 0)
            write_f32(saved + 4 * token, read_f32(logits + 4 * token))
    for i in range(read_i32(row + BIAS_START), read_i32(row + BIAS_END)):
        token = read_i32(bias_token_ids + 4 * i)
        if 0 <= token < vocab_size:
            write_f32(saved + 4 * token, read_f32(logits + 4 * token))
    for i in range(start + read_i32(row + HISTORY_PROMPT), end):
        token = read_i32(history + 4 * i)
        if 0 <= token < vocab_size:
            write_i32(counts + 4 * token, read_i32(counts + 4 * token) + 1)
    repetition = read_f32(row + REPETITION_PENALTY)
    presence, frequency = read_f32(row + PRESENCE_PENALTY), read_f32(row + FREQUENCY_PENALTY)
    for i in range(start, end):
        token = read_i32(history + 4 * i)
        if 0 <= token < vocab_size and read_i32(counts + 4 * token) >= 0:
            count = read_i32(counts + 4 * token)
            write_i32(counts + 4 * token, -1)  # done
            value = read_f32(logits + 4 * token)
            value = value / repetition if value > 0 else value * repetition
            if count > 0:
                value = value - frequency * np.float32(count) - presence
            write_f32(logits + 4 * token, value)
    for i in range(read_i32(row + BIAS_START), read_i32(row + BIAS_END)):
        token = read_i32(bias_token_ids + 4 * i)
        if 0 <= token < vocab_size:
            write_f32(logits + 4 * token, read_f32(logits + 4 * token) + read_f32(bias_values + 4 * i))


@njit(cache=True)
def _restore(row: int, logits: int, vocab_size: int, history: int, bias_token_ids: int, saved: int) -> None:
    """Put the raw logits back."""
    for i in range(read_i32(row + HISTORY_START), read_i32(row + HISTORY_END)):
        token = read_i32(history + 4 * i)
        if 0 <= token < vocab_size:
            write_f32(logits + 4 * token, read_f32(saved + 4 * token))
    for i in range(read_i32(row + BIAS_START), read_i32(row + BIAS_END)):
        token = read_i32(bias_token_ids + 4 * i)
        if 0 <= token < vocab_size:
            write_f32(logits + 4 * token, read_f32(saved + 4 * token))


# ---- choice ---------------------------------------------------------------------------------------------------------


@njit(cache=True)
def _choose(row: int, logits: int, vocab_size: int, weights: int, candidates: int) -> int:
    """The token of adjusted logits: greedy, or drawn from what top_k, top_p and min_p keep."""
    padded = (vocab_size + 15) // 16 * 16
    largest = _largest(logits, padded)
    temperature = read_f32(row + TEMPERATURE)
    if temperature <= 0 or not math.isfinite(largest):
        return _first_equal(logits, vocab_size, largest)
    mass = weigh(logits, padded, largest, temperature, weights)
    threshold, ties = 1, padded  # kept: what weighs more than the threshold, and the first `ties` that weigh as much
    top_k, top_p, min_p = read_i32(row + TOP_K), read_f32(row + TOP_P), read_f32(row + MIN_P)
    if 0 < top_k < padded and top_k < _measure(weights, padded, 1)[0]:
        threshold, above, mass_above = _find_threshold(weights, padded, top_k, False, candidates)
        ties = top_k - above
        mass = mass_above + ties * threshold
    if top_p < 1:
        target = max(1, math.ceil(top_p * mass))
        threshold, above, mass_above = _find_threshold(weights, padded, target, True, candidates)
        ties = -(-(target - mass_above) // threshold)
        mass = mass_above + ties * threshold
    least = math.ceil(min_p * LARGEST_WEIGHT)
    if least > threshold:
        threshold, ties = least, padded
        mass = _measure(weights, padded, threshold)[1]
    last_tie = _find_tie(weights, padded, threshold, ties)
    draw = _below(random_bits(read_i64(row + SEED), read_i32(row + POSITION)), mass)
    return _find_drawn(weights, padded, threshold, last_tie, draw)


@njit(cache=True)
def _largest(logits: int, padded: int) -> float:
    """The largest logit; NaN is passed over."""
    a = b = splat_f32(-np.inf)
    for at in range(0, padded // 32 * 32, 32):
        a = max_f32(load_f32(logits + 4 * at), a)
        b = max_f32(load_f32(logits + 4 * at + 64), b)
    if padded % 32:
        a = max_f32(load_f32(logits + 4 * (padded - 16)), a)
    return maximum_f32(max_f32(a, b))


@njit(cache=True)
def _first_equal(logits: int, vocab_size: int, value: float) -> int:
    """The lowest id whose logit equals value; 0 if there is none (all are NaN)."""
    for at in range(0, vocab_size, 16):
        bits = mask_bits(load_f32(logits + 4 * at) == value)
        if bits:
            token = at + _lowest_bit(bits)
            return token if token < vocab_size else 0
    return 0


@njit(cache=True)
def _lowest_bit(bits: int) -> int:
    index = 0
    while not bits >> index & 1:
        index += 1
    return index


@njit(cache=True)
def weigh(logits: int, padded: int, largest: float, temperature: float, weights: int) -> int:
    """Write every token's weight; their sum."""
    factor = np.float32(min(1.0 / temperature, _LARGEST_RECIPROCAL))
    low = high = splat_i32(0)
    for at in range(0, 4 * padded, 64):
        weight = truncate_to_i32(exp_f32((load_f32(logits + at) - largest) * factor) * LARGEST_WEIGHT)
        store_i32(weights + at, weight)
        low = low + (weight & 0xFFFF)
        high = high + (weight >> 16)
    return sum_wide_u32(low) + (sum_wide_u32(high) << 16)


@njit(cache=True)
def _measure(weights: int, length: int, threshold: int) -> tuple[int, int]:
    """How many weights are at least `threshold` (which is positive), and their sum."""
    count = low = high = zero = splat_i32(0)
    for at in range(0, 4 * length, 64):
        weight = load_i32(weights + at)
        mask = weight >= threshold
        weight = select_i32(mask, weight, zero)
        count = count + select_i32(mask, splat_i32(1), zero)
        low = low + (weight & 0xFFFF)
        high = high + (weight >> 16)
    return sum_wide_u32(count), sum_wide_u32(low) + (sum_wide_u32(high) << 16)


@njit(cache=True)
def _find_threshold(weights: int, length: int, target: int, by_mass: bool, candidates: int) -> tuple[int, int, int]:
    """The largest t such that weights >= t reach the target in number or in sum; number and sum of the weights > t.

    All positive weights together must reach it. Bisects by powers of two, then the weights that are left within one.
    """
    low, high = 1, LARGEST_WEIGHT + 1  # reached at low, not at high
    above, mass_above = 0, 0  # of the weights >= high that are not in the list
    outside, mass_outside = 0, 0
    while high - low > 1:
        if high > 2 * low:
            middle = low << max(1, (_bit_length(high) - _bit_length(low)) // 2)
        else:
            middle = (low + high) // 2
        count, mass = _measure(weights, length, middle)
        count, mass = count + outside, mass + mass_outside
        if (mass if by_mass else count) >= target:
            low = middle
        else:
            high, above, mass_above = middle, count, mass
        if weights != candidates and high <= 2 * low:
            length = _gather(weights, length, low, high, candidates)
            weights, outside, mass_outside = candidates, above, mass_above
    return low, above, mass_above


@njit(cache=True)
def _bit_length(number: int) -> int:
    length = 0
    while number >> length:
        length += 1
    return length


@njit(cache=True)
def _gather(weights: int, length: int, low: int, high: int, candidates: int) -> int:
    """Copy the weights within low … high - 1, padded with 0 to a multiple of 16; how many they are then."""
    end = candidates
    for at in range(0, 4 * length, 64):
        weight = load_i32(weights + at)
        end += 4 * compress_i32(end, weight, (weight >= low) & (weight < high))
    while (end - candidates) % 64:
        write_i32(end, 0)
        end += 4
    return (end - candidates) // 4


@njit(cache=True)
def _find_tie(weights: int, padded: int, threshold: int, ties: int) -> int:
    """The id of the `ties`-th token that weighs exactly `threshold`; the last id if there are fewer."""
    if ties < padded:
        for at in range(0, padded, 16):
            equal = load_i32(weights + 4 * at) == threshold
            bits = mask_bits(equal)
            if bits:
                for lane in range(16):
                    ties -= bits >> lane & 1
                    if ties == 0:
                        return at + lane
    return padded - 1


@njit(cache=True)
def _find_drawn(weights: int, padded: int, threshold: int, last_tie: int, draw: int) -> int:
    """The kept token in which the running sum of kept weights, by id, passes `draw`."""
    zero, lanes = splat_i32(0), lane_numbers()
    for at in range(0, padded, 16):
        weight = load_i32(weights + 4 * at)
        kept = select_i32((weight > threshold) | ((weight == threshold) & (lanes <= last_tie - at)), weight, zero)
        mass = sum_wide_u32(kept)
        if draw < mass:
            for lane in range(16):
                weight_here = read_i32(weights + 4 * (at + lane))
                if weight_here > threshold or (weight_here == threshold and at + lane <= last_tie):
                    draw -= weight_here
                    if draw < 0:
                        return at + lane
        draw -= mass
    return 0  # cannot be: draw is below the sum


# ---- logprobs -------------------------------------------------------------------------------------------------------


@njit(cache=True)
def _log_sum_exp(logits: int, padded: int) -> float:
    """log of the sum of e^x, as float64; the sum's order is fixed."""
    largest = _largest(logits, padded)
    total = 0.0
    for begin in range(0, padded, 16 * _SUM_VECTORS):
        lanes = splat_f32(0.0)
        for at in range(begin, min(begin + 16 * _SUM_VECTORS, padded), 16):
            lanes = lanes + exp_f32(load_f32(logits + 4 * at) - largest)
        total += sum_f32(lanes)
    return largest + math.log(total)


@njit(cache=True)
def _finite(logprob: float) -> float:
    return logprob if logprob > _LOWEST else _LOWEST


@njit(cache=True)
def _rank(logits: int, padded: int, token: int, value: float) -> int:
    """1 + how many logits are larger, or equal with a lower id."""
    count, one, zero, lanes = splat_i32(0), splat_i32(1), splat_i32(0), lane_numbers()
    for at in range(0, padded, 16):
        x = load_f32(logits + 4 * at)
        count = count + select_i32((x > value) | ((x == value) & (lanes < token - at)), one, zero)
    return 1 + sum_i32(count)


@njit(cache=True)
def _top(logits: int, padded: int, count: int, normalizer: float, token_ids: int, logprobs: int) -> None:
    """Write the largest logits' ids and logprobs. The lists are kept in order while the row is read once."""
    if count <= 0:
        return
    for i in range(count):
        write_i32(token_ids + 4 * i, -1)
        write_f32(logprobs + 4 * i, -np.inf)
    smallest = logprobs + 4 * (count - 1)
    for at in range(0, padded, 16):
        bits = mask_bits(load_f32(logits + 4 * at) > read_f32(smallest))
        while bits:
            lane = _lowest_bit(bits)
            bits &= bits - 1
            value = read_f32(logits + 4 * (at + lane))
            if value > read_f32(smallest):
                _insert(value, at + lane, count, token_ids, logprobs)
    for i in range(count):
        write_f32(logprobs + 4 * i, _finite(read_f32(logprobs + 4 * i) - normalizer))


@njit(cache=True)
def _insert(value: float, token: int, count: int, token_ids: int, values: int) -> None:
    """Put a value in its place in a falling list, behind its equals; the last one falls out."""
    i = count - 1
    while i > 0 and read_f32(values + 4 * (i - 1)) < value:
        write_f32(values + 4 * i, read_f32(values + 4 * (i - 1)))
        write_i32(token_ids + 4 * i, read_i32(token_ids + 4 * (i - 1)))
        i -= 1
    write_f32(values + 4 * i, value)
    write_i32(token_ids + 4 * i, token)
