"""SafetensorsFiles: the tensors of a Hugging Face folder, one file or many with an index, mapped read-only.

Reads headers (https://huggingface.co/docs/safetensors) and checks that every tensor lies within its file; bfloat16,
which NumPy does not have, stays raw bytes like everything else. Never what a name means.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedserve.contract.errors import ModelError
from pagedserve.models.spec import RawTensor, TensorType

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_TYPES = {"F32": TensorType.F32, "F16": TensorType.F16, "BF16": TensorType.BF16}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class _Place:
    file: Path
    data: npt.NDArray[np.uint8]
    shape: tuple[int, ...]
    type_name: str


class SafetensorsFiles:
    """All tensors of a folder by name. ModelError names the file: missing, truncated, damaged, unsupported type."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._places: dict[str, _Place] = {}
        if (folder / SINGLE_FILE).exists():
            self._places.update(_read(folder / SINGLE_FILE))
        elif (folder / INDEX_FILE).exists():
            self._read_shards(folder / INDEX_FILE)
        else:
            raise ModelError(f"{folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}")

    def names(self) -> Iterable[str]:
        """The tensors' names."""
        return self._places.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return self._places[name].shape

    def type(self, name: str) -> TensorType:
        """How a tensor is stored; ModelError when it is none of F32, F16, BF16."""
        place = self._places[name]
        if place.type_name not in _TYPES:
            raise ModelError(
                f"{place.file}: tensor {name} has type {place.type_name}, expected one of {', '.join(_TYPES)}"
            )
        return _TYPES[place.type_name]

    def tensor(self, name: str) -> RawTensor:
        """A tensor as a view of its file."""
        return RawTensor(name, self.shape(name), self.type(name), self._places[name].data)

    def _read_shards(self, index: Path) -> None:
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            shards = sorted(set(weight_map.values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ModelError(f"{index}: damaged: expected a JSON object with a weight_map") from None
        for shard in shards:
            if Path(shard).name != shard or not (self.path / shard).exists():
                raise ModelError(f"{self.path / shard}: missing, though {index.name} names it")
            self._places.update(_read(self.path / shard))
        for name, shard in weight_map.items():
            if name not in self._places:
                raise ModelError(f"{self.path / shard}: tensor {name} is missing, though {index.name} places it here")


def _read(path: Path) -> dict[str, _Place]:
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:  # an empty file cannot be mapped
        raise ModelError(f"{path}: truncated: it is empty") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    if len(mapped) < 8:
        raise ModelError(f"{path}: truncated: the file ends within its header")
    (header_bytes,) = struct.unpack_from("<Q", mapped)
    if header_bytes > _MAX_HEADER_BYTES:
        raise ModelError(f"{path}: not a safetensors file: its header would be {header_bytes:,} bytes long")
    start = 8 + header_bytes
    if start > len(mapped):
        raise ModelError(f"{path}: truncated: the file ends within its header")
    try:
        header: dict[str, Any] = json.loads(mapped[8:start])
        entries = [
            (name, entry["dtype"], tuple(int(n) for n in entry["shape"]), *map(int, entry["data_offsets"]))
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{path}: not a safetensors file, or damaged: its header cannot be read") from None
    data = np.frombuffer(mapped, dtype=np.uint8)
    places = {}
    for name, type_name, shape, begin, end in entries:
        if start + end > len(data):
            raise ModelError(
                f"{path}: truncated: tensor {name} ends at byte {start + end:,}, the file at byte {len(data):,}"
            )
        if type_name in _TYPES and end - begin != _TYPES[type_name].num_bytes(math.prod(shape)):
            raise ModelError(f"{path}: damaged: tensor {name} {list(shape)} of {type_name} has {end - begin:,} bytes")
        places[name] = _Place(path, data[start + begin : start + end], shape, type_name)
    return places
