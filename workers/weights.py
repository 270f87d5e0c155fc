"""The `weights` segment: every tensor of a checkpoint, packed once into the kernels' own layout, then only mapped.

    [0, 8)    SEALED once everything is in place
    [8, 16)   length of the header
    [16, …)   header: msgpack of WeightLayout
    …         tensors, each at an offset that is a multiple of 64

The preparing worker fills it in; a restarted worker attaches and reads the header, never the model file.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import msgpack
import msgspec
import numpy as np
import numpy.typing as npt

from pagedserve.contract import segments
from pagedserve.contract.errors import ModelError, SegmentError
from pagedserve.models.spec import Checkpoint, ModelSpec, RawTensor
from workers.kernels import linear_pack as pack

log = logging.getLogger("workers")

_ALIGNMENT = 64
_SEALED = 0x50535741_50535741
_DATA = 65536  # the header's room is what is left before this, or more pages where a model has many tensors

Bytes = npt.NDArray[np.uint8]


class Matrix(msgspec.Struct, frozen=True, array_like=True):
    """A packed linear layer or embedding: panels of 16 outputs of one weight type."""

    offset: int
    num_bytes: int
    wtype: int
    n_out: int
    n_in: int


class Vector(msgspec.Struct, frozen=True, array_like=True):
    """A norm weight, bias or table in float32."""

    offset: int
    size: int


class WeightLayout(msgspec.Struct, frozen=True):
    """Where everything is. `spec` is the model's, limited to the instance's max_model_len."""

    spec: ModelSpec
    matrices: dict[str, Matrix]
    vectors: dict[str, Vector]
    num_bytes: int


class Weights:
    """A mapped `weights` segment. `address` is where its byte 0 is in this process."""

    def __init__(self, segment: segments.Segment, layout: WeightLayout) -> None:
        self._segment = segment  # keeps the mapping alive
        self.layout = layout
        self.address = int(segment.memory.ctypes.data)

    @property
    def num_bytes(self) -> int:
        """Size of the segment."""
        return self.layout.num_bytes


def attach(tag: str) -> Weights:
    """Map the sealed segment of an instance; SegmentError when it is not complete."""
    segment = segments.attach(segments.segment_name(tag, "weights"))
    sealed, length = segment.memory[:16].view(np.uint64)
    if sealed != _SEALED:
        raise SegmentError(f"segment {segment.name} is not complete: its preparing worker died")
    layout = msgspec.convert(msgpack.unpackb(segment.memory[16 : 16 + int(length)].tobytes()), WeightLayout)
    return Weights(segment, layout)


def prepare(tag: str, checkpoint: Checkpoint, spec: ModelSpec, compute: str, quantize: str = "none") -> Weights:
    """Make, fill and seal the segment: one packed copy, tensor by tensor; nothing else of the model stays in memory.

    `compute` "f32" dequantises every matrix; "auto" keeps each one's own type (types without kernels become Q8_0), but
    for floats when `quantize` is "q8_0" or "q4_0".
    """
    layout = plan_layout(checkpoint, spec, compute, quantize)
    header = msgpack.packb(msgspec.to_builtins(layout))
    segment = segments.create(segments.segment_name(tag, "weights"), layout.num_bytes)
    memory = segment.memory
    for name, matrix in layout.matrices.items():
        out = memory[matrix.offset : matrix.offset + matrix.num_bytes]
        _pack_parts([checkpoint.tensor(part) for part in _parts(name)], matrix, out)
    for name, vector in layout.vectors.items():
        values = memory[vector.offset : vector.offset + 4 * vector.size].view(np.float32)
        values[:] = _vector_values(checkpoint, spec, layout.matrices, name)
    memory[16 : 16 + len(header)] = np.frombuffer(header, dtype=np.uint8)
    words = memory[:16].view(np.uint64)
    words[1] = len(header)
    words[0] = _SEALED
    return Weights(segment, layout)


def plan_layout(checkpoint: Checkpoint, spec: ModelSpec, compute: str, quantize: str = "none") -> WeightLayout:
    """Where each tensor will be; reads shapes and types only."""
    matrices: dict[str, Matrix] = {}
    vectors: dict[str, Vector] = {}
    offset = _DATA * (1 + spec.num_layers // 100)
    converted: dict[str, int] = {}
    for name in _matrix_names(checkpoint, spec, compute, quantize):
        parts = [checkpoint.tensor(part) for part in _parts(name)]
        wtype = packed_type(parts[0], compute, quantize)
        if wtype != pack.native_wtype(parts[0].type) and compute != "f32":
            change = f"{parts[0].type.name} to {pack.wtype_name(wtype)}"
            converted[change] = converted.get(change, 0) + len(parts)
        n_out, n_in = sum(part.shape[0] for part in parts), parts[0].shape[1]
        matrices[name] = Matrix(offset, pack.packed_bytes(wtype, n_out, n_in), wtype, n_out, n_in)
        offset = _aligned(offset + matrices[name].num_bytes)
    for change, count in sorted(converted.items()):
        log.info("%d tensors go from %s", count, change)
    for name, size in _vector_sizes(checkpoint, spec, matrices):
        vectors[name] = Vector(offset, size)
        offset = _aligned(offset + 4 * size)
    return WeightLayout(spec, matrices, vectors, offset)


def packed_type(tensor: RawTensor, compute: str, quantize: str) -> int:
    """The weight type a tensor is packed as; ModelError when its rows are not whole blocks of 32 and must be."""
    if compute == "f32":
        return pack.WTYPE_F32
    native = pack.native_wtype(tensor.type)
    whole_blocks = tensor.shape[1] % pack.BLOCK == 0
    if native is not None and (pack.is_quantized(native) or quantize == "none" or not whole_blocks):
        return native
    if not whole_blocks:
        raise ModelError(f"{tensor.name}: type {tensor.type.name} needs rows of whole blocks of {pack.BLOCK}")
    return pack.WTYPE_Q4_0 if native is not None and quantize == "q4_0" else pack.WTYPE_Q8_0


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _parts(name: str) -> list[str]:
    """The canonical tensors of a packed matrix: q, k and v are one where their types allow it."""
    prefix, _, kind = name.rpartition(".")
    return [f"{prefix}.{part}" for part in ("q", "k", "v")] if kind == "qkv" else [name]


def _matrix_names(checkpoint: Checkpoint, spec: ModelSpec, compute: str, quantize: str) -> Iterator[str]:
    yield "embed"
    for layer in range(spec.num_layers):
        prefix = f"layers.{layer}."
        types = {packed_type(checkpoint.tensor(prefix + part), compute, quantize) for part in ("q", "k", "v")}
        yield from (prefix + part for part in (("qkv",) if len(types) == 1 else ("q", "k", "v")))
        yield prefix + "o"
        if spec.gated:
            yield prefix + "gate"
        yield prefix + "up"
        yield prefix + "down"
    if not spec.tied:
        yield "head"


def _vector_sizes(
    checkpoint: Checkpoint, spec: ModelSpec, matrices: dict[str, Matrix]
) -> Iterator[tuple[str, int]]:
    names = checkpoint.names()
    done = {part for name in matrices for part in _parts(name)} | {"position_embed", "head"}
    for name in matrices:
        biases = {part + ".bias" for part in _parts(name)} & names
        if biases:
            yield name + ".bias", matrices[name].n_out
            done |= biases
    for name in sorted(names - done):
        yield name, math.prod(checkpoint.tensor(name).shape)
    if spec.position == "learned":
        yield "position_embed", spec.max_model_len * spec.hidden_size
    for index, rope in enumerate(spec.ropes):
        yield f"rope.{index}.cos", spec.max_model_len * len(rope.inv_freq)
        yield f"rope.{index}.sin", spec.max_model_len * len(rope.inv_freq)


def _vector_values(
    checkpoint: Checkpoint, spec: ModelSpec, matrices: dict[str, Matrix], name: str
) -> npt.NDArray[np.float32]:
    if name.startswith("rope."):
        _, index, function = name.split(".")
        rope = spec.ropes[int(index)]
        angles = np.outer(np.arange(spec.max_model_len, dtype=np.float64), np.array(rope.inv_freq))
        table = (np.cos if function == "cos" else np.sin)(angles) * rope.attention_factor
        return table.astype(np.float32).reshape(-1)
    matrix = name.removesuffix(".bias")
    if name.endswith(".bias") and matrix in matrices:
        return np.concatenate([_bias_values(checkpoint, part) for part in _parts(matrix)])
    values = _float_values(checkpoint, name)
    return values[: spec.max_model_len * spec.hidden_size] if name == "position_embed" else values


def _bias_values(checkpoint: Checkpoint, part: str) -> npt.NDArray[np.float32]:
    """The bias of one linear layer; zeros where a sibling has one and it has none."""
    if part + ".bias" in checkpoint.names():
        return _float_values(checkpoint, part + ".bias")
    return np.zeros(checkpoint.tensor(part).shape[0], dtype=np.float32)


def _float_values(checkpoint: Checkpoint, name: str) -> npt.NDArray[np.float32]:
    tensor = checkpoint.tensor(name)
    return pack.to_float32(tensor.data, tensor.type)


def _pack_parts(parts: list[RawTensor], matrix: Matrix, out: Bytes) -> None:
    """Pack each part into its panels; a part's outputs are whole panels, or it is the only one."""
    begin = 0
    for part in parts:
        n_out = part.shape[0]
        end = begin + pack.packed_bytes(matrix.wtype, n_out, matrix.n_in)
        pack.pack(part.data, part.type, matrix.wtype, n_out, matrix.n_in, out[begin:end])
        begin = end
