"""Engine: scheduler core and forward pass in one process, without sockets: what kernels and golden tests drive."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pagedserve.contract import segments
from pagedserve.contract.messages import Generate, SequenceTokens, Setup, StepPlan, StepResult, pack_ids, unpack_ids
from pagedserve.contract.sampling import SamplingParams, sampling_params
from pagedserve.models.open import open_checkpoint
from pagedserve.models.spec import Checkpoint
from pagedserve.scheduler.limits import Limits
from pagedserve.scheduler.scheduler import Scheduler
from workers import arena, weights
from workers.arena import LOGITS_ROWS
from workers.forward import Forward

_NUMBERS = itertools.count()


@dataclass
class Answer:
    """All that one sequence of a request was told."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: tuple[Any, ...] | None = None
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    cumulative_logprob: float | None = None


class Engine:
    """A model with its pool; `generate` runs requests together to their end."""

    def __init__(
        self,
        model: str | Path | Checkpoint = "demo",
        *,
        compute: str = "auto",
        quantize: str = "none",
        block_size: int = 16,
        num_blocks: int = 512,
        max_num_batched_tokens: int = 128,
        max_model_len: int | None = None,
        run_ahead: bool = True,
        max_rounds: int = 4,
        **limits: Any,
    ) -> None:
        checkpoint = open_checkpoint(model) if isinstance(model, (str, Path)) else model
        length = min(max_model_len or checkpoint.spec.max_model_len, checkpoint.spec.max_model_len)
        self.spec = replace(checkpoint.spec, max_model_len=length)
        self.tag = f"test-{os.getpid()}-{next(_NUMBERS)}"
        self.setup = Setup(
            worker_id=0,
            tag=self.tag,
            prepare=True,
            model_path="",
            compute=compute,
            quantize=quantize,
            block_size=block_size,
            num_blocks=num_blocks,
            pool_dtype="float32" if compute == "f32" else "float16",
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=limits.get("max_num_seqs", 64),
            max_model_len=length,
            max_team=4,
        )
        element_bytes = 4 if compute == "f32" else 2
        pool_bytes = num_blocks * block_size * self.spec.kv_bytes_per_token(element_bytes)
        self._pool = segments.create(segments.segment_name(self.tag, "kv"), pool_bytes)
        self._pool.memory[:] = 0xFF  # NaN in every slot: reading an unwritten one shows
        self.weights = weights.prepare(self.tag, checkpoint, self.spec, compute, quantize)
        self.arena = arena.create(self.setup, self.weights.layout)
        self.forward = Forward(self.setup, self.weights, self.arena)
        segments.unlink_instance(self.tag)  # mapped until this process ends
        window = [layer.sliding_window for layer in self.spec.layers]
        self.limits = Limits(
            **{
                "block_size": block_size,
                "num_blocks": num_blocks,
                "max_num_batched_tokens": max_num_batched_tokens,
                "max_num_seqs": 64,
                "max_model_len": length,
                "max_waiting": 1000,
                "max_num_rows": max_num_batched_tokens,
                "vocab_size": self.spec.vocab_size,
                "eos_token_ids": checkpoint.generation.eos_token_ids,
                "sliding_window": max(window) if window and all(window) else 0,
                **limits,
            }
        )
        self.scheduler = Scheduler(self.limits)
        self.num_steps = 0
        self._run_ahead = run_ahead
        self._max_rounds = max_rounds
        self.num_steps_ahead = 0
        self.num_later_rounds = 0

    def step(self) -> list[SequenceTokens]:
        """One step of what was added; its outputs. With run_ahead the next one is planned before, if it can be."""
        if not self.scheduler.in_flight:
            plan = self.scheduler.plan(float(self.num_steps), self._max_rounds)
            assert plan is not None, "something waits, and nothing runs"
        if self._run_ahead and self.scheduler.has_work:
            self.num_steps_ahead += self.scheduler.plan(float(self.num_steps), self._max_rounds) is not None
        plan = self.scheduler.in_flight[0]
        result = self.compute(plan)
        self.num_steps += 1
        self.num_later_rounds += plan.num_rounds - 1
        outputs = [output for _, output in self.scheduler.apply(result)]
        self.scheduler.check()
        return outputs

    def compute(self, plan: StepPlan) -> StepResult:
        """Run a plan as a team of one."""
        plan = msgspec.structs.replace(plan, team=(0,))
        assert self.forward.run(plan)
        return StepResult(step_id=plan.step_id, worker_id=0, ok=True, **self.forward.results(plan))

    def logits(self) -> npt.NDArray[np.float32]:
        """The last step's last group of logits, [rows, vocabulary]."""
        memory = self.arena._segment.memory
        width = -(-self.spec.embedding_rows // 16) * 16
        begin = self.arena.address("logits") - self.arena.control
        rows = memory[begin : begin + 4 * LOGITS_ROWS * width].view(np.float32).reshape(LOGITS_ROWS, width)
        return rows[:, : self.spec.vocab_size].copy()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams] | SamplingParams | None = None,
        **options: Any,
    ) -> list[list[Answer]]:
        """Run all prompts together; for each the answers of its n sequences. Options are sampling parameters."""
        if params is None:
            params = sampling_params({"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, **options})
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        names = [f"r{next(_NUMBERS)}" for _ in prompts]
        answers = {name: [Answer() for _ in range(p.n)] for name, p in zip(names, params, strict=True)}
        for name, prompt, p in zip(names, prompts, params, strict=True):
            self.add(name, prompt, p)
        while self.scheduler.has_work or self.scheduler.in_flight:
            for output in self.step():
                self._take(answers, output)
        return [answers[name] for name in names]

    def add(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        """Put one request into the queue."""
        message = Generate(request_id=request_id, prompt_token_ids=pack_ids(prompt), sampling=params)
        self.scheduler.add(b"client", message, 0.0)

    def pool_bytes(self) -> bytes:
        """The whole pool."""
        return self._pool.memory.tobytes()

    def _take(self, answers: dict[str, list[Answer]], output: SequenceTokens) -> None:
        answer = answers[output.request_id][output.index]
        answer.token_ids += unpack_ids(output.token_ids).tolist()
        answer.logprobs += output.logprobs
        answer.finish_reason = output.finish_reason or answer.finish_reason
        answer.num_cached_tokens = max(answer.num_cached_tokens, output.num_cached_tokens)
        answer.num_draft_tokens += output.num_draft_tokens
        answer.num_accepted_tokens += output.num_accepted_tokens
        if output.prompt_logprobs is not None:
            answer.prompt_logprobs = output.prompt_logprobs
        if output.cumulative_logprob is not None:
            answer.cumulative_logprob = output.cumulative_logprob
