"""Opens a Hugging Face folder as a Checkpoint: the spec from config.json, tensors from safetensors.

Knows the keys that most families share; what differs is in the family's declaration.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pagedserve.contract.errors import ModelError
from pagedserve.models import rope
from pagedserve.models.checkpoint import FileCheckpoint
from pagedserve.models.family import Family, expected_tensors
from pagedserve.models.safetensors_files import SafetensorsFiles
from pagedserve.models.settings import Settings
from pagedserve.models.spec import GenerationDefaults, LayerSpec, ModelSpec, RopeSpec

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_BIAS_FLAGS = {"attention_bias": ("q", "k", "v", "o"), "mlp_bias": ("gate", "up", "down")}


def open_hf(folder: Path, families: Iterable[Family]) -> FileCheckpoint:
    """The model in a Hugging Face folder. ModelError names the file and what it is that cannot be served."""
    config = read_settings(folder / "config.json")
    kind = config.text("model_type")
    known = {family.hf_name or family.name: family for family in families if family.hf_names}
    if kind not in known:
        raise config.wrong("model_type", f"one of {', '.join(sorted(known))}", kind)
    family = known[kind]
    flagged = {name for flag, names in _BIAS_FLAGS.items() if config.flag(flag, False) for name in names}
    family = dataclasses.replace(
        family, biases=family.biases | (flagged & family.optional_biases), optional_biases=frozenset()
    )
    spec = _read_spec(family, config)
    files = SafetensorsFiles(folder)
    present = set(files.names())
    prefix = family.hf_prefix if f"{family.hf_prefix}{family.hf_names['embed']}.weight" in present else ""
    names = {key: name if key == "head" else prefix + name for key, name in family.hf_names.items()}
    ignored = [name for name in present if name.endswith(family.hf_ignored)]
    if spec.tied:
        ignored.append(f"{family.hf_names['head']}.weight")  # a second copy of the embedding
    return FileCheckpoint(
        spec, generation_defaults(folder), files, expected_tensors(family, spec, names, family.hf_transposed), ignored
    )


def read_settings(path: Path) -> Settings:
    """A JSON object as Settings; ModelError when the file is missing or is none."""
    return Settings(path, read_json(path))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; ModelError naming the file when it is missing or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: missing") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path}: damaged: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return value


def generation_defaults(folder: Path) -> GenerationDefaults:
    """generation_config.json, and config.json for the eos ids where the former has none."""
    path = folder / "generation_config.json"
    settings = read_settings(path) if path.exists() else Settings(path, {})
    config = read_settings(folder / "config.json")
    eos_from = next((s for s in (settings, config) if s.has("eos_token_id")), None)
    return GenerationDefaults(
        eos_token_ids=tuple(eos_from.integers("eos_token_id")) if eos_from else (),
        temperature=settings.number("temperature") if settings.has("temperature") else None,
        top_k=settings.integer("top_k") if settings.has("top_k") else None,
        top_p=settings.number("top_p") if settings.has("top_p") else None,
        min_p=settings.number("min_p") if settings.has("min_p") else None,
        repetition_penalty=settings.number("repetition_penalty") if settings.has("repetition_penalty") else None,
    )


def vocabulary_size(folder: Path) -> int | None:
    """One more than the highest token id of the folder's tokenizer; None when there is no tokenizer."""
    ids: list[int] = []
    if (folder / "tokenizer.json").exists():
        tokenizer = read_json(folder / "tokenizer.json")
        vocabulary = (tokenizer.get("model") or {}).get("vocab", {})
        ids += vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        ids += [token["id"] for token in tokenizer.get("added_tokens", [])]
    elif (folder / "vocab.json").exists():
        ids += read_json(folder / "vocab.json").values()
        if (folder / "tokenizer_config.json").exists():
            ids += map(int, read_json(folder / "tokenizer_config.json").get("added_tokens_decoder", {}))
    return max(ids) + 1 if ids else None


