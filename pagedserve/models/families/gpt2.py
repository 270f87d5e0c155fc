"""GPT-2: learned positions, layer norms before attention and FFN, fused QKV stored as Conv1D, tanh GELU, biases."""

from __future__ import annotations

from pagedserve.models.family import Family
from pagedserve.models.settings import Settings
from pagedserve.models.spec import ModelSpec

_LINEAR = frozenset({"q", "k", "v", "o", "up", "down"})


def _refine(spec: ModelSpec, config: Settings) -> ModelSpec:
    for key, expected in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if config.flag(key, expected) is not expected:
            raise config.wrong(key, str(expected).lower(), not expected)
    return spec


FAMILY = Family(
    name="gpt2",
    norm="layer",
    gated=False,
    position="learned",
    gguf_activation="gelu_tanh",
    biases=_LINEAR,
    fused={"qkv": ("q", "k", "v")},
    hf_names={
        "embed": "wte",
        "position_embed": "wpe",
        "final_norm": "ln_f",
        "head": "lm_head",
        "attn_norm": "h.{i}.ln_1",
        "qkv": "h.{i}.attn.c_attn",
        "o": "h.{i}.attn.c_proj",
        "ffn_norm": "h.{i}.ln_2",
        "up": "h.{i}.mlp.c_fc",
        "down": "h.{i}.mlp.c_proj",
    },
    hf_keys={
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_heads": "n_head",
        "num_kv_heads": "n_head",
        "max_model_len": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "activation": "activation_function",
    },
    hf_prefix="transformer.",
    hf_transposed=_LINEAR,
    hf_ignored=(".attn.bias", ".attn.masked_bias"),
    hf_tied=True,
    hf_inner_factor=4,
    refine_hf=_refine,
)
