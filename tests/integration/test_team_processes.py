"""Teams of real processes: any size gives the same bits, and a killed member costs nobody a token."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pagedserve.client import Client
from tests.server import RunFolder, Running, command, contention, eventually

PROMPTS = [[random.Random(n).randrange(1000, 40000) for _ in range(n)] for n in (3, 40, 130, 700)]
LENGTH = 32


def start(folder: RunFolder, model: Path | str, workers: int) -> Running:
    running = Running(
        command("up", "--model", str(model), "--workers", str(workers), "--pool-tokens", "8192", "--no-http"),
        folder.environment,
    )
    running.wait_for("ready: ")
    eventually(lambda: running.output.count("is ready (") == workers, 60.0)
    return running


def answers(endpoint: str, prompts: list[list[int]]) -> list[tuple[list[int], list[Any]]]:
    """Tokens and logprobs of all prompts, running together; every second one drawn with a seed."""
    with Client(endpoint) as client:
        streams = [
            client.generate(
                prompt, max_tokens=LENGTH, temperature=0.8 * (i % 2), seed=i, ignore_eos=True, logprobs=2
            )
            for i, prompt in enumerate(prompts)
        ]
        outputs = [stream.result().outputs[0] for stream in streams]
        return [(list(output.token_ids), list(output.logprobs or ())) for output in outputs]


@pytest.fixture
def servers(smollm2: Path) -> Iterator[Any]:
    started: list[tuple[RunFolder, Running]] = []

    def run(workers: int, model: Path | str = smollm2) -> tuple[RunFolder, Running]:
        folder = RunFolder()
        started.append((folder, start(folder, model, workers)))
        return started[-1]

    yield run
    for folder, running in started:
        running.kill()
        folder.remove()


@pytest.mark.parametrize("model", ["smollm2", "gpt2-tiny", "mistral-tiny"])
def test_teams_of_1_2_and_3_give_the_same_bits(servers: Any, smollm2: Path, model: str) -> None:
    path = smollm2 if model == "smollm2" else Path(__file__).parents[1] / "golden" / model
    prompts = PROMPTS if model == "smollm2" else [[token % 700 for token in prompt[:200]] for prompt in PROMPTS]
    seen = []
    for workers in (1, 2, 3):
        folder, running = servers(workers, path)
        seen.append(answers(folder.endpoint(), prompts))
        assert running.end() == 0
    assert seen[0] == seen[1] == seen[2]


def test_killed_workers_cost_no_stream_and_no_bit(servers: Any) -> None:
    folder, running = servers(2)
    expected = answers(folder.endpoint(), PROMPTS)
    with Client(folder.endpoint()) as client:
        streams = [
            client.generate(p, max_tokens=400, temperature=0.8 * (i % 2), seed=i, ignore_eos=True)
            for i, p in enumerate(PROMPTS)
        ]
        next(iter(streams[0]))
        for name in ("--worker-id", "--worker-id", "--worker-id"):
            victim = running.child(name)
            victim.send_signal(signal.SIGKILL)
            time.sleep(0.3)
        got = [list(stream.result().outputs[0].token_ids) for stream in streams]
    assert [tokens[:LENGTH] for tokens in got] == [tokens for tokens, _ in expected]
    assert all(len(tokens) == 400 for tokens in got)
    with Client(folder.endpoint()) as client:  # a victim may not have been ready yet: what counts is who is in the end
        assert eventually(lambda: [worker.state for worker in client.status().workers] == ["ready"] * 2, 10.0)


def test_several_rounds_a_step_cost_no_bit_and_neither_do_workers_killed_in_them(servers: Any) -> None:
    folder, running = servers(2, Path(__file__).parents[1] / "golden" / "gpt2-tiny")

    def records(client: Client, logprobs: int | None = None) -> list[tuple[int, ...]]:
        options = {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.2, "logprobs": logprobs}
        return [record.token_ids for record in client.generate([1, 2, 3], max_tokens=100, ignore_eos=True, **options)]

    with Client(folder.endpoint()) as client:
        expected = [token_id for token_ids in records(client, logprobs=0) for token_id in token_ids]
        before = client.status().num_steps
        several = records(client)
        assert client.status().num_steps - before == 100
        assert max(map(len, several)) == 4 and len(several) < 50
        assert [token_id for token_ids in several for token_id in token_ids] == expected
        for _ in range(3):
            running.child("--worker-id").send_signal(signal.SIGKILL)
            begun = time.monotonic()
            while time.monotonic() - begun < 0.3:
                assert [token_id for token_ids in records(client) for token_id in token_ids] == expected


def test_steps_are_planned_while_the_team_computes(servers: Any) -> None:
    folder, _ = servers(2)
    with Client(folder.endpoint()) as client:
        before = client.status()
        client.generate([1, 2, 3], max_tokens=64, temperature=0.0, ignore_eos=True).result()
        after = client.status()
    assert after.num_steps - before.num_steps == 64
    assert after.num_steps_ahead > before.num_steps_ahead  # not of all: a step that ends sooner than expected has none


def test_a_killed_worker_is_ready_again_within_seconds(servers: Any) -> None:
    folder, _ = servers(2)
    with Client(folder.endpoint()) as client:
        victim = client.status().workers[1]
        os.kill(victim.pid, signal.SIGKILL)
        killed = time.monotonic()
        while True:
            workers = client.status().workers
            if len(workers) == 2 and workers[1].pid != victim.pid and workers[1].state == "ready":
                break
            assert time.monotonic() - killed < 10.0 * contention()
            time.sleep(0.02)


def test_all_processes_together_hold_one_copy_of_the_weights(servers: Any, smollm2: Path) -> None:
    folder, running = servers(3)
    answers(folder.endpoint(), PROMPTS)
    with Client(folder.endpoint()) as client:
        status = client.status()
    shared = 0
    for process in running.children():
        if not any("worker" in word for word in process.cmdline()):
            continue
        segments = [m for m in psutil.Process(process.pid).memory_maps(grouped=False) if "pagedserve-" in m.path]
        shared += sum(m.pss for m in segments if "-weights" in m.path)
    assert 0.8 * smollm2.stat().st_size < shared < 1.1 * status.weights_bytes


def test_an_aborted_request_gives_its_blocks_back_within_a_second(servers: Any) -> None:
    folder, _ = servers(2)
    with Client(folder.endpoint()) as client:
        prompt = [random.Random(9).randrange(1000, 40000) for _ in range(4000)]
        stream = client.generate(prompt, max_tokens=1000, temperature=0.0, ignore_eos=True)
        assert eventually(lambda: client.status().num_referenced_blocks > 0, 5.0)
        stream.abort()
        assert eventually(lambda: client.status().num_referenced_blocks == 0, 1.0)


def test_a_client_that_is_gone_gives_its_blocks_back_within_seconds(servers: Any) -> None:
    folder, _ = servers(2)
    client = Client(folder.endpoint())
    for index in range(4):
        client.generate(PROMPTS[index], max_tokens=3000, temperature=0.0, ignore_eos=True)
    with Client(folder.endpoint()) as other:
        assert eventually(lambda: other.status().num_running == 4, 10.0)
        client.close()
        assert eventually(lambda: other.status().num_referenced_blocks == 0, 2.0)
