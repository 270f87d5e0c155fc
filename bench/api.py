"""`api`: what HTTP costs: the same load over ZeroMQ and over HTTP in turn, and the CPU of the process in between."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

import pagedserve
from bench.http_target import HttpTarget
from bench.load import Target, put_load
from bench.measures import summarize
from bench.report import number
from bench.serving import Options
from bench.workloads import Workload
from bench.zmq_target import ZmqTarget
from pagedserve.client import AsyncClient
from pagedserve.config import Config, child_environment
from pagedserve.contract.errors import ServerUnavailableError
from pagedserve.models.catalog import fetch_if_missing
from pagedserve.private_server import PrivateServer

_START_S = 30.0


def run_api(
    config: Config, workload: Workload, options: Options, console: Console
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The setup, and one result: both throughputs, their ratio, and the API's CPU."""
    path = fetch_if_missing(config.model, config.models_dir, console.print)
    config = msgspec.structs.replace(config, model=str(path))
    with PrivateServer(config) as server, _api(config, server.instance) as (process, url):
        result = asyncio.run(_measure(server.endpoint, url, process, workload, options, console))
    return {"seed": options.seed, "repeat": options.repeat, "model": Path(config.model).name}, [result]


def print_api(console: Console, results: list[dict[str, Any]]) -> None:
    """The result as a table."""
    (result,) = results
    table = Table(title=f"HTTP beside ZeroMQ, {result['name']}", title_justify="left")
    table.add_column("")
    table.add_column("ZeroMQ", justify="right")
    table.add_column("HTTP", justify="right")
    for name, key in (
        ("Output token throughput (tok/s)", "output_throughput"),
        ("Median TTFT (ms)", "median_ttft_ms"),
        ("Median TPOT (ms)", "median_tpot_ms"),
    ):
        table.add_row(name, number(result["zmq"][key]), number(result["http"][key]))
    table.add_row("Ratio of throughputs (HTTP / ZeroMQ, median of pairs)", "", number(result["ratio"]))
    table.add_row("CPU of the API's process (cores)", "", number(result["api_cores"]))
    table.add_row("CPU of the API's process per output token (µs)", "", number(result["api_us_per_token"]))
    console.print(table)


async def _measure(
    endpoint: str, url: str, api: psutil.Process, workload: Workload, options: Options, console: Console
) -> dict[str, Any]:
    async with AsyncClient(endpoint) as client:
        await client.load_text()
        zmq = ZmqTarget(client)
        runs: dict[str, list[dict[str, Any]]] = {"zmq": [], "http": []}
        cpu_s, num_tokens, duration_s = 0.0, 0, 0.0
        for repetition in range(options.repeat + 1):  # the first pair warms up
            prompts = workload.prompts(options.seed + repetition, zmq.vocab_size)
            zmq.new_run()
            http = HttpTarget(url, extra_body={"cache_salt": secrets.token_hex(8)})
            await http.connect()
            pair = {}
            for name, target in (("zmq", zmq), ("http", http)):
                before = sum(api.cpu_times()[:2])
                pair[name] = await _run(target, workload, prompts, options.seed + repetition)
                if name == "http" and repetition:
                    cpu_s += sum(api.cpu_times()[:2]) - before
                    num_tokens += pair[name]["total_output_tokens"]
                    duration_s += pair[name]["duration"]
            if repetition:
                for name, run in pair.items():
                    runs[name].append(run)
                ratio = pair["http"]["output_throughput"] / pair["zmq"]["output_throughput"]
                console.print(f"pair {repetition} of {options.repeat}: HTTP {ratio:.3f} of ZeroMQ")
    ratios = [
        http_run["output_throughput"] / zmq_run["output_throughput"]
        for zmq_run, http_run in zip(runs["zmq"], runs["http"], strict=True)
    ]
    return {
        "name": workload.name,
        **{name: min(of_name, key=lambda run: float(run["duration"])) for name, of_name in runs.items()},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "api_cores": cpu_s / duration_s,
        "api_us_per_token": 1e6 * cpu_s / num_tokens,
    }


async def _run(target: Target, workload: Workload, prompts: list[list[int]], seed: int) -> dict[str, Any]:
    requests, duration_s = await put_load(target, workload, prompts, seed, lambda _: None)
    if errors := {request.error for request in requests if request.error is not None}:
        raise RuntimeError("; ".join(sorted(errors)))
    return summarize(requests, duration_s)


@contextlib.contextmanager
def _api(config: Config, instance: str) -> Iterator[tuple[psutil.Process, str]]:
    """The API in front of an instance, as `up` starts it: its process and its URL."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    own = msgspec.structs.replace(config, instance=instance, http_port=port, log_level="info")
    process = subprocess.Popen(
        [sys.executable, "-m", "pagedserve.api"],
        env=child_environment(own),
        cwd=Path(pagedserve.__file__).parents[1],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_connected(port)
        yield psutil.Process(process.pid), f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _wait_connected(port: int) -> None:
    target, deadline = HttpTarget(f"http://127.0.0.1:{port}"), time.monotonic() + _START_S
    while True:
        try:
            asyncio.run(target.connect())
            return
        except (OSError, RuntimeError) as error:
            if time.monotonic() > deadline:
                raise ServerUnavailableError(f"the API does not start: {error}") from None
            time.sleep(0.1)
