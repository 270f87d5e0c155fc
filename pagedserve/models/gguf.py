"""Opens a GGUF file as a Checkpoint: the spec from its key-values, the tensors under their canonical names.

Knows GGUF's keys and tensor names, which all architectures share; what differs is in the family's declaration.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from pagedserve.contract.errors import ModelError
from pagedserve.models import rope
from pagedserve.models.checkpoint import FileCheckpoint
from pagedserve.models.family import Family, expected_tensors
from pagedserve.models.gguf_file import GgufFile
from pagedserve.models.settings import Settings
from pagedserve.models.spec import GenerationDefaults, LayerSpec, ModelSpec, RopeSpec, TensorType

_NAMES = {
    "embed": "token_embd",
    "position_embed": "position_embd",
    "final_norm": "output_norm",
    "head": "output",
    "attn_norm": "blk.{i}.attn_norm",
    "qkv": "blk.{i}.attn_qkv",
    "q": "blk.{i}.attn_q",
    "k": "blk.{i}.attn_k",
    "v": "blk.{i}.attn_v",
    "o": "blk.{i}.attn_output",
    "q_norm": "blk.{i}.attn_q_norm",
    "k_norm": "blk.{i}.attn_k_norm",
    "attn_post_norm": "blk.{i}.post_attention_norm",
    "ffn_norm": "blk.{i}.ffn_norm",
    "gate": "blk.{i}.ffn_gate",
    "up": "blk.{i}.ffn_up",
    "down": "blk.{i}.ffn_down",
    "ffn_post_norm": "blk.{i}.post_ffw_norm",
}
_ROPE_FACTORS = "rope_freqs.weight"
_TOKENS = "tokenizer.ggml.tokens"
_CONTROL = 3  # tokenizer.ggml.token_type of a control token
# Tokens that end a turn; files of chat models do not always name them as eos or eot.
_TURN_ENDS = frozenset({"<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>"})


def open_gguf(path: Path, families: Iterable[Family]) -> FileCheckpoint:
    """The model in a GGUF file. ModelError names the file and what it is that cannot be served."""
    file = GgufFile(path)
    architecture = file.settings().text("general.architecture")
    known = {family.name: family for family in families}
    if architecture not in known:
        raise ModelError(
            f"{path}: architecture {architecture!r} is not supported, expected one of {', '.join(sorted(known))}"
        )
    family = known[architecture]
    spec = _read_spec(family, file)
    return FileCheckpoint(
        spec, generation_defaults(file), file, expected_tensors(family, spec, _NAMES), ignored=[_ROPE_FACTORS]
    )


def generation_defaults(file: GgufFile) -> GenerationDefaults:
    """The tokens that end an output, from the file's eos, eot and eom ids and its end-of-turn control tokens."""
    settings = file.settings("tokenizer.ggml.")
    ids = [settings.integer(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id") if settings.has(key)]
    if settings.has("token_type"):
        tokens, types = settings.strings("tokens"), settings.integers("token_type")
        ids += [i for i, kind in enumerate(types) if kind == _CONTROL and tokens[i] in _TURN_ENDS]
    return GenerationDefaults(eos_token_ids=tuple(dict.fromkeys(ids)))


def _read_spec(family: Family, file: GgufFile) -> ModelSpec:
    settings = file.settings(f"{family.name}.")
    hidden_size = settings.integer("embedding_length")
    num_heads = settings.integer("attention.head_count")
    if num_heads == 0:
        raise settings.wrong("attention.head_count", "at least 1", num_heads)
    head_dim = settings.integer("attention.key_length", hidden_size // num_heads)
    if settings.integer("attention.value_length", head_dim) != head_dim:
        raise settings.wrong(
            "attention.value_length", f"{head_dim}, the key length", settings.integer("attention.value_length")
        )
    num_layers = settings.integer("block_count")
    eps_key = "attention.layer_norm_rms_epsilon" if family.norm == "rms" else "attention.layer_norm_epsilon"
    embedding = "token_embd.weight"
    if embedding not in file.names():
        raise ModelError(f"{file.path}: tensor {embedding} is missing")
    embedding_rows = file.shape(embedding)[0]
    num_tokens = len(file.settings().strings(_TOKENS)) if file.settings().has(_TOKENS) else embedding_rows
    if num_tokens > embedding_rows:
        raise ModelError(
            f"{file.path}: the vocabulary has {num_tokens:,} tokens but {embedding} only {embedding_rows:,} rows"
        )
    spec = ModelSpec(
        name=file.settings().text("general.name", file.path.stem),
        architecture=family.name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=settings.integer("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=settings.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=num_tokens,
        embedding_rows=embedding_rows,
        max_model_len=settings.integer("context_length"),
        norm=family.norm,
        norm_eps=settings.number(eps_key),
        activation=family.gguf_activation,
        gated=family.gated,
        position=family.position,
        ropes=(_rope(family, file, settings, head_dim),) if family.position == "rope" else (),
        layers=(LayerSpec(sliding_window=settings.integer("attention.sliding_window", 0)),) * num_layers,
        qk_norm=family.qk_norm,
        post_norms=family.post_norms,
        tied="output.weight" not in file.names(),
    )
    return family.refine_gguf(spec, settings) if family.refine_gguf else spec


def _rope(family: Family, file: GgufFile, settings: Settings, head_dim: int) -> RopeSpec:
    rope_dim = settings.integer("rope.dimension_count", head_dim)
    inv_freq = rope.frequencies(settings.number("rope.freq_base", 10000.0), rope_dim)
    scaling = settings.text("rope.scaling.type", "none")
    if scaling == "linear":
        inv_freq = rope.linear(inv_freq, settings.number("rope.scaling.factor"))
    elif scaling != "none":
        raise settings.wrong("rope.scaling.type", "'none' or 'linear'", scaling)
    if _ROPE_FACTORS in file.names():
        raw = file.tensor(_ROPE_FACTORS)
        if raw.shape != (rope_dim // 2,) or raw.type is not TensorType.F32:
            raise ModelError(
                f"{file.path}: tensor {_ROPE_FACTORS} is {raw.type.name} {list(raw.shape)}, "
                f"expected F32 [{rope_dim // 2}]"
            )
        inv_freq = rope.divided(inv_freq, raw.data.view(np.float32).tolist())
    return RopeSpec(inv_freq, family.gguf_pairing)
