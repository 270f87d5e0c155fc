"""GgufFile: the header of one GGUF file (versions 2 and 3), parsed from a memory map; tensor bytes stay on disk.

The `gguf` package's own reader takes two seconds for a vocabulary of 49,000 tokens (one array object a string), so the
header is read here; the tests hold it to that reader. Knows the container only, never what a key or a tensor means.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedserve.contract.errors import ModelError
from pagedserve.models.settings import Settings
from pagedserve.models.spec import RawTensor, TensorType

MAGIC = b"GGUF"
_DEFAULT_ALIGNMENT = 32
_MAX_ARRAY_DEPTH = 4

# ggml's number of each type; the file format's, so they never change.
_TENSOR_TYPES = {
    0: TensorType.F32,
    1: TensorType.F16,
    2: TensorType.Q4_0,
    3: TensorType.Q4_1,
    6: TensorType.Q5_0,
    7: TensorType.Q5_1,
    8: TensorType.Q8_0,
    10: TensorType.Q2_K,
    11: TensorType.Q3_K,
    12: TensorType.Q4_K,
    13: TensorType.Q5_K,
    14: TensorType.Q6_K,
    20: TensorType.IQ4_NL,
    23: TensorType.IQ4_XS,
    30: TensorType.BF16,
}
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")


class GgufFile:
    """An opened GGUF file: `metadata` (all key-values as Python values) and its tensors by their names in the file.

    ModelError names the file and the reason: not GGUF, another version, truncated, an unsupported tensor type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file cannot be mapped
            raise ModelError(f"{path}: not a GGUF file: it is empty") from None
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
        self.metadata: dict[str, Any] = {}
        self._tensors: dict[str, tuple[tuple[int, ...], TensorType, int]] = {}
        try:
            self._parse()
        except (struct.error, IndexError):
            raise ModelError(f"{path}: truncated: the file ends within its header") from None
        except UnicodeDecodeError:
            raise ModelError(f"{path}: damaged: a string in its header is not UTF-8") from None
        self._data = np.frombuffer(self._map, dtype=np.uint8)
        for name, (shape, kind, offset) in self._tensors.items():
            end = offset + kind.num_bytes(int(np.prod(shape)))
            if end > len(self._data):
                raise ModelError(
                    f"{path}: truncated: tensor {name} ends at byte {end:,}, the file at byte {len(self._data):,}"
                )

    def settings(self, prefix: str = "") -> Settings:
        """Checked access to the metadata."""
        return Settings(self.path, self.metadata, prefix)

    def names(self) -> Iterable[str]:
        """The tensors' names in the file."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, outermost dimension first."""
        return self._tensors[name][0]

    def type(self, name: str) -> TensorType:
        """How a tensor is stored."""
        return self._tensors[name][1]

    def tensor(self, name: str) -> RawTensor:
        """A tensor as a view of the file."""
        shape, kind, offset = self._tensors[name]
        data: npt.NDArray[np.uint8] = self._data[offset : offset + kind.num_bytes(int(np.prod(shape)))]
        return RawTensor(name, shape, kind, data)

    def _parse(self) -> None:
        if self._map[:4] != MAGIC:
            raise ModelError(f"{self.path}: not a GGUF file: it begins with {self._map[:4]!r}, expected {MAGIC!r}")
        version, num_tensors, num_values = struct.unpack_from("<IQQ", self._map, 4)
        if version not in (2, 3):
            byte_order = " (a big-endian file)" if version & 0xFFFF == 0 else ""
            raise ModelError(f"{self.path}: GGUF version {version}{byte_order} is not supported, expected 2 or 3")
        position = 24
        for _ in range(num_values):
            key, position = self._string(position)
            (kind,) = struct.unpack_from("<I", self._map, position)
            self.metadata[key], position = self._value(kind, position + 4, depth=0)
        alignment = self.settings().integer("general.alignment", _DEFAULT_ALIGNMENT)
        if alignment == 0 or alignment & (alignment - 1):
            raise self.settings().wrong("general.alignment", "a power of two", alignment)
        entries = []
        for _ in range(num_tensors):
            name, position = self._string(position)
            (num_dims,) = struct.unpack_from("<I", self._map, position)
            if num_dims > 4:
                raise ModelError(f"{self.path}: damaged: tensor {name} has {num_dims} dimensions")
            *dims, number, offset = struct.unpack_from(f"<{num_dims}QIQ", self._map, position + 4)
            position += 4 + 8 * num_dims + 12
            entries.append((name, tuple(reversed(dims)), number, offset))
        data_start = -(-position // alignment) * alignment
        for name, shape, number, offset in entries:
            if name in self._tensors:
                raise ModelError(f"{self.path}: damaged: tensor {name} is there twice")
            if number not in _TENSOR_TYPES:
                raise ModelError(
                    f"{self.path}: tensor {name} has ggml type {number}, which is not supported; supported: "
                    f"{', '.join(kind.name for kind in _TENSOR_TYPES.values())}"
                )
            kind = _TENSOR_TYPES[number]
            if shape and shape[-1] % kind.block_size:
                raise ModelError(
                    f"{self.path}: damaged: tensor {name} {list(shape)} is no whole number of {kind.name} blocks"
                )
            self._tensors[name] = (shape, kind, data_start + offset)

    def _string(self, position: int) -> tuple[str, int]:
        (length,) = _LENGTH.unpack_from(self._map, position)
        end = position + 8 + length
        if end > len(self._map):
            raise IndexError
        return self._map[position + 8 : end].decode(), end

    def _value(self, kind: int, position: int, depth: int) -> tuple[Any, int]:
        if kind in _SCALARS:
            scalar = _SCALARS[kind]
            return scalar.unpack_from(self._map, position)[0], position + scalar.size
        if kind == _STRING:
            return self._string(position)
        if kind != _ARRAY or depth == _MAX_ARRAY_DEPTH:
            raise ModelError(f"{self.path}: damaged: unknown value type {kind} at byte {position:,}")
        item_kind, length = struct.unpack_from("<IQ", self._map, position)
        position += 12
        if item_kind in _SCALARS:
            code = _SCALARS[item_kind].format[1:]
            items = struct.unpack_from(f"<{length}{code}", self._map, position)
            return list(items), position + struct.calcsize(f"<{length}{code}")
        if item_kind == _STRING:
            return self._strings(length, position)
        values = []
        for _ in range(length):
            value, position = self._value(item_kind, position, depth + 1)
            values.append(value)
        return values, position

    def _strings(self, length: int, position: int) -> tuple[list[str], int]:
        # Inlined: a vocabulary has a hundred thousand of them.
        buffer, unpack = self._map, _LENGTH.unpack_from
        size = len(buffer)
        values = []
        for _ in range(length):
            start = position + 8
            position = start + unpack(buffer, position)[0]
            if position > size:
                raise IndexError
            values.append(buffer[start:position].decode())
        return values, position
