"""`python -m bench`, which is `pagedserve bench`: parses, and calls what measures.

What compiles kernels is imported by the commands that need it, once the workers' instruction set and cache are chosen.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.compare import print_comparison
from bench.report import document, print_serving, write_json
from bench.serving import Options, run_workloads
from bench.workloads import LATENCY, PRESETS, SERVE, Workload
from pagedserve.cli import configured
from pagedserve.config import Config
from pagedserve.contract.errors import ConfigError
from pagedserve.cores import usable_cores
from workers.isa import kernel_environment

app = typer.Typer(
    name="pagedserve bench",
    help="Measure the kernels, or a server under load. Results can be kept as JSON and compared.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_SERVER_FLAGS = ("instance", "model", "workers", "compute", "isa")

_Names = Annotated[
    list[str] | None, typer.Argument(metavar="[WORKLOAD]...", help=f"Of {', '.join(PRESETS)}; or none, and a shape.")
]
_NumPrompts = Annotated[int | None, typer.Option(min=1, help="Requests.")]
_InputLen = Annotated[int | None, typer.Option(min=1, help="Prompt tokens of each request.")]
_OutputLen = Annotated[int | None, typer.Option(min=1, help="Output tokens of each request.")]
_SharedLen = Annotated[int | None, typer.Option(min=0, help="Tokens that all prompts begin with, before their own.")]
_Url = Annotated[str, typer.Option(help="Measure this OpenAI-compatible server, over HTTP.")]
_ApiKey = Annotated[str, typer.Option(help="Bearer token for --url.")]
_ExtraBody = Annotated[str, typer.Option(metavar="JSON", help="Fields to add to each request to --url.")]
_Endpoint = Annotated[str | None, typer.Option(help="ZeroMQ address of a server elsewhere.")]
_Seed = Annotated[int, typer.Option(help="Of prompts and arrivals.")]
_Repeat = Annotated[int, typer.Option(min=1, help="Run each workload so often, and report the median run.")]
_Label = Annotated[str, typer.Option(help="A name for the result.")]
_Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result here as well.")]


@app.command()
@configured("workers", "isa")
def kernels(
    config: Config,
    *,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw a roofline here (PNG).")] = None,
    label: _Label = "",
    json_file: _Json = None,
) -> None:
    """Attention and linear layers by themselves, beside this machine's peaks: tables, JSON, a roofline plot."""
    _prepare_numba(config)
    from bench.kernels import print_kernels, run_kernels
    from bench.roofline import draw_roofline

    setup, results = run_kernels(config.workers or usable_cores().number, Console(stderr=True))
    print_kernels(Console(), setup, results)
    if json_file is not None:
        write_json(json_file, document("kernels", label, setup, results))
    if plot is not None:
        draw_roofline(plot, setup, results)


@app.command()
@configured(*_SERVER_FLAGS)
def latency(
    config: Config,
    *,
    names: _Names = None,
    num_prompts: _NumPrompts = None,
    input_len: _InputLen = None,
    output_len: _OutputLen = None,
    url: _Url = "",
    api_key: _ApiKey = "",
    extra_body: _ExtraBody = "{}",
    endpoint: _Endpoint = None,
    seed: _Seed = 1,
    repeat: _Repeat = 1,
    label: _Label = "",
    json_file: _Json = None,
) -> None:
    """One request after the other: time to first token, time per output token (decode1 and ttft1k, or a shape)."""
    shape = {"num_prompts": num_prompts, "input_len": input_len, "output_len": output_len}
    workloads = _workloads(names, LATENCY, Workload("custom", 1, 4, 128, 128), shape)
    options = Options(seed, repeat, url, api_key, _parsed(extra_body), endpoint)
    _measure("latency", config, workloads, options, label, json_file)


