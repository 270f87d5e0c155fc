"""Configuration: the order of sources, and what each kind of mistake is told."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from pagedserve import config
from pagedserve.contract.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT_TOML = Path(__file__).parents[2] / "configs" / "default.toml"


def test_default_toml_holds_every_key_with_its_default_and_its_description() -> None:
    text = DEFAULT_TOML.read_text()
    values = tomllib.loads(text)
    assert values == {key.name: key.default for key in config.KEYS}
    comments = dict(re.findall(r"^# (.*)\n(?:\w+)( = )", text, re.M))
    assert len(comments) == len(config.KEYS)
    for key in config.KEYS:
        assert f"# {key.description} ({key.expected})\n{key.name} = " in text


def test_default_toml_loads_as_the_defaults() -> None:
    assert config.load_config(file=DEFAULT_TOML, environ={}) == config.load_config(environ={})


def test_flags_override_environment_overrides_file_overrides_defaults(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("block_size = 32\nworkers = 3\nmodel = 'a'\n")
    environ = {"PAGEDSERVE_WORKERS": "4", "PAGEDSERVE_MODEL": "b", "PAGEDSERVE_CONFIG": str(file)}
    loaded = config.load_config({"model": "c", "workers": None}, environ=environ)
    assert (loaded.block_size, loaded.workers, loaded.model) == (32, 4, "c")


def test_a_file_given_by_flag_replaces_the_one_of_the_environment(tmp_path: Path) -> None:
    (tmp_path / "flag.toml").write_text("workers = 5\n")
    loaded = config.load_config(
        file=tmp_path / "flag.toml", environ={"PAGEDSERVE_CONFIG": str(tmp_path / "missing.toml")}
    )
    assert loaded.workers == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wrokers = 2", "{file}: wrokers: unknown key, did you mean workers?"),
        ("workers = 'two'", "{file}: workers: expected an integer within 0..64, got 'two'"),
        ("workers = 2.5", "{file}: workers: expected an integer within 0..64, got 2.5"),
        ("workers = true", "{file}: workers: expected an integer within 0..64, got True"),
        ("workers = -1", "{file}: workers: expected an integer within 0..64, got -1"),
        ("block_size = 17", "{file}: block_size: expected a multiple of 16 within 16..256, got 17"),
        ("http = 1", "{file}: http: expected true or false, got 1"),
        ("compute = 'fast'", "{file}: compute: expected one of auto, f32, got 'fast'"),
        ("model = 3", "{file}: model: expected a string, got 3"),
        (
            "pool_tokens = 1\npool_bytes = 1",
            "pool_tokens: expected at most one of pool_tokens and pool_bytes, got both",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_file_key_and_expectation(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.load_config(file=file, environ={})
    assert str(caught.value) == message.format(file=file)
    assert caught.value.exit_code == 2


def test_a_file_that_is_not_toml_or_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml: No such file"):
        config.load_config(file=tmp_path / "missing.toml", environ={})
    (tmp_path / "bad.toml").write_text("workers = = 2")
    with pytest.raises(ConfigError, match=r"bad\.toml: not a TOML file: "):
        config.load_config(file=tmp_path / "bad.toml", environ={})


def test_environment_values_are_read_from_text_and_mistakes_name_the_variable() -> None:
    loaded = config.load_config(environ={"PAGEDSERVE_HTTP": "false", "PAGEDSERVE_POOL_TOKENS": "4096"})
    assert (loaded.http, loaded.pool_tokens) == (False, 4096)
    with pytest.raises(ConfigError) as caught:
        config.load_config(environ={"PAGEDSERVE_HTTP_PORT": "70000"})
    assert str(caught.value) == "environment: PAGEDSERVE_HTTP_PORT: expected an integer within 1..65535, got '70000'"
    with pytest.raises(ConfigError, match="environment: PAGEDSERVE_WORKER: unknown key, did you mean workers"):
        config.load_config(environ={"PAGEDSERVE_WORKER": "2"})


def test_flag_mistakes_name_the_flag() -> None:
    with pytest.raises(ConfigError) as caught:
        config.load_config({"block_size": "x"}, environ={})
    assert str(caught.value) == "--block-size: expected a multiple of 16 within 16..256, got 'x'"


def test_the_environment_of_a_config_loads_as_the_same_config(tmp_path: Path) -> None:
    original = config.load_config({"workers": 3, "http": False, "model": "a b", "pool_bytes": 123}, environ={})
    assert config.load_config(environ=config.environment(original)) == original


def test_home_becomes_an_absolute_path_and_models_live_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config.load_config(environ={}).models_dir == tmp_path / ".cache" / "pagedserve" / "models"
    monkeypatch.chdir(tmp_path)
    assert config.load_config({"home": "here"}, environ={}).home == str(tmp_path / "here")
