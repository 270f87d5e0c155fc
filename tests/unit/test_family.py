"""A family is one declaration: a made-up one opens, is checked and runs without touching any other code."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from pagedserve.models.families import FAMILIES
from pagedserve.models.family import LLAMA_KEYS, Family
from pagedserve.models.open import open_checkpoint
from pagedserve.models.settings import Settings
from pagedserve.models.spec import ModelSpec
from tests.twin_model import TwinModel


def _with_multiplier(spec: ModelSpec, config: Settings) -> ModelSpec:
    return dataclasses.replace(spec, embedding_scale=config.number("embedding_multiplier"))


# Layer norm and rotary positions, an ungated tanh-GELU FFN, one fused QKV with a bias, names of its own.
MADE_UP = Family(
    name="madeup",
    norm="layer",
    gated=False,
    biases=frozenset({"q", "k", "v"}),
    fused={"qkv": ("q", "k", "v")},
    hf_names={
        "embed": "tok",
        "final_norm": "out_norm",
        "head": "out",
        "attn_norm": "block.{i}.norm_a",
        "qkv": "block.{i}.qkv",
        "o": "block.{i}.proj",
        "ffn_norm": "block.{i}.norm_b",
        "up": "block.{i}.w1",
        "down": "block.{i}.w2",
    },
    hf_keys={**LLAMA_KEYS, "num_layers": "depth"},
    hf_prefix="",
    refine_hf=_with_multiplier,
)


def test_made_up_family_runs_from_its_declaration_alone(tmp_path: Path) -> None:
    config = {
        "model_type": "madeup", "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "gelu_new",
        "vocab_size": 40, "embedding_multiplier": 0.5,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "qkv.weight": (64, 32), "qkv.bias": (64,), "proj.weight": (32, 32), "w1.weight": (64, 32),
        "w2.weight": (32, 64), "norm_a.weight": (32,), "norm_a.bias": (32,),
        "norm_b.weight": (32,), "norm_b.bias": (32,),
    }  # fmt: skip
    shapes = {f"block.{i}.{name}": shape for i in range(2) for name, shape in shapes.items()}
    shapes |= {"tok.weight": (40, 32), "out.weight": (40, 32), "out_norm.weight": (32,), "out_norm.bias": (32,)}
    weights = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(weights, tmp_path / "model.safetensors")

    checkpoint = open_checkpoint(tmp_path, families=(*FAMILIES, MADE_UP))

    k = checkpoint.tensor("layers.1.k").data.view(np.float32).reshape(16, 32)
    assert np.array_equal(k, weights["block.1.qkv.weight"][32:48])
    assert (checkpoint.spec.activation, checkpoint.spec.embedding_scale, checkpoint.spec.tied) == (
        "gelu_tanh",
        0.5,
        False,
    )
    logits = TwinModel(checkpoint).logits([1, 2, 3])
    assert logits.shape == (3, 40)
    assert np.isfinite(logits).all()


def test_families_are_found_by_their_files() -> None:
    assert {family.name for family in FAMILIES} == {"gemma3", "gpt2", "llama", "mistral", "qwen2", "qwen3"}
