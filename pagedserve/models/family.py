"""Family: one architecture as declarations, and the canonical tensors that follow from them. Reads no file.

To add a family, add one file to models/families: a Family named FAMILY. There is one forward pass (ModelSpec says how
it runs), so a family only says which choices it makes and what its files call things.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pagedserve.models.settings import Settings
from pagedserve.models.spec import ModelSpec

_LAYER = "layers.{i}."

# Canonical name -> the name in a Hugging Face checkpoint, without `.weight` / `.bias`; what Llama began.
LLAMA_NAMES: Mapping[str, str] = {
    "embed": "embed_tokens",
    "final_norm": "norm",
    "head": "lm_head",
    "attn_norm": "layers.{i}.input_layernorm",
    "q": "layers.{i}.self_attn.q_proj",
    "k": "layers.{i}.self_attn.k_proj",
    "v": "layers.{i}.self_attn.v_proj",
    "o": "layers.{i}.self_attn.o_proj",
    "q_norm": "layers.{i}.self_attn.q_norm",
    "k_norm": "layers.{i}.self_attn.k_norm",
    "ffn_norm": "layers.{i}.post_attention_layernorm",
    "gate": "layers.{i}.mlp.gate_proj",
    "up": "layers.{i}.mlp.up_proj",
    "down": "layers.{i}.mlp.down_proj",
}

# What config.json calls the numbers of ModelSpec.
LLAMA_KEYS: Mapping[str, str] = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_model_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
}


@dataclass(frozen=True)
class Family:
    """One architecture. `name` is GGUF's general.architecture and, without `hf_name`, config.json's model_type.

    The first group are ModelSpec's fields of the same names. `biases` are the canonical names that always have a bias,
    `optional_biases` those that may: where the file has it (GGUF), where config.json says so (Hugging Face). `fused`
    maps a tensor of the file to the canonical ones that are its rows, in order.
    Of Hugging Face folders: without `hf_names` none are read; `hf_prefix` is before all names but the head's, or
    missing from all; `hf_transposed` are stored [n_in, n_out]; `hf_ignored` are endings of tensors that carry no
    weights (old buffers); `hf_tied` and `hf_window` hold where config.json does not say; `hf_inner_factor` times
    hidden_size is the default of intermediate_size. `refine_gguf` and `refine_hf` finish the spec with what
    only this family has.
    """

    name: str
    norm: str = "rms"
    gated: bool = True
    position: str = "rope"
    qk_norm: bool = False
    post_norms: bool = False
    gguf_pairing: str = "halves"
    gguf_activation: str = "silu"
    biases: frozenset[str] = frozenset()
    optional_biases: frozenset[str] = frozenset()
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    hf_names: Mapping[str, str] = field(default_factory=lambda: LLAMA_NAMES)
    hf_keys: Mapping[str, str] = field(default_factory=lambda: LLAMA_KEYS)
    hf_name: str = ""
    hf_prefix: str = "model."
    hf_transposed: frozenset[str] = frozenset()
    hf_ignored: tuple[str, ...] = ()
    hf_tied: bool = False
    hf_window: bool = False
    hf_inner_factor: int = 0
    refine_gguf: Callable[[ModelSpec, Settings], ModelSpec] | None = None
    refine_hf: Callable[[ModelSpec, Settings], ModelSpec] | None = None


@dataclass(frozen=True)
class Expected:
    """One canonical tensor: where the file has it, and its shape. `rows` cuts it from a fused tensor [total, …]."""

    file_name: str
    shape: tuple[int, ...]  # canonical, outputs first
    rows: tuple[int, int, int] | None = None  # begin, end, total
    transposed: bool = False
    optional: bool = False


def expected_tensors(
    family: Family, spec: ModelSpec, file_names: Mapping[str, str], transposed: frozenset[str] = frozenset()
) -> dict[str, Expected]:
    """Every canonical tensor of a model, with its place in a file whose names are `file_names` (stems)."""
    expected: dict[str, Expected] = {}
    fused = {part: (whole, parts) for whole, parts in family.fused.items() for part in parts}
    rows_of = {name: shape[0] for name, shape in _layer_shapes(spec).items()}

    def add(canonical: str, shape: tuple[int, ...], layer: int | None) -> None:
        stem, rows = canonical, None
        if canonical in fused:
            stem, parts = fused[canonical]
            begin = sum(rows_of[part] for part in parts[: parts.index(canonical)])
            rows = (begin, begin + rows_of[canonical], sum(rows_of[part] for part in parts))
        file_name = file_names[stem].format(i=layer)
        prefix = "" if layer is None else _LAYER.format(i=layer)
        expected[prefix + canonical] = Expected(file_name + ".weight", shape, rows, canonical in transposed)
        is_norm = canonical.endswith("norm")
        has_bias = canonical in family.biases or (is_norm and spec.norm == "layer")
        if has_bias or canonical in family.optional_biases:
            expected[f"{prefix}{canonical}.bias"] = Expected(
                file_name + ".bias", shape[:1], rows, optional=not has_bias
            )

    add("embed", (spec.embedding_rows, spec.hidden_size), None)
    if spec.position == "learned":
        add("position_embed", (spec.max_model_len, spec.hidden_size), None)
    add("final_norm", (spec.hidden_size,), None)
    if not spec.tied:
        add("head", (spec.embedding_rows, spec.hidden_size), None)
    for layer in range(spec.num_layers):
        for canonical, shape in _layer_shapes(spec).items():
            add(canonical, shape, layer)
    return expected


def _layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The canonical tensors of one layer and their shapes, in the order of use."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "q": (q_rows, hidden),
        "k": (kv_rows, hidden),
        "v": (kv_rows, hidden),
        "o": (hidden, q_rows),
        "ffn_norm": (hidden,),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    if spec.gated:
        shapes["gate"] = (inner, hidden)
    if spec.qk_norm:
        shapes["q_norm"] = shapes["k_norm"] = (spec.head_dim,)
    if spec.post_norms:
        shapes["attn_post_norm"] = shapes["ffn_post_norm"] = (hidden,)
    return shapes
