"""FileCheckpoint: a spec and a file of tensors, joined by canonical names. Checks every shape when it is opened.

Owns the lookup only: containers are gguf_file's and safetensors_files', names are the families'.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from pagedserve.contract.errors import ModelError
from pagedserve.models.family import Expected
from pagedserve.models.spec import GenerationDefaults, ModelSpec, RawTensor, TensorType


class TensorFile(Protocol):
    """Named tensors of a file or folder, mapped."""

    path: Path

    def names(self) -> Iterable[str]:
        """The tensors' names in the file."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, from the header alone."""
        ...

    def type(self, name: str) -> TensorType:
        """How a tensor is stored, from the header alone."""
        ...

    def tensor(self, name: str) -> RawTensor:
        """A tensor as a view of the file."""
        ...


class FileCheckpoint:
    """An opened model (see spec.Checkpoint). ModelError when a tensor is missing, left over or of the wrong shape."""

    def __init__(
        self,
        spec: ModelSpec,
        generation: GenerationDefaults,
        file: TensorFile,
        expected: Mapping[str, Expected],
        ignored: Iterable[str] = (),
    ) -> None:
        self.spec = spec
        self.generation = generation
        self._file = file
        present = set(file.names())
        self._expected = {name: e for name, e in expected.items() if e.file_name in present or not e.optional}
        for e in self._expected.values():
            if e.file_name not in present:
                raise ModelError(f"{file.path}: tensor {e.file_name} is missing, expected {list(_shape_in_file(e))}")
            if file.shape(e.file_name) != _shape_in_file(e):
                raise ModelError(
                    f"{file.path}: tensor {e.file_name} has shape {list(file.shape(e.file_name))}, "
                    f"expected {list(_shape_in_file(e))}"
                )
        extra = present.difference((e.file_name for e in self._expected.values()), ignored)
        if extra:
            raise ModelError(
                f"{file.path}: tensor {min(extra)} is not part of a {spec.architecture} model"
                + (f" (and {len(extra) - 1} more)" if len(extra) > 1 else "")
            )

        self.num_parameters = sum(math.prod(e.shape) for e in self._expected.values())
        self.weights_bytes = sum(file.type(e.file_name).num_bytes(math.prod(e.shape)) for e in self._expected.values())

    def names(self) -> frozenset[str]:
        """The canonical names present."""
        return frozenset(self._expected)

    def tensor(self, name: str) -> RawTensor:
        """One tensor by canonical name, outputs first; ModelError when the model has none of that name."""
        if name not in self._expected:
            raise ModelError(f"{self._file.path}: this {self.spec.architecture} model has no tensor {name}")
        expected = self._expected[name]
        raw = self._file.tensor(expected.file_name)
        if expected.transposed:
            element = raw.type.block_bytes
            rows = raw.data.reshape(*raw.shape, element).swapaxes(0, 1)
            if expected.rows is not None:
                rows = rows[expected.rows[0] : expected.rows[1]]
            data = np.ascontiguousarray(rows).reshape(-1)
        elif expected.rows is not None:
            begin, end, total = expected.rows
            row_bytes = len(raw.data) // total
            data = raw.data[begin * row_bytes : end * row_bytes]
        else:
            data = raw.data
        return RawTensor(name, expected.shape, raw.type, data)


def _shape_in_file(expected: Expected) -> tuple[int, ...]:
    shape = expected.shape
    if expected.rows is not None:
        shape = (expected.rows[2], *shape[1:])
    return shape[::-1] if expected.transposed else shape