@app.command()
@configured(*_SERVER_FLAGS)
def serve(
    config: Config,
    *,
    names: _Names = None,
    num_prompts: _NumPrompts = None,
    input_len: _InputLen = None,
    output_len: _OutputLen = None,
    shared_len: _SharedLen = None,
    concurrency: Annotated[int | None, typer.Option(min=0, help="Requests at once, at most; 0: no limit.")] = None,
    request_rate: Annotated[
        float | None, typer.Option(min=0, help="Requests that arrive a second, at random; 0: all at once.")
    ] = None,
    url: _Url = "",
    api_key: _ApiKey = "",
    extra_body: _ExtraBody = "{}",
    endpoint: _Endpoint = None,
    seed: _Seed = 1,
    repeat: _Repeat = 1,
    label: _Label = "",
    json_file: _Json = None,
) -> None:
    """Many requests at once: throughput and latencies (conc8, conc32 and prefix, or a shape)."""
    shape = {
        "num_prompts": num_prompts,
        "input_len": input_len,
        "output_len": output_len,
        "shared_len": shared_len,
        "concurrency": concurrency,
        "request_rate": request_rate,
    }
    workloads = _workloads(names, SERVE, Workload("custom", 8, 32, 128, 64), shape)
    options = Options(seed, repeat, url, api_key, _parsed(extra_body), endpoint)
    _measure("serve", config, workloads, options, label, json_file)


@app.command()
@configured("model", "workers", "compute", "isa")
def api(
    config: Config,
    *,
    name: Annotated[str, typer.Argument(metavar="[WORKLOAD]", help=f"One of {', '.join(PRESETS)}.")] = "conc32",
    seed: _Seed = 1,
    repeat: _Repeat = 3,
    label: _Label = "",
    json_file: _Json = None,
) -> None:
    """What HTTP costs: the same load over ZeroMQ and over HTTP, and the CPU of the API's process."""
    from bench.api import print_api, run_api

    (workload,) = _workloads([name], SERVE, PRESETS["conc32"], {})
    setup, results = run_api(config, workload, Options(seed, repeat), Console(stderr=True))
    print_api(Console(), results)
    if json_file is not None:
        write_json(json_file, document("api", label, setup, results))


@app.command()
@configured(*_SERVER_FLAGS)
def context(
    config: Config,
    *,
    max_len: Annotated[int, typer.Option(min=512, help="Longest prompt plus output.")] = 8192,
    seed: _Seed = 1,
    label: _Label = "",
    json_file: _Json = None,
) -> None:
    """TTFT and TPOT against context length, beside the slopes that the arithmetic predicts."""
    _prepare_numba(config)
    from bench.context import LENGTHS, print_context, run_context

    lengths = [length for length in LENGTHS if length <= max_len]
    num_cores = config.workers or usable_cores().number
    setup, results = run_context(config, lengths, num_cores, Options(seed), Console(stderr=True))
    print_context(Console(), setup, results)
    if json_file is not None:
        write_json(json_file, document("context", label, setup, results))


@app.command()
@configured()
def compare(
    config: Config,
    *,
    a: Annotated[Path, typer.Argument(metavar="A.json")],
    b: Annotated[Path, typer.Argument(metavar="B.json")],
) -> None:
    """Print the ratios of two results."""
    print_comparison(Console(), a, b)


def _prepare_numba(config: Config) -> None:
    """Set the environment that Numba reads once, when it is first imported."""
    environment = kernel_environment(config.isa, Path(config.home))
    os.environ.update(environment)
    Path(environment["NUMBA_CACHE_DIR"]).mkdir(parents=True, exist_ok=True)


def _measure(
    benchmark: str, config: Config, workloads: Sequence[Workload], options: Options, label: str, json_file: Path | None
) -> None:
    console = Console(stderr=True)
    setup, results = run_workloads(config, workloads, options, console)
    print_serving(Console(), results)
    if json_file is not None:
        write_json(json_file, document(benchmark, label, setup, results))


def _workloads(
    names: list[str] | None, default: Sequence[str], custom: Workload, shape: Mapping[str, int | float | None]
) -> list[Workload]:
    """The named presets, or one of the given shape; ConfigError for both, or for an unknown name."""
    given = {key: value for key, value in shape.items() if value is not None}
    if given and names:
        raise ConfigError(f"{', '.join(names)}: expected workloads or a shape (--num-prompts, …), got both")
    if given:
        return [Workload(**{**custom.__dict__, **given})]
    for name in names or ():
        if name not in PRESETS:
            raise ConfigError(f"unknown workload {name!r}, expected some of {', '.join(PRESETS)}")
    return [PRESETS[name] for name in names or default]


def _parsed(extra_body: str) -> dict[str, object]:
    try:
        fields = json.loads(extra_body)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ConfigError(f"--extra-body: expected a JSON object, got {extra_body!r}")
    return fields


if __name__ == "__main__":
    app(prog_name="pagedserve bench")
