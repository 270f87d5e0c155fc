"""What a step costs the scheduler: planning and applying it for many running requests with long contexts.

Usage: python bench/scheduler.py [NUM_REQUESTS] [CONTEXT]. Prints medians in milliseconds, a step and 100 requests.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from pagedserve.contract.messages import SAMPLE_ROW, Generate, StepPlan, StepResult, encode, pack_ids
from pagedserve.contract.sampling import SamplingParams
from pagedserve.scheduler.limits import Limits
from pagedserve.scheduler.scheduler import Scheduler

VOCAB_SIZE = 49_152
BLOCK_SIZE = 16
NUM_STEPS = 200
VARIANTS: dict[str, dict[str, Any]] = {
    "sampled": {},
    "penalties": {"repetition_penalty": 1.1},
    "logprobs": {"logprobs": 5},
    "speculation": {"num_speculative_tokens": 4},
}


def main(num_requests: int, context: int) -> None:
    """Measure each variant and print a line for it."""
    print(f"{num_requests} running requests of {context} tokens; medians of {NUM_STEPS} steps in ms (100 requests)")
    for name, sampling in VARIANTS.items():
        times = measure(num_requests, context, sampling)
        columns = (f"{what} {1e3 * t:.3f} ({1e5 * t / num_requests:.3f})" for what, t in times.items())
        print(f"{name:12} " + "   ".join(columns))


def measure(num_requests: int, context: int, sampling: dict[str, Any]) -> dict[str, float]:
    """Median seconds of planning, encoding and applying a step in which every request decodes."""
    max_tokens = 16 * NUM_STEPS  # more than any request gets here
    blocks_each = (context + max_tokens) // BLOCK_SIZE + 1
    limits = Limits(
        block_size=BLOCK_SIZE,
        num_blocks=num_requests * blocks_each,
        max_num_batched_tokens=max(8192, 8 * num_requests),
        max_num_seqs=num_requests,
        max_model_len=context + 100_000,
        max_waiting=num_requests,
        vocab_size=VOCAB_SIZE,
        min_mixed_prompt_tokens=8192,
        max_num_rows=max(8192, 8 * num_requests),
    )
    scheduler = Scheduler(limits)
    rng = np.random.default_rng(0)
    for number in range(num_requests):
        prompt = pack_ids(rng.integers(0, VOCAB_SIZE, context, dtype=np.int32))
        message = Generate(
            request_id=str(number), prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens, **sampling)
        )
        scheduler.add(b"client", message, 0.0)
    plan = _plan(scheduler)
    while len(plan.num_computed_tokens) < 4 * num_requests or len(plan.rows) < num_requests * SAMPLE_ROW.itemsize:
        scheduler.apply(_result(plan, rng))
        plan = _plan(scheduler)
    scheduler.apply(_result(plan, rng))
    times: dict[str, list[float]] = {"plan": [], "encode": [], "apply": []}
    for _ in range(NUM_STEPS):
        start = time.perf_counter()
        plan = _plan(scheduler)
        planned = time.perf_counter()
        encode(plan)
        encoded = time.perf_counter()
        result = _result(plan, rng)
        answered = time.perf_counter()
        scheduler.apply(result)
        times["plan"].append(planned - start)
        times["encode"].append(encoded - planned)
        times["apply"].append(time.perf_counter() - answered)
    return {what: float(np.median(values)) for what, values in times.items()}


def _plan(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan(0.0)
    assert plan is not None
    return plan


def _result(plan: StepPlan, rng: np.random.Generator) -> StepResult:
    rows = np.frombuffer(plan.rows, dtype=SAMPLE_ROW)
    num_top = int(np.maximum(rows["num_logprobs"], 0).sum())
    return StepResult(
        step_id=plan.step_id,
        worker_id=0,
        ok=True,
        sampled_token_ids=pack_ids(rng.integers(0, VOCAB_SIZE, len(rows), dtype=np.int32)),
        logprobs=np.zeros(len(rows), dtype="<f4").tobytes(),
        ranks=pack_ids(np.ones(len(rows), dtype=np.int32)),
        top_token_ids=pack_ids(np.zeros(num_top, dtype=np.int32)),
        top_logprobs=np.zeros(num_top, dtype="<f4").tobytes(),
    )


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]) if len(sys.argv) > 2 else (256, 4096))
