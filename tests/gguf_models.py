"""Writes GGUF files for tests with the `gguf` package: any checkpoint, with the names and the row order GGUF wants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from pagedserve.models.spec import Checkpoint
from tests.twin_model import dequantize

Weights = dict[str, npt.NDArray[np.float32]]

_NAMES = {
    "embed": "token_embd",
    "position_embed": "position_embd",
    "final_norm": "output_norm",
    "head": "output",
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "ffn_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def gguf_weights(checkpoint: Checkpoint) -> Weights:
    """All tensors of a checkpoint under GGUF's names: llama's q and k rows in adjacent pairs, GPT-2's qkv in one."""
    spec = checkpoint.spec
    weights: Weights = {}
    for canonical in checkpoint.names():
        *layer, name = canonical.removesuffix(".bias").split(".")
        values = dequantize(checkpoint.tensor(canonical), np.float32)
        if spec.architecture in ("llama", "mistral") and name in ("q", "k"):
            heads = values.reshape(-1, 2, spec.head_dim // 2, *values.shape[1:])
            values = heads.swapaxes(1, 2).reshape(values.shape)
        ending = ".bias" if canonical.endswith(".bias") else ".weight"
        weights[(f"blk.{layer[1]}." if layer else "") + _NAMES[name] + ending] = values
    if spec.architecture == "gpt2":
        for layer_id in range(spec.num_layers):
            for ending in (".weight", ".bias"):
                parts = [weights.pop(f"blk.{layer_id}.attn_{name}{ending}") for name in "qkv"]
                weights[f"blk.{layer_id}.attn_qkv{ending}"] = np.concatenate(parts)
    if spec.architecture == "llama":
        base = np.asarray(spec.ropes[0].inv_freq)
        plain = 10000.0 ** (-2.0 * np.arange(len(base)) / spec.head_dim)
        if not np.allclose(base, plain):
            weights["rope_freqs.weight"] = (plain / base).astype(np.float32)
    return weights


def gguf_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """The key-values of a checkpoint, with a rope base of 10,000 (the rest goes into rope_freqs)."""
    spec = checkpoint.spec
    architecture = "llama" if spec.architecture == "mistral" else spec.architecture
    eps = "attention.layer_norm_rms_epsilon" if spec.norm == "rms" else "attention.layer_norm_epsilon"
    settings = {
        "block_count": spec.num_layers,
        "context_length": spec.max_model_len,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.intermediate_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        eps: spec.norm_eps,
    }
    if spec.position == "rope":
        settings |= {"rope.freq_base": 10000.0, "rope.dimension_count": spec.head_dim}
    if spec.layers[0].sliding_window:
        settings["attention.sliding_window"] = spec.layers[0].sliding_window
    tokens = [f"<{i}>" for i in range(spec.vocab_size)]
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": value for key, value in settings.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 0,
    }


def write_gguf(
    path: Path,
    settings: Mapping[str, Any],
    weights: Mapping[str, npt.NDArray[Any]],
    type_of: Callable[[str], str] = lambda name: "F32",
) -> Path:
    """Write a file; `type_of` names each tensor's type (1-D ones stay F32). The path."""
    writer = gguf.GGUFWriter(path, settings["general.architecture"])
    for key, value in settings.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, values in weights.items():
        kind = gguf.GGMLQuantizationType[type_of(name) if values.ndim > 1 else "F32"]
        if kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tiny_gemma3(path: Path, type_of: Callable[[str], str] = lambda name: "F32") -> Path:
    """A random Gemma 3 of seven layers: head_dim 32, two heads on one kv head, a window of eight."""
    random = np.random.default_rng(3)
    hidden, inner, head_dim = 64, 128, 32

    def linear(num_out: int, num_in: int) -> npt.NDArray[np.float32]:
        return (random.standard_normal((num_out, num_in)) * num_in**-0.5).astype(np.float32)

    def norm(size: int) -> npt.NDArray[np.float32]:
        return random.uniform(0.5, 1.5, size).astype(np.float32)

    weights: Weights = {"token_embd.weight": linear(96, hidden), "output_norm.weight": norm(hidden)}
    for layer in range(7):
        weights |= {
            f"blk.{layer}.{name}.weight": values
            for name, values in {
                "attn_norm": norm(hidden),
                "attn_q": linear(2 * head_dim, hidden),
                "attn_k": linear(head_dim, hidden),
                "attn_v": linear(head_dim, hidden),
                "attn_output": linear(hidden, 2 * head_dim),
                "attn_q_norm": norm(head_dim),
                "attn_k_norm": norm(head_dim),
                "post_attention_norm": norm(hidden),
                "ffn_norm": norm(hidden),
                "ffn_gate": linear(inner, hidden),
                "ffn_up": linear(inner, hidden),
                "ffn_down": linear(hidden, inner),
                "post_ffw_norm": norm(hidden),
            }.items()
        }
    settings = {
        "block_count": 7,
        "context_length": 256,
        "embedding_length": hidden,
        "feed_forward_length": inner,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 8,
        "rope.freq_base": 1e6,
    }
    keys = {"general.architecture": "gemma3", **{f"gemma3.{key}": value for key, value in settings.items()}}
    return write_gguf(path, keys, weights, type_of)
