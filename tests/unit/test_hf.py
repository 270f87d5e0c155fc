"""Hugging Face folders: what the spec takes from config.json, shards, prefixes, defaults; every refusal in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pagedserve.contract.errors import ModelError
from pagedserve.models.open import open_checkpoint
from pagedserve.models.rope import frequencies
from pagedserve.models.spec import GenerationDefaults, LayerSpec, TensorType
from tests.golden_data import GOLDEN

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[..., Path]:
    """Copies a golden folder, with changes to its config.json (None removes a key)."""

    def copy(name: str, **changes: Any) -> Path:
        folder = tmp_path / name
        shutil.copytree(GOLDEN / name, folder)
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        return folder

    return copy


def refusal(folder: Path, file: str = "") -> str:
    """The one line that opening the folder gives, without the name of the file at fault, which it must begin with."""
    with pytest.raises(ModelError) as caught:
        open_checkpoint(folder)
    message, prefix = str(caught.value), f"{folder / file if file else folder}: "
    assert "\n" not in message
    assert message.startswith(prefix)
    return message.removeprefix(prefix)


def rewrite(folder: Path, edit: Callable[[dict[str, np.ndarray[Any, Any]]], object]) -> Path:
    """Rewrite the weights of a float32 folder."""
    weights = load_file(folder / SINGLE)
    edit(weights)
    save_file(weights, folder / SINGLE)
    return folder


def shard(folder: Path) -> Path:
    """Split the weights of a float32 folder into two files with an index."""
    weights = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names = sorted(weights)
    weight_map: dict[str, str] = {}
    for i, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{i:05d}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize(
    ("folder", "kind"), [("gpt2-tiny", TensorType.F32), ("qwen2-tiny", TensorType.F16), ("llama-tiny", TensorType.BF16)]
)
def test_weights_keep_the_checkpoints_own_precision(folder: str, kind: TensorType) -> None:
    assert open_checkpoint(GOLDEN / folder).tensor("embed").type is kind


def test_shards_give_the_same_tensors_as_one_file(copy_of: Callable[..., Path]) -> None:
    whole, shards = open_checkpoint(GOLDEN / "mistral-tiny"), open_checkpoint(shard(copy_of("mistral-tiny")))
    assert whole.names() == shards.names()
    for name in whole.names():
        assert whole.tensor(name).data.tobytes() == shards.tensor(name).data.tobytes()


@pytest.mark.parametrize(("folder", "prefix"), [("gpt2-tiny", "transformer."), ("mistral-tiny", "model.")])
def test_names_may_lack_the_prefix_of_the_head_model(copy_of: Callable[..., Path], folder: str, prefix: str) -> None:
    def without(weights: dict[str, Any]) -> None:
        for name in list(weights):
            weights[name.removeprefix(prefix)] = weights.pop(name)

    original, bare = open_checkpoint(GOLDEN / folder), open_checkpoint(rewrite(copy_of(folder), without))
    assert original.names() == bare.names()
    for name in ("embed", "layers.2.q", "layers.0.down"):
        assert original.tensor(name).data.tobytes() == bare.tensor(name).data.tobytes()


def test_gpt2_splits_and_transposes_its_fused_conv1d() -> None:
    stored = load_file(GOLDEN / "gpt2-tiny" / SINGLE)
    prefix = "transformer." if "transformer.wte.weight" in stored else ""
    fused, bias = stored[f"{prefix}h.1.attn.c_attn.weight"], stored[f"{prefix}h.1.attn.c_attn.bias"]
    assert fused.shape == (64, 192)
    checkpoint = open_checkpoint(GOLDEN / "gpt2-tiny")
    for name, begin in (("q", 0), ("k", 64), ("v", 128)):
        raw = checkpoint.tensor(f"layers.1.{name}")
        assert raw.shape == (64, 64)
        assert np.array_equal(raw.data.view(np.float32).reshape(64, 64), fused.T[begin : begin + 64])
        assert np.array_equal(
            checkpoint.tensor(f"layers.1.{name}.bias").data.view(np.float32), bias[begin : begin + 64]
        )


def test_gpt2s_inner_size_is_four_times_hidden_and_its_context_is_n_positions() -> None:
    spec = open_checkpoint(GOLDEN / "gpt2-tiny").spec
    assert (spec.intermediate_size, spec.max_model_len, spec.position, spec.norm) == (256, 256, "learned", "layer")
    assert (spec.gated, spec.activation, spec.tied, spec.num_kv_heads) == (False, "gelu_tanh", True, 4)


def test_old_buffers_and_the_tied_heads_copy_are_ignored(copy_of: Callable[..., Path]) -> None:
    def with_old_tensors(weights: dict[str, Any]) -> None:
        prefix = "transformer." if "transformer.wte.weight" in weights else ""
        weights[prefix + "h.0.attn.bias"] = np.ones((1, 1, 256, 256), np.float32)
        weights[prefix + "h.0.attn.masked_bias"] = np.array([-1e4], np.float32)
        weights["lm_head.weight"] = weights[prefix + "wte.weight"].copy()

    checkpoint = open_checkpoint(rewrite(copy_of("gpt2-tiny"), with_old_tensors))
    assert checkpoint.names() == open_checkpoint(GOLDEN / "gpt2-tiny").names()


def test_qwen3_has_a_head_dim_apart_from_hidden_size() -> None:
    spec = open_checkpoint(GOLDEN / "qwen3-tiny").spec
    assert (spec.head_dim, spec.hidden_size // spec.num_heads, spec.qk_norm) == (32, 16, True)


def test_llama_attention_bias_asks_for_the_biases(copy_of: Callable[..., Path]) -> None:
    folder = copy_of("llama-tiny", attention_bias=True)
    assert refusal(folder) == "tensor model.layers.0.self_attn.q_proj.bias is missing, expected [96]"


def test_mistral_slides_in_every_layer_unless_the_window_is_null(copy_of: Callable[..., Path]) -> None:
    assert open_checkpoint(GOLDEN / "mistral-tiny").spec.layers == (LayerSpec(sliding_window=32),) * 3
    assert open_checkpoint(copy_of("mistral-tiny", sliding_window=None)).spec.layers == (LayerSpec(),) * 3


def test_qwen2_slides_only_where_it_says_so(copy_of: Callable[..., Path]) -> None:
    full, sliding = LayerSpec(), LayerSpec(sliding_window=64)
    folder = copy_of("qwen2-tiny", sliding_window=64)
    assert open_checkpoint(folder).spec.layers == (full,) * 3
    for flag in (False, None):
        shutil.rmtree(folder)
        unsaid = {"layer_types": None, "max_window_layers": None, "use_sliding_window": flag}
        folder = copy_of("qwen2-tiny", sliding_window=64, **unsaid)
        assert open_checkpoint(folder).spec.layers == (full,) * 3
    shutil.rmtree(folder)
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    folder = copy_of("qwen2-tiny", sliding_window=64, use_sliding_window=True, layer_types=kinds)
    assert open_checkpoint(folder).spec.layers == (full, sliding, full)
    shutil.rmtree(folder)
    folder = copy_of("qwen2-tiny", sliding_window=64, use_sliding_window=True, layer_types=None, max_window_layers=2)
    assert open_checkpoint(folder).spec.layers == (full, full, sliding)


def test_rope_scaling_linear_and_the_keys_of_transformers_5(copy_of: Callable[..., Path]) -> None:
    folder = copy_of("llama-tiny", rope_scaling={"type": "linear", "factor": 2.0})
    assert open_checkpoint(folder).spec.ropes[0].inv_freq == tuple(f / 2 for f in frequencies(500000.0, 16))
    shutil.rmtree(folder)
    parameters = {"rope_type": "default", "rope_theta": 1000.0}
    folder = copy_of("llama-tiny", rope_scaling=None, rope_theta=None, rope_parameters=parameters)
    assert open_checkpoint(folder).spec.ropes[0].inv_freq == frequencies(1000.0, 16)


def test_llama3_scaling_keeps_short_wavelengths_and_divides_long_ones() -> None:
    exact, scaled = frequencies(500000.0, 16), open_checkpoint(GOLDEN / "llama-tiny").spec.ropes[0].inv_freq
    assert scaled[0] == exact[0]  # 6 tokens a turn, of 64
    assert scaled[-1] == exact[-1] / 8
    assert exact[1] / 8 < scaled[1] < exact[1]  # 32 tokens a turn: between


def test_generation_config_gives_defaults_and_its_eos_list_wins(copy_of: Callable[..., Path]) -> None:
    folder = copy_of("qwen2-tiny")
    assert open_checkpoint(folder).generation == GenerationDefaults(eos_token_ids=(0,))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 0], "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1})
    )
    assert open_checkpoint(folder).generation == GenerationDefaults(
        eos_token_ids=(2, 0), temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.1
    )


def test_padded_embedding_rows_are_not_in_the_vocabulary(copy_of: Callable[..., Path]) -> None:
    folder = copy_of("mistral-tiny", vocab_size=800)

    def padded(weights: dict[str, Any]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            weights[name] = np.concatenate([weights[name], np.zeros((32, 96), np.float32)])

    spec = open_checkpoint(rewrite(folder, padded)).spec
    assert (spec.vocab_size, spec.embedding_rows) == (768, 800)


def test_tokenizer_larger_than_the_embedding_is_refused(copy_of: Callable[..., Path]) -> None:
    folder = copy_of("qwen2-tiny", vocab_size=700)
    assert refusal(folder, "config.json") == "the tokenizer has 768 tokens but the embedding only 700 rows"


def test_missing_tensor_is_named_with_its_shape(copy_of: Callable[..., Path]) -> None:
    folder = rewrite(copy_of("mistral-tiny"), lambda weights: weights.pop("model.layers.2.mlp.down_proj.weight"))
    assert refusal(folder) == "tensor model.layers.2.mlp.down_proj.weight is missing, expected [96, 160]"


def test_extra_tensors_are_named(copy_of: Callable[..., Path]) -> None:
    def two_more(weights: dict[str, Any]) -> None:
        weights |= {"model.layers.3.mlp.up_proj.weight": np.ones(1, np.float32), "z": np.ones(1, np.float32)}

    folder = rewrite(copy_of("mistral-tiny"), two_more)
    assert refusal(folder) == ("tensor model.layers.3.mlp.up_proj.weight is not part of a mistral model (and 1 more)")


def test_wrong_shape_is_named_as_the_file_has_it(copy_of: Callable[..., Path]) -> None:
    def wrong(weights: dict[str, Any]) -> None:
        name = next(name for name in weights if name.endswith("h.0.mlp.c_fc.weight"))
        weights[name] = np.ascontiguousarray(weights[name].T)

    message = refusal(rewrite(copy_of("gpt2-tiny"), wrong))
    assert message.endswith("h.0.mlp.c_fc.weight has shape [256, 64], expected [64, 256]")


def test_unknown_architecture_names_those_that_are_known(copy_of: Callable[..., Path]) -> None:
    folder = copy_of("llama-tiny", model_type="mamba")
    assert refusal(folder, "config.json") == (
        "model_type: expected one of gpt2, llama, mistral, qwen2, qwen3, got 'mamba'"
    )


def test_unknown_rope_scaling_is_refused(copy_of: Callable[..., Path]) -> None:
    folder = copy_of("llama-tiny", rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert refusal(folder, "config.json") == "rope_scaling.rope_type: expected default, linear or llama3, got 'yarn'"


def test_unknown_activation_is_refused(copy_of: Callable[..., Path]) -> None:
    folder = copy_of("llama-tiny", hidden_act="relu")
    assert refusal(folder, "config.json").startswith("hidden_act: expected one of silu, swish, ")


def test_attention_scaled_by_layer_is_refused(copy_of: Callable[..., Path]) -> None:
    folder = copy_of("gpt2-tiny", scale_attn_by_inverse_layer_idx=True)
    assert refusal(folder, "config.json") == "scale_attn_by_inverse_layer_idx: expected false, got True"


def test_unsupported_type_is_named(copy_of: Callable[..., Path]) -> None:
    def doubles(weights: dict[str, Any]) -> None:
        weights["model.norm.weight"] = weights["model.norm.weight"].astype(np.float64)

    folder = rewrite(copy_of("mistral-tiny"), doubles)
    assert refusal(folder, SINGLE) == "tensor model.norm.weight has type F64, expected one of F32, F16, BF16"


def test_folder_without_weights_is_refused(copy_of: Callable[..., Path]) -> None:
    folder = copy_of("llama-tiny")
    (folder / SINGLE).unlink()
    assert refusal(folder) == f"holds neither {SINGLE} nor {INDEX}"


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, "config.json") == "missing"


def test_damaged_config_is_refused(copy_of: Callable[..., Path]) -> None:
    folder = copy_of("llama-tiny")
    (folder / "config.json").write_text("{")
    assert refusal(folder, "config.json").startswith("damaged: not JSON: ")


@pytest.mark.parametrize(
    ("num_bytes", "message"),
    [
        (0, "truncated: it is empty"),
        (5, "truncated: the file ends within its header"),
        (200, "truncated: the file ends within its header"),
        (100_000, "truncated: tensor "),
    ],
)
def test_truncated_file_is_refused(copy_of: Callable[..., Path], num_bytes: int, message: str) -> None:
    folder = copy_of("llama-tiny")
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:num_bytes])
    assert refusal(folder, SINGLE).startswith(message)


def test_file_that_is_no_safetensors_is_refused(copy_of: Callable[..., Path]) -> None:
    folder = copy_of("llama-tiny")
    (folder / SINGLE).write_bytes(b"PK\x03\x04" * 100)
    assert refusal(folder, SINGLE).startswith("not a safetensors file: ")
    (folder / SINGLE).write_bytes((16).to_bytes(8, "little") + b"{" * 40)
    assert refusal(folder, SINGLE).startswith("not a safetensors file, or damaged")


def test_missing_shard_is_named(copy_of: Callable[..., Path]) -> None:
    folder = shard(copy_of("mistral-tiny"))
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert refusal(folder, "model-00002-of-00002.safetensors") == f"missing, though {INDEX} names it"


def test_truncated_shard_is_named(copy_of: Callable[..., Path]) -> None:
    folder = shard(copy_of("mistral-tiny"))
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert refusal(folder, path.name).startswith("truncated: tensor ")


def test_tensor_that_the_index_misplaces_is_named(copy_of: Callable[..., Path]) -> None:
    folder = shard(copy_of("mistral-tiny"))
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    assert refusal(folder, "model-00001-of-00002.safetensors").startswith("tensor ghost is missing, though ")


def test_damaged_index_is_refused(copy_of: Callable[..., Path]) -> None:
    folder = shard(copy_of("mistral-tiny"))
    (folder / INDEX).write_text("[]")
    assert refusal(folder, INDEX) == "damaged: expected a JSON object with a weight_map"
