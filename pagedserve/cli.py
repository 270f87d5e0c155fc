"""The command line: `pagedserve up | chat | status | pull | list | show | rm | bench`. Parses; others do the work.

Every key of the configuration is a flag of every command. An expected error is one line and an exit code; a traceback
only with --debug. What a command needs is imported when it runs, so that --help comes at once.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from pagedserve import __version__
from pagedserve.config import KEYS, Config, Key, load_config
from pagedserve.contract.errors import PagedServeError

app = typer.Typer(
    name="pagedserve",
    help="A server for small language models on ordinary CPUs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The console script."""
    app(prog_name="pagedserve")


def configured(*shown: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for every key of the configuration, and the loaded Config as its first argument.

    Only the flags of the `shown` keys appear in its --help.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        file_option = typer.Option("--config", metavar="FILE", help="TOML file with settings (configs/default.toml)")
        file = inspect.Parameter(
            "config_file",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[str | None, file_option],
        )
        flags = [_flag(key, shown=key.name in shown) for key in KEYS]

        @functools.wraps(command)
        def run(*, config_file: str | None, **arguments: Any) -> None:
            values = {key.name: arguments.pop(key.name) for key in KEYS}
            debug = bool(values["debug"])
            try:
                config = load_config(values, file=config_file)
                debug = config.debug
                command(config, **arguments)
            except PagedServeError as error:
                if debug:
                    raise
                print(f"error: {error}", file=sys.stderr)
                raise typer.Exit(error.exit_code) from None

        parameters = [*own, file, *flags]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        del run.__wrapped__
        return run

    return decorate


def _flag(key: Key, *, shown: bool) -> inspect.Parameter:
    """The flag of one key. Values are text, so that load_config refuses a wrong one in the same words everywhere."""
    flag = "--" + key.name.replace("_", "-")
    boolean = key.type is bool
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if boolean else flag,
        help=f"{key.description} [{str(key.default).lower() if boolean else key.default or 'none'}]",
        metavar=None if boolean else key.type.__name__.upper().replace("STR", "TEXT"),
        hidden=not shown,
        show_default=False,
    )
    annotation: Any = Annotated[bool | None, option] if boolean else Annotated[str | None, option]
    return inspect.Parameter(key.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(f"pagedserve {__version__}")
        raise typer.Exit


@app.command()
@configured(*(key.name for key in KEYS))
def up(
    config: Config, *, until_stdin_closes: Annotated[bool, typer.Option("--until-stdin-closes", hidden=True)] = False
) -> None:
    """Start the server: scheduler, workers and HTTP API, watched until Ctrl-C or SIGTERM."""
    from pagedserve.contract.instance import Instance, own

    owner = own(Instance(config.instance))  # before anything slow: a second `up` fails at once
    from pagedserve.models.catalog import fetch_if_missing
    from pagedserve.supervisor import Supervisor

    def prepare() -> None:
        fetch_if_missing(config.model, config.models_dir)

    raise typer.Exit(Supervisor(config, owner, prepare, until_stdin_closes=until_stdin_closes).run())


@app.command()
@configured("instance", "model", "workers", "compute")
def chat(
    config: Config,
    *,
    question: Annotated[list[str] | None, typer.Argument(help="Ask this and print the answer only.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt; empty: the one of the model's template.")] = None,
    stats: Annotated[bool, typer.Option(help="Print time to first token, tokens/s and tokens from cache.")] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A sampling parameter, as temperature=0.7; may be repeated."),
    ] = None,
    endpoint: Annotated[str | None, typer.Option(help="ZeroMQ address of a server elsewhere.")] = None,
) -> None:
    """Chat with the model. Starts a server for itself when none is running."""
    from pagedserve.chat.run import run_chat

    run_chat(config, " ".join(question or ()), system=system, stats=stats, settings=settings or (), endpoint=endpoint)


@app.command()
@configured("instance")
def status(
    config: Config,
    *,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it anew every second, until Ctrl-C.")] = False,
    endpoint: Annotated[str | None, typer.Option(help="ZeroMQ address of a server elsewhere.")] = None,
) -> None:
    """Show a server's processes, requests, pool and speed."""
    from pagedserve.status import show_status

    show_status(endpoint or None, config.instance, watch=watch)


@app.command()
@configured("home")
def pull(
    config: Config,
    *,
    names: Annotated[list[str], typer.Argument(metavar="NAME|FILE|list", help="What to fetch, or list.")],
) -> None:
    """Fetch models: names of the catalogue, hf:owner/name, or files to be known by name."""
    from pagedserve.models import catalog

    if names == ["list"]:
        _print_models(config)
        return
    for name in names:
        print(f"{name}: {catalog.pull(name, config.models_dir)}")


@app.command("list")
@configured("home")
def list_(config: Config) -> None:
    """List the catalogue and the models that are here."""
    _print_models(config)


@app.command()
@configured("home")
def show(config: Config, *, name: Annotated[str, typer.Argument(help="A model's name or file.")]) -> None:
    """Show a model's shape and what it needs of memory."""
    from pagedserve.models import catalog

    facts = catalog.show(name, config.models_dir)
    spec = facts.spec
    rows = {
        "path": facts.path,
        "architecture": spec.architecture,
        "parameters": f"{facts.num_parameters:,}",
        "layers": spec.num_layers,
        "hidden size": spec.hidden_size,
        "heads": f"{spec.num_heads} ({spec.num_kv_heads} for keys and values), {spec.head_dim} wide",
        "vocabulary": f"{spec.vocab_size:,}",
        "context": f"{spec.max_model_len:,} tokens",
        "weights": f"{facts.weights_bytes:,} bytes",
        "KV cache": f"{facts.kv_bytes_per_token:,} bytes a token",
        "memory": f"{facts.memory_bytes:,} bytes for weights and one full context",
    }
    for label, value in rows.items():
        print(f"{label:<12} {value}")


@app.command()
@configured("home")
def rm(config: Config, *, names: Annotated[list[str], typer.Argument(help="Models to remove.")]) -> None:
    """Remove fetched models. A local file that was pulled stays where it is."""
    from pagedserve.models import catalog

    for name in names:
        print(f"{name}: {catalog.remove(name, config.models_dir):,} bytes freed")


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def bench(context: typer.Context) -> None:
    """Measure the kernels, or a server under load: kernels, latency, serve, context, compare."""
    import subprocess

    # Another process, since this one never loads the kernels.
    raise typer.Exit(subprocess.call([sys.executable, "-m", "bench", *context.args]))


def _print_models(config: Config) -> None:
    from pagedserve.models import catalog

    print(f"{'NAME':<16} {'HERE':<8} {'LICENCE':<20} ")
    for model in catalog.list_models(config.models_dir):
        here = f"{model.num_bytes / 1e6:.0f} MB" if model.path is not None else "-"
        print(f"{model.name:<16} {here:<8} {model.license or '-':<20} {model.summary}".rstrip())
