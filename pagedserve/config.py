"""Configuration: every setting with its default, type and one line on it, and the order in which sources override.

Defaults < TOML file (--config, or PAGEDSERVE_CONFIG) < PAGEDSERVE_<KEY> in the environment < command-line flags. This
is the only module that reads the environment; everything else takes the numbers it needs.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from pagedserve.contract.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX = "PAGEDSERVE_"
_FILE_VARIABLE = PREFIX + "CONFIG"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All settings, flat. The descriptions are the flags' help and the comments of configs/default.toml."""

    instance: Annotated[str, Meta(description="name of this server: its run folder, sockets and shared memory")] = (
        "default"
    )
    model: Annotated[
        str, Meta(description="catalogue name, GGUF file, Hugging Face folder, or demo (needs no file)")
    ] = "smollm2"
    workers: Annotated[int, Meta(ge=0, le=64, description="worker processes; 0: one for each core we may use")] = 0
    compute: Annotated[
        Literal["auto", "f32"], Meta(description="auto: int8 activations on quantised weights; f32: float32 throughout")
    ] = "auto"
    quantize: Annotated[
        Literal["none", "q8_0", "q4_0"], Meta(description="what float weights become at load; none: they stay")
    ] = "none"
    isa: Annotated[
        Literal["auto", "avx512", "avx2", "generic"],
        Meta(description="instruction set of the kernels; auto: the best here"),
    ] = "auto"
    block_size: Annotated[
        int, Meta(ge=16, le=256, multiple_of=16, description="tokens in one block of the KV pool")
    ] = 16
    pool_tokens: Annotated[int, Meta(ge=0, description="size of the KV pool in tokens; 0: from pool_bytes")] = 0
    pool_bytes: Annotated[
        int, Meta(ge=0, description="size of the KV pool in bytes; 0: a share of the free memory")
    ] = 0
    max_num_batched_tokens: Annotated[int, Meta(ge=1, le=65536, description="token budget of one step")] = 512
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096, description="sequences that run at once, at most")] = 256
    max_model_len: Annotated[
        int, Meta(ge=0, description="longest prompt plus output in tokens; 0: the model's own")
    ] = 0
    max_waiting: Annotated[int, Meta(ge=1, description="requests that may wait; more are refused")] = 1024
    num_speculative_tokens: Annotated[int, Meta(ge=0, le=16, description="tokens drafted by prompt lookup; 0: off")] = 0
    prefix_caching: Annotated[bool, Meta(description="reuse the blocks of prompts that begin alike")] = True
    tcp_endpoint: Annotated[
        str, Meta(description="ZeroMQ address for clients besides the ipc one, as tcp://127.0.0.1:5555; empty: none")
    ] = ""
    http: Annotated[bool, Meta(description="serve the OpenAI-compatible API and the chat page")] = True
    http_host: Annotated[str, Meta(description="address that the API listens on")] = "127.0.0.1"
    http_port: Annotated[int, Meta(ge=1, le=65535, description="port that the API listens on")] = 8000
    http_api_key: Annotated[
        str, Meta(description="key that HTTP clients must send, as a bearer token; empty: none needed")
    ] = ""
    http_cors_origins: Annotated[
        str, Meta(description="web origins whose pages may use the API, separated by commas, or *; empty: none")
    ] = ""
    http_max_body_bytes: Annotated[int, Meta(ge=1024, description="largest HTTP request body")] = 8_388_608
    http_request_timeout_s: Annotated[
        int, Meta(ge=0, description="seconds after which an HTTP request is ended; 0: never")
    ] = 600
    home: Annotated[str, Meta(description="folder of downloaded models and compiled kernels")] = "~/.cache/pagedserve"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least severe kind of log line to print")
    ] = "info"
    debug: Annotated[bool, Meta(description="print tracebacks with errors")] = False

    @property
    def models_dir(self) -> Path:
        """The folder of downloaded models; it may not exist yet."""
        return Path(self.home) / "models"


class Key(msgspec.Struct, frozen=True):
    """One setting as documentation: `type` is bool, int or str."""

    name: str
    type: type
    default: bool | int | str
    description: str
    expected: str  # "an integer >= 0", for messages


def load_config(
    flags: Mapping[str, object] | None = None,
    *,
    file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """The Config of these flags (None values are unset), this file and this environment (default: the process's).

    `home` becomes an absolute path. ConfigError names the source, the key and what was expected. Every PAGEDSERVE_
    variable must be a known key.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, object] = {}
    path = file or environ.get(_FILE_VARIABLE)
    if path:
        for key, value in _read_toml(Path(path)).items():
            values[key] = _checked(key, value, f"{path}: {key}")
    for variable, text in sorted(environ.items()):
        if variable.startswith(PREFIX) and variable != _FILE_VARIABLE:
            key = variable[len(PREFIX) :].lower()
            values[key] = _checked(key, text, f"environment: {variable}", from_text=True)
    for key, value in (flags or {}).items():
        if value is not None:
            values[key] = _checked(key, value, f"--{key.replace('_', '-')}", from_text=True)
    if values.get("pool_tokens") and values.get("pool_bytes"):
        raise ConfigError("pool_tokens: expected at most one of pool_tokens and pool_bytes, got both")
    values["home"] = str(Path(str(values.get("home", Config().home))).expanduser().absolute())
    return Config(**values)  # type: ignore[arg-type]


def environment(config: Config) -> dict[str, str]:
    """The variables that make a child process load this same Config, whatever file or flags made it."""
    variables = {PREFIX + key.name.upper(): _to_text(getattr(config, key.name)) for key in KEYS}
    return variables | {_FILE_VARIABLE: ""}


def child_environment(config: Config) -> dict[str, str]:
    """The whole environment for a child process of this server: the Config, and no thread pools beside our team."""
    threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**os.environ, **threads, **environment(config), "PYTHONUNBUFFERED": "1"}


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            values: dict[str, Any] = tomllib.load(file)
            return values
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from None


def _checked(name: str, value: object, source: str, *, from_text: bool = False) -> object:
    """The value in its key's type; `from_text` also reads numbers and booleans out of strings."""
    if name not in _HINTS:
        close = difflib.get_close_matches(name, _HINTS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(_HINTS)}"
        raise ConfigError(f"{source}: unknown key, {hint}")
    try:
        return msgspec.convert(value, _HINTS[name], strict=not from_text)
    except msgspec.ValidationError:
        expected = next(key.expected for key in KEYS if key.name == name)
        raise ConfigError(f"{source}: expected {expected}, got {value!r}") from None


def _to_text(value: bool | int | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _key(name: str, hint: Any, default: bool | int | str) -> Key:
    base, meta = get_args(hint)
    if get_origin(base) is Literal:
        return Key(name, str, default, meta.description, f"one of {', '.join(get_args(base))}")
    expected = {bool: "true or false", int: "an integer", str: "a string"}[base]
    if meta.multiple_of:
        expected = f"a multiple of {meta.multiple_of}"
    if meta.ge is not None:
        expected += f" >= {meta.ge}" if meta.le is None else f" within {meta.ge}..{meta.le}"
    return Key(name, base, default, meta.description, expected)


_HINTS: Mapping[str, Any] = get_type_hints(Config, include_extras=True)
KEYS = tuple(_key(field.name, _HINTS[field.name], field.default) for field in msgspec.structs.fields(Config))
