"""Random walks over everything that can happen to a scheduler: its promises hold after every event, and what each
client gets in the end is what the model alone would have given, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedserve.contract.errors import RequestError
from pagedserve.contract.messages import Fork, Generate, StepPlan, unpack_ids
from pagedserve.contract.sampling import SamplingParams
from pagedserve.scheduler.request import sequence_seed
from tests.builders import CLIENT, Engine, FakeModel, alone, continuation, small_limits

VOCAB_SIZE = 12
EOS = 7

prompts = st.builds(  # few prefixes, so that requests share blocks; any tail
    lambda prefix, length, tail: ([prefix] * 3 + [1, 2, prefix, 4, 5, prefix] * 5)[:length] + tail,
    st.integers(0, 2),
    st.sampled_from([0, 0, 0, 3, 4, 8, 16]),
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6),
)
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 1.0]),
    seed=st.integers(0, 3),
    max_tokens=st.integers(0, 20),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (3,)]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    logit_bias=st.sampled_from([{}, {}, {2: 5.0, 9: -100.0}]),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    logprobs=st.sampled_from([None, None, 0, 2]),
    prompt_logprobs=st.sampled_from([None, None, None, 1]),
)
chosen_outputs = st.one_of(
    st.builds(
        SamplingParams,
        temperature=st.just(1.0),
        seed=st.integers(0, 3),
        max_tokens=st.integers(1, 8),
        n=st.integers(1, 2),
        best_of=st.just(3),
    ),
    st.builds(
        SamplingParams,
        temperature=st.just(0.0),
        max_tokens=st.integers(1, 8),
        n=st.integers(1, 2),
        beam_width=st.integers(2, 3),
        early_stopping=st.booleans(),
    ),
)


@dataclass
class Expected:
    """What a client must have got of a request once it ends on its own."""

    message: Generate
    known: list[int]  # prompt, and for a fork the output before it
    num_prompt_tokens: int


class SchedulerWalk(RuleBasedStateMachine):
    """Clients add, fork and abort; a team runs steps, sometimes two planned in a row, sometimes of several rounds, runs
    them twice, or is lost."""

    enable_prefix_caching = True
    sliding_window = 0

    @initialize(
        num_blocks=st.sampled_from([11, 11, 14, 40]),
        block_size=st.sampled_from([2, 2, 4]),
        max_num_batched_tokens=st.sampled_from([4, 10, 32]),
        num_speculative_tokens=st.sampled_from([0, 3]),
        memory=st.sampled_from([0, 0, 2]),
    )
    def start(self, memory: int, **limits: int) -> None:
        self.limits = small_limits(
            max_num_seqs=4,
            max_model_len=50,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
            max_waiting=6,
            enable_prefix_caching=self.enable_prefix_caching,
            sliding_window=self.sliding_window,
            **limits,
        )
        self.model = FakeModel(VOCAB_SIZE, self.limits.sliding_window, memory)
        self.engine = Engine(self.limits, self.model)
        self.scheduler = self.engine.scheduler
        self.live: dict[str, Expected] = {}
        self.num_added = 0

    def _name(self) -> str:
        self.num_added += 1
        return f"r{self.num_added}"

    def _add(self, message: Generate) -> None:
        prompt = unpack_ids(message.prompt_token_ids).tolist()
        try:
            self.engine.add(message)
        except RequestError as error:
            assert error.code in ("queue_full", "pool_exceeded"), error
            return
        self.live[message.request_id] = Expected(message, prompt, len(prompt))

    @rule(
        asked=st.lists(st.tuples(prompts, samplings), min_size=1, max_size=3),
        priority=st.integers(0, 1),
        salt=st.sampled_from(["", "", "salt"]),
    )
    def add(self, asked: list[tuple[list[int], SamplingParams]], priority: int, salt: str) -> None:
        for prompt, sampling in asked:
            self._add(
                Generate(
                    request_id=self._name(),
                    prompt_token_ids=self._ids(prompt),
                    sampling=sampling,
                    priority=priority,
                    cache_salt=salt,
                )
            )

    @rule(prompt=prompts, sampling=chosen_outputs)
    def add_with_chosen_outputs(self, prompt: list[int], sampling: SamplingParams) -> None:
        self._add(Generate(request_id=self._name(), prompt_token_ids=self._ids(prompt), sampling=sampling))

    @staticmethod
    def _ids(token_ids: list[int]) -> bytes:
        return b"".join(token_id.to_bytes(4, "little") for token_id in token_ids)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), seed=st.integers(0, 5))
    def fork(self, data: st.DataObject, seed: int) -> None:
        original = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        message = Fork(request_id=original.message.request_id, new_request_id=self._name(), seed=seed)
        try:
            self.scheduler.fork(CLIENT, message, self.engine.now)
        except RequestError as error:
            assert error.code == "queue_full" or original.message.sampling != SamplingParams()
            return
        received = self.engine.tokens(message.request_id) if message.request_id in self.engine.records else []
        sampling = SamplingParams(
            **{
                name: getattr(original.message.sampling, name)
                for name in SamplingParams.__struct_fields__
                if name not in ("seed", "prompt_logprobs")
            },
            seed=seed,
        )
        copied = Generate(request_id=message.new_request_id, prompt_token_ids=b"", sampling=sampling)
        self.live[message.new_request_id] = Expected(copied, original.known + received, original.num_prompt_tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), reason=st.sampled_from(["abort", "stop"]))
    def abort(self, data: st.DataObject, reason: str) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        records = self.scheduler.abort(CLIENT, request_id, reason)
        assert records[-1][1].finished
        assert {record.finish_reason for _, record in records} == {reason}
        self.engine.receive(records)
        del self.live[request_id]

    @property
    def plans(self) -> tuple[StepPlan, ...]:
        return self.scheduler.in_flight if hasattr(self, "scheduler") else ()

    @precondition(lambda self: len(self.plans) < 2)
    @rule(max_rounds=st.integers(1, 4))
    def plan_step(self, max_rounds: int) -> None:
        is_ahead = len(self.plans) == 1
        self.engine.now += 1
        plan = self.scheduler.plan(self.engine.now, max_rounds)
        assert plan is not None or is_ahead or not self.live, "something waits in silence"

    @precondition(lambda self: self.plans)
    @rule(num_run=st.integers(1, 2))
    def lose_the_team(self, num_run: int) -> None:
        plans = self.plans[:num_run]
        lost = [self.engine.team.run(plan) for plan in plans]  # some of it was computed, nothing was reported
        assert [self.engine.team.run(plan) for plan in plans] == lost

    @precondition(lambda self: self.plans)
    @rule()
    def apply_result(self) -> None:
        self.engine.receive(self.scheduler.apply(self.engine.team.run(self.plans[0])))
        self._compare_finished()

    @rule(num_steps=st.integers(1, 6), ahead=st.booleans(), max_rounds=st.integers(1, 4))
    def run_steps(self, num_steps: int, ahead: bool, max_rounds: int) -> None:
        for _ in range(num_steps):
            if not self.plans:
                self.plan_step(max_rounds)
            if ahead and len(self.plans) == 1:
                self.plan_step(max_rounds)
            if self.plans:
                self.apply_result()

    @invariant()
    def promises_hold(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()

    def _compare_finished(self) -> None:
        for request_id in [r for r in self.live if r in self.engine.records and self.engine.last(r).finished]:
            expected = self.live.pop(request_id)
            sampling = expected.message.sampling
            for index in range(sampling.n):
                if sampling.best_of is not None or sampling.beam_width > 1:
                    tokens = alone(expected.message, self.limits, self.model, index)
                else:
                    assert sampling.seed is not None
                    seed = sequence_seed(sampling.seed, index)
                    tokens = continuation(
                        expected.known, expected.num_prompt_tokens, sampling, seed, self.limits, self.model
                    )
                assert self.engine.tokens(request_id, index) == tokens, f"{request_id}[{index}]"

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(10_000):
            if not self.live and not self.plans:
                break
            self.run_steps(1, ahead=False, max_rounds=1)
        assert not self.live
        state = self.scheduler.snapshot()
        assert state["num_referenced_blocks"] == 0
        assert state["num_free_blocks"] + state["num_cached_blocks"] == self.limits.num_blocks


class WalkWithoutCache(SchedulerWalk):
    enable_prefix_caching = False


class WalkWithWindow(SchedulerWalk):
    sliding_window = 5


SETTINGS = settings(
    max_examples=400,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
for walk in (SchedulerWalk, WalkWithoutCache, WalkWithWindow):
    walk.TestCase.settings = SETTINGS
test_any_walk_keeps_the_promises_and_the_tokens = SchedulerWalk.TestCase
test_any_walk_without_prefix_cache_does = WalkWithoutCache.TestCase
test_any_walk_with_a_sliding_window_does = WalkWithWindow.TestCase
