"""The packed layout of linear layers, and NumPy code that packs into it. Runs once a model, at start.

Outputs are cut into panels of 16, padded with zeros; a panel is one stream of blocks. Quantised types keep GGUF's own
bits; each block of 32 inputs holds 16 d (float16), for Q4_1 16 m, then the quants of 4 inputs x 16 outputs at a time:
    Q4_0, Q4_1   uint8 [4, 16 outputs, 4]: row k has inputs 8k..8k+3 in its low and 8k+4..8k+7 in its high nibbles
    Q8_0         uint8 [8, 16 outputs, 4]: weight + 128, so that it can be the unsigned side of a dot product
    floats       [n_in, 16 outputs]
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

PANEL = 16  # outputs in a panel
BLOCK = 32  # inputs in a quantised block

WTYPE_F32, WTYPE_F16, WTYPE_BF16, WTYPE_Q4_0, WTYPE_Q4_1, WTYPE_Q8_0 = range(6)

_NAMES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0")
_FLOAT_BYTES = {WTYPE_F32: 4, WTYPE_F16: 2, WTYPE_BF16: 2}
_SCALE_BYTES = {WTYPE_Q4_0: 32, WTYPE_Q4_1: 64, WTYPE_Q8_0: 32}
_QUANT_WORDS = {WTYPE_Q4_0: 4, WTYPE_Q4_1: 4, WTYPE_Q8_0: 8}  # uint32 a block and output
_FILE_BLOCKS = {
    WTYPE_Q4_0: np.dtype([("d", "<u2"), ("q", "<u4", (4,))]),
    WTYPE_Q4_1: np.dtype([("d", "<u2"), ("m", "<u2"), ("q", "<u4", (4,))]),
    WTYPE_Q8_0: np.dtype([("d", "<u2"), ("q", "<u4", (8,))]),
}
_CHUNK_WEIGHTS = 1 << 22  # converted at a time, so that the float32 copy of a tensor never exists whole

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class StorageType(Protocol):
    """A tensor type of a model file (models.spec.TensorType): its name is GGUF's."""

    @property
    def name(self) -> str:
        """For example "Q4_K"."""
        ...


def native_wtype(source: StorageType) -> int | None:
    """The weight type that keeps a file's bits, or None when there is none and it must become Q8_0."""
    return _NAMES.index(source.name) if source.name in _NAMES else None


def is_quantized(wtype: int) -> bool:
    """Whether the activations must be int8 rows (quantize.py) rather than float32."""
    return wtype in _QUANT_WORDS


def wtype_name(wtype: int) -> str:
    """A weight type's name in GGUF."""
    return _NAMES[wtype]


def block_bytes(wtype: int) -> int:
    """Bytes of one block of 32 inputs x 16 outputs of a quantised type."""
    return _SCALE_BYTES[wtype] + PANEL * 4 * _QUANT_WORDS[wtype]


def panel_bytes(wtype: int, n_in: int) -> int:
    """Bytes of one panel. ValueError when n_in is not a whole number of blocks."""
    if not is_quantized(wtype):
        return n_in * PANEL * _FLOAT_BYTES[wtype]
    if n_in % BLOCK:
        raise ValueError(f"{_NAMES[wtype]}: n_in must be a multiple of {BLOCK}, got {n_in}")
    return n_in // BLOCK * block_bytes(wtype)


