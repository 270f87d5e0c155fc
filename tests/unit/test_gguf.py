"""GGUF: the header reader against the gguf package's, the spec it gives, and every refusal in one line."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pagedserve.contract.errors import ModelError
from pagedserve.models.gguf_file import GgufFile
from pagedserve.models.open import open_checkpoint
from pagedserve.models.rope import frequencies
from pagedserve.models.spec import LayerSpec, TensorType
from tests.gguf_models import Weights, gguf_settings, gguf_weights, write_gguf, write_tiny_gemma3
from tests.golden_data import GOLDEN

Edit = Callable[[dict[str, Any], Weights], None]


@pytest.fixture(scope="module")
def qwen2() -> tuple[dict[str, Any], Weights]:
    """The settings and weights of the smallest golden model."""
    checkpoint = open_checkpoint(GOLDEN / "qwen2-tiny")
    return gguf_settings(checkpoint), gguf_weights(checkpoint)


@pytest.fixture
def file_with(qwen2: tuple[dict[str, Any], Weights], tmp_path: Path) -> Callable[..., Path]:
    def write(edit: Edit = lambda settings, weights: None, **arguments: Any) -> Path:
        settings, weights = dict(qwen2[0]), dict(qwen2[1])
        edit(settings, weights)
        return write_gguf(tmp_path / "model.gguf", settings, weights, **arguments)

    return write


def refusal(path: Path) -> str:
    """The one line that opening the file gives, without the file's name, which it must begin with."""
    with pytest.raises(ModelError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def test_header_reader_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "all.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.uint8", 200)
    writer.add_int8("a.int8", -100)
    writer.add_uint16("a.uint16", 60000)
    writer.add_int16("a.int16", -30000)
    writer.add_uint32("a.uint32", 4_000_000_000)
    writer.add_int32("a.int32", -2_000_000_000)
    writer.add_uint64("a.uint64", 2**63 + 1)
    writer.add_int64("a.int64", -(2**62))
    writer.add_float32("a.float32", 0.25)
    writer.add_float64("a.float64", 1e-300)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "ü\n▁")
    writer.add_array("a.strings", ["", "x", "日本"])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.5, -1.5])
    writer.add_custom_alignment(64)
    random = np.random.default_rng(0)
    matrix = random.standard_normal((4, 256)).astype(np.float32)
    for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
        kind = gguf.GGMLQuantizationType[name]
        writer.add_tensor(name, gguf.quants.quantize(matrix, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    assert ours.metadata == {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert list(ours.names()) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        raw = ours.tensor(tensor.name)
        assert raw.shape == (4, 256)
        assert raw.type.name == tensor.tensor_type.name
        assert raw.data.tobytes() == tensor.data.tobytes()
        assert not raw.data.flags.writeable


def test_tensor_types_have_ggmls_geometry() -> None:
    for kind in TensorType:
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.name]] == (kind.block_size, kind.block_bytes)


def test_spec_comes_from_the_key_values(file_with: Callable[..., Path]) -> None:
    spec = open_checkpoint(file_with()).spec
    assert (spec.architecture, spec.num_layers, spec.hidden_size, spec.intermediate_size) == ("qwen2", 3, 96, 160)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (6, 2, 16, 768)
    assert (spec.max_model_len, spec.norm_eps, spec.tied) == (512, float(np.float32(1e-6)), True)
    assert spec.ropes[0].inv_freq == frequencies(10000.0, 16)
    assert spec.layers == (LayerSpec(),) * 3


def test_bias_tensors_are_read_with_their_layers(file_with: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(file_with())
    assert checkpoint.tensor("layers.2.v.bias").shape == (32,)
    assert "layers.2.o.bias" not in checkpoint.names()


def test_quantised_tensors_keep_their_blocks(file_with: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(file_with(type_of=lambda name: "Q4_1" if "ffn" in name else "Q8_0"))
    assert checkpoint.tensor("layers.0.up").type is TensorType.Q4_1
    assert len(checkpoint.tensor("layers.0.up").data) == 160 * 96 // 32 * 20
    assert checkpoint.tensor("embed").type is TensorType.Q8_0


def test_linear_rope_scaling_divides_the_frequencies(file_with: Callable[..., Path]) -> None:
    def scaled(settings: dict[str, Any], weights: Weights) -> None:
        settings |= {"qwen2.rope.scaling.type": "linear", "qwen2.rope.scaling.factor": 4.0}

    exact = frequencies(10000.0, 16)
    assert open_checkpoint(file_with(scaled)).spec.ropes[0].inv_freq == tuple(f / 4 for f in exact)


def test_turn_ends_and_eot_end_an_output(file_with: Callable[..., Path]) -> None:
    def turns(settings: dict[str, Any], weights: Weights) -> None:
        settings["tokenizer.ggml.tokens"] = ["<|im_end|>", "<|im_end|>x", "<end_of_turn>", *map(str, range(765))]
        settings["tokenizer.ggml.token_type"] = [3, 3, 1] + [1] * 765
        settings |= {"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 9}

    assert open_checkpoint(file_with(turns)).generation.eos_token_ids == (7, 9, 0)


def test_padded_embedding_rows_are_not_in_the_vocabulary(file_with: Callable[..., Path]) -> None:
    def fewer_tokens(settings: dict[str, Any], weights: Weights) -> None:
        settings["tokenizer.ggml.tokens"] = settings["tokenizer.ggml.tokens"][:700]

    spec = open_checkpoint(file_with(fewer_tokens)).spec
    assert (spec.vocab_size, spec.embedding_rows) == (700, 768)


def test_missing_file_is_named() -> None:
    with pytest.raises(ModelError, match=r"^/no/such\.gguf: no such file or folder$"):
        open_checkpoint("/no/such.gguf")


def test_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.touch()
    assert refusal(path) == "not a GGUF file: it is empty"


def test_wrong_magic_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGML" + bytes(100))
    assert refusal(path) == "not a GGUF file: it begins with b'GGML', expected b'GGUF'"


@pytest.mark.parametrize(
    ("version", "shown"),
    [(1, "version 1 is"), (9, "version 9 is"), (3 << 24, "version 50331648 (a big-endian file) is")],
)
def test_other_versions_are_refused(tmp_path: Path, version: int, shown: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    assert refusal(path) == f"GGUF {shown} not supported, expected 2 or 3"


@pytest.mark.parametrize("num_bytes", [4, 10, 23, 24, 100, 5_000, 12_000])
def test_file_cut_within_its_header_is_refused(file_with: Callable[..., Path], num_bytes: int) -> None:
    path = file_with()
    path.write_bytes(path.read_bytes()[:num_bytes])
    assert refusal(path) == "truncated: the file ends within its header"


def test_file_cut_within_its_tensors_names_the_tensor(file_with: Callable[..., Path]) -> None:
    path = file_with()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 9 // 10])
    assert re.match(r"truncated: tensor \S+\.weight ends at byte [\d,]+, the file at byte [\d,]+$", refusal(path))


def test_absurd_counts_are_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60) + bytes(64))
    refusal(path)


def test_missing_tensor_is_named_with_its_shape(file_with: Callable[..., Path]) -> None:
    path = file_with(lambda settings, weights: weights.pop("blk.1.ffn_up.weight"))
    assert refusal(path) == "tensor blk.1.ffn_up.weight is missing, expected [160, 96]"


def test_missing_bias_is_named(file_with: Callable[..., Path]) -> None:
    path = file_with(lambda settings, weights: weights.pop("blk.2.attn_k.bias"))
    assert refusal(path) == "tensor blk.2.attn_k.bias is missing, expected [32]"


def test_extra_tensor_is_named(file_with: Callable[..., Path]) -> None:
    path = file_with(lambda settings, weights: weights.update({"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}))
    assert refusal(path) == "tensor blk.0.attn_q_norm.weight is not part of a qwen2 model"


def test_wrong_shape_is_named_with_both_shapes(file_with: Callable[..., Path]) -> None:
    path = file_with(lambda settings, weights: weights.update({"blk.0.ffn_down.weight": np.ones((96, 96), np.float32)}))
    assert refusal(path) == "tensor blk.0.ffn_down.weight has shape [96, 96], expected [96, 160]"


def test_unsupported_architecture_names_those_that_are(file_with: Callable[..., Path]) -> None:
    path = file_with(lambda settings, weights: settings.update({"general.architecture": "mamba"}))
    assert refusal(path) == (
        "architecture 'mamba' is not supported, expected one of gemma3, gpt2, llama, mistral, qwen2, qwen3"
    )


def test_unsupported_tensor_type_is_named(file_with: Callable[..., Path]) -> None:
    path = file_with(lambda settings, weights: weights.update({"blk.0.x": np.ones((1, 256), np.float32)}),
                     type_of=lambda name: "TQ1_0" if name == "blk.0.x" else "F32")  # fmt: skip
    assert refusal(path).startswith("tensor blk.0.x has ggml type 34, which is not supported; supported: F32, F16, ")


def test_missing_key_is_named(file_with: Callable[..., Path]) -> None:
    path = file_with(lambda settings, weights: settings.pop("qwen2.block_count"))
    assert refusal(path) == "qwen2.block_count is missing, expected a whole number"


def test_key_of_a_wrong_type_is_named(file_with: Callable[..., Path]) -> None:
    path = file_with(lambda settings, weights: settings.update({"qwen2.context_length": "long"}))
    assert refusal(path) == "qwen2.context_length: expected a whole number, got 'long'"


def test_unknown_rope_scaling_is_refused(file_with: Callable[..., Path]) -> None:
    path = file_with(lambda settings, weights: settings.update({"qwen2.rope.scaling.type": "yarn"}))
    assert refusal(path) == "qwen2.rope.scaling.type: expected 'none' or 'linear', got 'yarn'"


def test_vocabulary_larger_than_the_embedding_is_refused(file_with: Callable[..., Path]) -> None:
    def one_more(settings: dict[str, Any], weights: Weights) -> None:
        settings["tokenizer.ggml.tokens"] = [*settings["tokenizer.ggml.tokens"], "one more"]

    path = file_with(one_more)
    assert refusal(path) == "the vocabulary has 769 tokens but token_embd.weight only 768 rows"


def test_gemma3_has_five_sliding_layers_to_a_global_one_each_kind_with_its_rope(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny_gemma3(tmp_path / "model.gguf"))
    spec = checkpoint.spec
    local, whole = LayerSpec(sliding_window=8, rope=1), LayerSpec(sliding_window=0, rope=0)
    assert spec.layers == (local,) * 5 + (whole, local)
    assert [rope.inv_freq for rope in spec.ropes] == [frequencies(1e6, 32), frequencies(10000.0, 32)]
    assert (spec.qk_norm, spec.post_norms, spec.activation) == (True, True, "gelu_tanh")
    assert spec.embedding_scale == 64**0.5
    assert checkpoint.tensor("layers.3.ffn_post_norm").shape == (64,)