def _read_spec(family: Family, config: Settings) -> ModelSpec:
    keys = family.hf_keys
    hidden_size = config.integer(keys["hidden_size"])
    num_heads = config.integer(keys["num_heads"])
    if num_heads == 0:
        raise config.wrong(keys["num_heads"], "at least 1", num_heads)
    num_layers = config.integer(keys["num_layers"])
    head_dim = config.integer("head_dim", hidden_size // num_heads)
    embedding_rows = config.integer("vocab_size")
    num_tokens = vocabulary_size(config.path.parent) or embedding_rows
    if num_tokens > embedding_rows:
        raise ModelError(
            f"{config.path}: the tokenizer has {num_tokens:,} tokens but the embedding only {embedding_rows:,} rows"
        )
    activation = config.text(keys["activation"])
    if activation not in _ACTIVATIONS:
        raise config.wrong(keys["activation"], f"one of {', '.join(_ACTIVATIONS)}", activation)
    spec = ModelSpec(
        name=config.path.parent.name,
        architecture=family.name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=config.integer(keys["intermediate_size"], family.hf_inner_factor * hidden_size or None),
        num_heads=num_heads,
        num_kv_heads=config.integer(keys["num_kv_heads"], num_heads),
        head_dim=head_dim,
        vocab_size=num_tokens,
        embedding_rows=embedding_rows,
        max_model_len=config.integer(keys["max_model_len"]),
        norm=family.norm,
        norm_eps=config.number(keys["norm_eps"]),
        activation=_ACTIVATIONS[activation],
        gated=family.gated,
        position=family.position,
        ropes=(_rope(config, head_dim),) if family.position == "rope" else (),
        layers=_layers(family, config, num_layers),
        qk_norm=family.qk_norm,
        post_norms=family.post_norms,
        tied=config.flag("tie_word_embeddings", family.hf_tied),
    )
    return family.refine_hf(spec, config) if family.refine_hf else spec


def _rope(config: Settings, head_dim: int) -> RopeSpec:
    # transformers 5 writes rope_parameters, with the base in it; before there were rope_theta and rope_scaling.
    key = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
    scaling = config.section(key)
    base = scaling.number("rope_theta", config.number("rope_theta", 10000.0))
    rope_dim = int(head_dim * config.number("partial_rotary_factor", 1.0))
    inv_freq = rope.frequencies(base, rope_dim)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind == "linear":
        inv_freq = rope.linear(inv_freq, scaling.number("factor"))
    elif kind == "llama3":
        inv_freq = rope.llama3(
            inv_freq,
            factor=scaling.number("factor"),
            low_freq_factor=scaling.number("low_freq_factor"),
            high_freq_factor=scaling.number("high_freq_factor"),
            original_len=scaling.integer("original_max_position_embeddings"),
        )
    elif kind != "default":
        raise config.wrong(f"{key}.rope_type", "default, linear or llama3", kind)
    return RopeSpec(inv_freq, "halves")


def _layers(family: Family, config: Settings, num_layers: int) -> tuple[LayerSpec, ...]:
    """Which layers have a sliding window: layer_types says so, or max_window_layers, or else all have it."""
    window = config.integer("sliding_window", 0)
    if not config.flag("use_sliding_window", family.hf_window):
        window = 0
    if window and config.has("layer_types"):
        kinds = config.strings("layer_types")
        if len(kinds) != num_layers:
            raise config.wrong("layer_types", f"{num_layers} names", kinds)
        for kind in kinds:
            if kind not in ("sliding_attention", "full_attention"):
                raise config.wrong("layer_types", "sliding_attention or full_attention", kind)
        return tuple(LayerSpec(sliding_window=window if kind == "sliding_attention" else 0) for kind in kinds)
    first = config.integer("max_window_layers", 0)
    return tuple(LayerSpec(sliding_window=window if layer >= first else 0) for layer in range(num_layers))