def packed_bytes(wtype: int, n_out: int, n_in: int) -> int:
    """Bytes of a packed [n_out, n_in] layer."""
    return -(-n_out // PANEL) * panel_bytes(wtype, n_in)


def pack(data: Bytes, source: StorageType, wtype: int, n_out: int, n_in: int, out: Bytes | None = None) -> Bytes:
    """Pack the file's bytes of an [n_out, n_in] tensor as `wtype` into `out` (made when None), and return it.

    `wtype` is the source's own, or WTYPE_F32 (dequantised), or WTYPE_Q8_0 or WTYPE_Q4_0 (quantised anew).
    """
    if out is None:
        out = np.empty(packed_bytes(wtype, n_out, n_in), dtype=np.uint8)
    panels = out.reshape(-(-n_out // PANEL), panel_bytes(wtype, n_in))
    if native_wtype(source) == wtype:
        _pack_rows(np.ascontiguousarray(data).reshape(n_out, -1), wtype, panels)
        return out
    if wtype not in (WTYPE_F32, WTYPE_Q8_0, WTYPE_Q4_0):
        raise ValueError(f"{source.name} cannot be packed as {_NAMES[wtype]}")
    rows = data.reshape(n_out, -1)
    step = max(1, _CHUNK_WEIGHTS // (n_in * PANEL)) * PANEL
    for begin in range(0, n_out, step):
        values = to_float32(rows[begin : begin + step], source).reshape(-1, n_in)
        packed = _convert(values, wtype)
        _pack_rows(packed, wtype, panels[begin // PANEL : -(-(begin + step) // PANEL)])
    return out


def to_float32(data: Bytes, source: StorageType) -> Floats:
    """The numbers of any number of whole blocks, in order, flat."""
    wtype = native_wtype(source)
    data = np.ascontiguousarray(data).reshape(-1)
    if wtype == WTYPE_F32:
        return data.view(np.float32)
    if wtype == WTYPE_F16:
        return data.view(np.float16).astype(np.float32)
    if wtype == WTYPE_BF16:
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if wtype is None:
        return _other_to_float32(data, source)
    blocks = data.view(_FILE_BLOCKS[wtype])
    d = blocks["d"].view(np.float16).astype(np.float32)[:, None]
    quants = np.ascontiguousarray(blocks["q"]).view(np.uint8)
    if wtype == WTYPE_Q8_0:
        return np.ravel(quants.view(np.int8) * d)
    quants = np.concatenate([quants & 15, quants >> 4], axis=1)
    if wtype == WTYPE_Q4_0:
        return np.ravel((quants.astype(np.int8) - np.int8(8)) * d)
    return np.ravel(quants * d + blocks["m"].view(np.float16).astype(np.float32)[:, None])


def requantize_q8_0(values: Floats) -> Bytes:
    """float32 [n_out, n_in] as Q8_0 blocks in GGUF's format, uint8 [n_out, n_in / 32 * 34]."""
    n_out, n_in = values.shape
    groups = values.reshape(n_out, n_in // BLOCK, BLOCK)
    d = (np.abs(groups).max(axis=-1) / 127).astype(np.float16)
    inverse = np.divide(1, d, out=np.zeros(d.shape, np.float32), where=d != 0, dtype=np.float32)
    blocks = np.empty(d.shape, dtype=np.dtype([("d", "<f2"), ("q", "i1", (BLOCK,))]))
    blocks["d"] = d
    blocks["q"] = np.clip(np.rint(groups * inverse[..., None]), -127, 127)
    return blocks.view(np.uint8).reshape(n_out, -1)


def requantize_q4_0(values: Floats) -> Bytes:
    """float32 [n_out, n_in] as Q4_0 blocks, uint8 [n_out, n_in / 32 * 18]: as ggml's quantize_row_q4_0 rounds."""
    n_out, n_in = values.shape
    groups = values.reshape(n_out, n_in // BLOCK, BLOCK)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=-1)[..., None], axis=-1)  # with its sign
    d = largest / np.float32(-8)
    inverse = np.divide(1, d, out=np.zeros(d.shape, np.float32), where=d != 0, dtype=np.float32)
    quants = np.clip(np.trunc(groups * inverse + np.float32(8.5)), 0, 15).astype(np.uint8)
    blocks = np.empty(groups.shape[:2], dtype=np.dtype([("d", "<f2"), ("q", "u1", (BLOCK // 2,))]))
    blocks["d"] = d[..., 0]
    blocks["q"] = quants[..., : BLOCK // 2] | quants[..., BLOCK // 2 :] << 4
    return blocks.view(np.uint8).reshape(n_out, -1)


def _convert(values: Floats, wtype: int) -> Bytes:
    if wtype == WTYPE_F32:
        return values.view(np.uint8)
    return requantize_q8_0(values) if wtype == WTYPE_Q8_0 else requantize_q4_0(values)


def _pack_rows(rows: Bytes, wtype: int, panels: Bytes) -> None:
    """Pack rows of file bytes [n_out, …] into panels [num_panels, panel bytes]; missing outputs become zeros."""
    whole = len(rows) // PANEL
    if whole:
        _pack_whole_panels(rows[: whole * PANEL], wtype, panels[:whole])
    if whole < len(panels):
        padded = np.zeros((PANEL, rows.shape[1]), dtype=np.uint8)  # d = m = 0: weights of zero whatever the quants
        padded[: len(rows) - whole * PANEL] = rows[whole * PANEL :]
        _pack_whole_panels(padded, wtype, panels[whole:])


def _pack_whole_panels(rows: Bytes, wtype: int, panels: Bytes) -> None:
    num_panels = len(panels)
    if not is_quantized(wtype):
        element = np.uint32 if wtype == WTYPE_F32 else np.uint16
        source = rows.view(element).reshape(num_panels, PANEL, -1)
        panels.view(element).reshape(num_panels, -1, PANEL)[:] = source.transpose(0, 2, 1)
        return
    blocks = rows.view(_FILE_BLOCKS[wtype]).reshape(num_panels, PANEL, -1)
    scales = [blocks[field] for field in ("d", "m") if field in (blocks.dtype.names or ())]
    words = _QUANT_WORDS[wtype]
    target = panels.view(
        np.dtype([("scales", "<u2", (len(scales), PANEL)), ("q", "<u4", (words, PANEL))])
    )  # [num_panels, blocks]
    for index, scale in enumerate(scales):
        target["scales"][:, :, index] = scale.transpose(0, 2, 1)
    quants = blocks["q"].transpose(0, 2, 3, 1)  # [num_panels, blocks, words, 16]
    if wtype == WTYPE_Q8_0:
        np.bitwise_xor(quants, np.uint32(0x80808080), out=target["q"])
        return
    # A file's word j holds inputs 4j..4j+3 in its low and 16+4j..19+4j in its high nibbles.
    low_nibbles = np.uint32(0x0F0F0F0F)
    for word in range(4):
        first, second = quants[:, :, 2 * word % 4], quants[:, :, 2 * word % 4 + 1]
        if word < 2:
            target["q"][:, :, word] = first & low_nibbles | (second & low_nibbles) << 4
        else:
            target["q"][:, :, word] = first >> 4 & low_nibbles | second & ~low_nibbles


def _other_to_float32(data: Bytes, source: StorageType) -> Floats:
    from gguf import GGMLQuantizationType, dequantize  # slow to import, and few models need it

    kind = GGMLQuantizationType[source.name]
    values: Floats = dequantize(data, kind)
    return values.reshape(-1)
