"""Tokenizers: exact ids, what user text can never produce, bytes without a token, added tokens, every kind of file."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from pagedserve.contract.errors import ModelError, RequestError
from pagedserve.models.gguf_file import GgufFile
from pagedserve.text.added_tokens import AddedTokens
from pagedserve.text.byte_bpe import WORD_PATTERNS, ByteBpe, ranks_of
from pagedserve.text.gguf_tokenizer import gguf_tokenizer
from pagedserve.text.hf_tokenizer import hf_tokenizer
from pagedserve.text.load import load_text
from pagedserve.text.sentencepiece import SentencePieceBpe
from pagedserve.text.tokenizer import Tokenizer
from tests.gguf_models import write_gguf
from tests.golden_data import GOLDEN

GPT2_CASES: list[dict[str, Any]] = json.loads((GOLDEN / "gpt2-vocab" / "golden.json").read_text())["cases"]
BYTES = {bytes([byte]): byte for byte in range(256)}


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return hf_tokenizer(GOLDEN / "gpt2-vocab")


@pytest.mark.parametrize("case", GPT2_CASES, ids=range(len(GPT2_CASES)))
def test_gpt2_ids_equal_those_of_hugging_face(gpt2: Tokenizer, case: dict[str, Any]) -> None:
    assert gpt2.encode(case["text"]) == case["ids"]
    assert gpt2.decode(case["ids"]) == case["text"]


@given(st.text())
def test_text_survives_encoding(gpt2: Tokenizer, text: str) -> None:
    assert gpt2.decode(gpt2.encode(text)) == text


def test_control_tokens_come_only_from_the_template_call(gpt2: Tokenizer) -> None:
    text = "a<|endoftext|>b"
    assert gpt2.encode(text) == [64, 27, 91, 437, 1659, 5239, 91, 29, 65]
    assert gpt2.encode_with_special(text) == [64, 50256, 65]
    assert gpt2.is_control(50256)


def test_control_tokens_are_left_out_of_text_unless_asked_for(gpt2: Tokenizer) -> None:
    assert gpt2.decode([64, 50256, 65]) == "ab"
    assert gpt2.decode([64, 50256, 65], skip_special_tokens=False) == "a<|endoftext|>b"


@pytest.mark.parametrize("token_id", [-1, 50257, 10**9])
def test_unknown_ids_are_refused(gpt2: Tokenizer, token_id: int) -> None:
    with pytest.raises(RequestError, match=r"^token ids are 0 to 50256, got "):
        gpt2.decode([token_id])


def test_lone_surrogates_count_as_replacement_characters(gpt2: Tokenizer) -> None:
    assert gpt2.encode("a\ud800b") == gpt2.encode("a\ufffdb")


def test_a_million_white_spaces_encode(gpt2: Tokenizer) -> None:
    for space in " \n":
        text = space * 1_000_000 + "x"
        assert gpt2.decode(gpt2.encode(text)) == text


def test_smollm_splits_digits_and_the_space_before_them() -> None:
    # "  1": the two spaces are one word, the digit another; GPT-2's own pattern gives " " and " 1".
    ranks = BYTES | {b"  ": 256, b" 1": 257, b"12": 258}
    assert ByteBpe(ranks, WORD_PATTERNS["smollm"]).encode("  12") == [256, ord("1"), ord("2")]
    assert ByteBpe(ranks, WORD_PATTERNS["gpt-2"]).encode("  12") == [ord(" "), 257, ord("2")]


def test_qwen2_and_llama3_patterns_cut_numbers_into_one_and_three_digits() -> None:
    ranks = BYTES | {b"12": 256, b"123": 257, b"1234": 258}
    assert ByteBpe(ranks, WORD_PATTERNS["llama-bpe"]).encode("1234") == [257, ord("4")]
    assert ByteBpe(ranks, WORD_PATTERNS["qwen2"]).encode("12") == [ord("1"), ord("2")]


def test_character_with_a_byte_that_has_no_token_becomes_the_replacement_character() -> None:
    ranks = {token: i for token, i in BYTES.items() if token not in (b"\x04", b"\xf1", b"\xc3")}
    pieces = ByteBpe(ranks, WORD_PATTERNS["gpt-2"])
    assert bytes(pieces.encode("a\x04b")).decode() == "a\ufffdb"
    assert bytes(pieces.encode("\U00040000é!")).decode() == "\ufffd\ufffd!"


def test_character_that_cannot_even_be_replaced_is_left_out() -> None:
    pieces = ByteBpe({b"a": 0, b"b": 1}, WORD_PATTERNS["gpt-2"])
    assert pieces.encode("a\x04é b") == [0, 1]


def test_qwen2_text_is_normalised_first() -> None:
    pieces = ByteBpe(BYTES, WORD_PATTERNS["qwen2"], "NFC")
    assert bytes(pieces.encode("e\u0301")).decode() == "\u00e9"


def test_ranks_are_refused_where_merges_are_not_in_id_order() -> None:
    vocabulary = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4}
    assert ranks_of(vocabulary, [("a", "b"), ("b", "c")], ignore_merges=False) is not None
    assert ranks_of(vocabulary, [("b", "c"), ("a", "b")], ignore_merges=False) is None
    assert ranks_of(vocabulary, [("a", "c")], ignore_merges=False) is None


def test_token_that_no_merge_makes_is_encoded_only_with_ignore_merges() -> None:
    vocabulary = {"a": 0, "b": 1, "ab": 2, "aba": 3}
    assert ranks_of(vocabulary, [("a", "b")], ignore_merges=False) == {b"a": 0, b"b": 1, b"ab": 2}
    assert ranks_of(vocabulary, [("a", "b")], ignore_merges=True) == {b"a": 0, b"b": 1, b"ab": 2, b"aba": 3}


# ---- added tokens ----


def test_added_tokens_are_found_longest_first() -> None:
    added = AddedTokens({"<a>": 1, "<a><b>": 2, "\n": 3, "\n\n": 4})
    assert list(added.split("x<a><b><a>\n\n\ny<a")) == ["x", 2, 1, 4, 3, "y<a"]
    assert list(added.split("")) == []
    assert list(AddedTokens({}).split("<a>")) == ["<a>"]


@given(st.text(alphabet="<a|>b \n", max_size=30))
def test_broken_up_text_holds_no_token_even_when_more_follows(text: str) -> None:
    tokens = {"<a>": 1, "<|b|>": 2, "<a><|b|>": 3}
    added = AddedTokens(tokens)
    broken = added.break_up(text, "M")
    assert broken.replace("M", "") == text
    for rest in ("", "a>", "|b|>", ">", "b|>", "|>"):
        joined = broken.rstrip() + rest
        found = [i for i in range(len(joined)) for token in tokens if joined.startswith(token, i)]
        assert all(i >= len(broken.rstrip()) for i in found)


# ---- SentencePiece ----

PIECES = ["▁", "a", "b", "ab", "▁ab", "▁▁", "ba", ">", "▁<", ">▁<", "<"]


def sentencepiece(**options: Any) -> SentencePieceBpe:
    ids = {piece: i for i, piece in enumerate(PIECES)}
    settings = {"byte_ids": None, "unknown_id": 99} | options
    return SentencePieceBpe(ids, [-float(i) for i in range(len(PIECES))], **settings)


def test_sentencepiece_merges_the_best_score_first_and_the_leftmost_among_equals() -> None:
    assert sentencepiece().encode("abab") == [3, 3]
    assert sentencepiece().encode(" ab") == [4]
    assert sentencepiece().encode("   a") == [5, 0, 1]
    assert sentencepiece().encode("bab") == [2, 3]  # ab (-3) beats ba (-6)


def test_sentencepiece_writes_unknown_characters_as_bytes_or_as_unknown() -> None:
    assert sentencepiece().encode("aé") == [1, 99]
    assert sentencepiece(unknown_id=None).encode("aé") == [1]
    assert sentencepiece(byte_ids=range(1000, 1256)).encode("é") == [1000 + 0xC3, 1000 + 0xA9]


@given(st.text(alphabet=" ab><", max_size=24))
def test_sentencepiece_equals_a_naive_merge_loop(text: str) -> None:
    symbols = list(text.replace(" ", "▁"))
    scores = {piece: -i for i, piece in enumerate(PIECES)}
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in scores]
        if not pairs:
            break
        i = -max(pairs)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    assert sentencepiece().encode(text) == [PIECES.index(symbol) for symbol in symbols]


# ---- GGUF ----


def gguf_file(tmp_path: Path, **settings: Any) -> GgufFile:
    defaults = {"general.architecture": "llama"}
    keys = {f"tokenizer.ggml.{key}": value for key, value in settings.items()}
    return GgufFile(write_gguf(tmp_path / "model.gguf", defaults | keys, {}))


BPE = {
    "model": "gpt2",
    "pre": "gpt-2",
    "tokens": ["<eos>", "a", "b", "Ġ", "ab", "<think>"],
    "token_type": [3, 1, 1, 1, 1, 4],
    "merges": ["a b"],
    "eos_token_id": 0,
}


def test_gguf_byte_bpe_knows_control_and_user_defined_tokens(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(gguf_file(tmp_path, **BPE))
    assert tokenizer.encode("ab<think>a <eos>") == [4, 5, 1, 3]  # "<eos>" is text here, of bytes without tokens
    assert tokenizer.encode_with_special("ab<eos>") == [4, 0]
    assert tokenizer.decode([4, 5, 3, 0, 1]) == "ab<think> a"


def test_gguf_prompt_begins_with_bos_where_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(gguf_file(tmp_path, **BPE, bos_token_id=0, add_bos_token=True))
    assert tokenizer.encode_prompt("ab") == [0, 4]
    assert tokenizer.encode("ab") == [4]


def test_gguf_sentencepiece_decodes_bytes_and_spaces(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "  "]
    kinds = [2, 3, 3] + [6] * 256 + [1, 1, 1, 4]
    scores = [0.0] * 259 + [-1.0, -2.0, -0.5, 0.0]
    file = gguf_file(
        tmp_path, model="llama", tokens=tokens, token_type=kinds, scores=scores, unknown_token_id=0, bos_token_id=1
    )
    tokenizer = gguf_tokenizer(file)
    assert tokenizer.encode("a aé") == [261, 261, 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.encode_prompt("a") == [1, 261]
    assert tokenizer.decode([1, 261, 261, 3 + 0xC3, 3 + 0xA9]) == "a aé"
    assert tokenizer.encode("a▁ a") == tokenizer.encode("a  a") == [261, 262, 260]
    assert tokenizer.encode_with_special("a<s>a") == [261, 1, 261]  # the space goes before each text on its own


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model: expected 'gpt2' or 'llama', got 'bert'"),
        ({"pre": "poro"}, "tokenizer.ggml.pre: expected one of default, "),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges: expected two tokens with a space between, got 'ab'"),
        ({"merges": ["b a"]}, "tokenizer.ggml.merges are not in the order of the tokens that they make"),
        ({"token_type": [1, 1]}, "tokenizer.ggml.token_type: expected 6 numbers, got '2 numbers'"),
    ],
)
def test_gguf_tokenizer_that_cannot_be_read_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        gguf_tokenizer(gguf_file(tmp_path, **BPE | changes))
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "model.gguf"))


# ---- Hugging Face ----


def save(folder: Path, tokenizer: HfTokenizer, **config: Any) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_tokenizer_json_in_id_order_goes_through_tiktoken_and_agrees_with_hugging_face() -> None:
    folder = GOLDEN / "llama-tiny"
    ours, theirs = hf_tokenizer(folder), HfTokenizer.from_file(str(folder / "tokenizer.json"))
    theirs.encode_special_tokens = True
    assert isinstance(ours._pieces, ByteBpe)
    for case in GPT2_CASES:
        assert ours.encode(case["text"]) == theirs.encode(case["text"]).ids


def test_bos_of_a_post_processor_is_put_before_prompts(tmp_path: Path) -> None:
    content = json.loads((GOLDEN / "llama-tiny" / "tokenizer.json").read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = hf_tokenizer(tmp_path)
    assert tokenizer.encode_prompt("!") == [1, 3]
    assert tokenizer.encode("!") == [3]


def test_unigram_goes_through_the_tokenizers_package_and_never_yields_control_tokens(tmp_path: Path) -> None:
    vocabulary = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -3.0), ("a", -2.0), ("▁a", -1.0), ("</", -9.0), ("s", -9.0),
                  (">", -9.0), ("<", -9.0), ("/", -9.0)]  # fmt: skip
    made = HfTokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=False))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    made.add_special_tokens(["</s>"])
    tokenizer = hf_tokenizer(save(tmp_path, made))
    assert tokenizer.encode("a a") == [4, 4]
    assert tokenizer.decode([4, 4]) == "a a"
    assert 1 not in tokenizer.encode("a</s>")
    assert tokenizer.encode_with_special("a</s>") == [4, 1]


def test_bpe_with_byte_fallback_decodes_its_bytes(tmp_path: Path) -> None:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    made = HfTokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    )
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = hf_tokenizer(save(tmp_path, made))
    assert tokenizer.encode(" aé") == [259, 1 + 0xC3, 1 + 0xA9]
    assert tokenizer.decode([259, 1 + 0xC3, 1 + 0xA9]) == " aé"


def test_unsupported_decoder_is_refused(tmp_path: Path) -> None:
    made = HfTokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match=r"tokenizer\.json: decoder WordPiece is not supported$"):
        hf_tokenizer(save(tmp_path, made))


def test_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"vocab\.json: missing \(and there is no tokenizer\.json\)$"):
        hf_tokenizer(tmp_path)


def test_damaged_tokenizer_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(
        '{"model": {"type": "BPE", "vocab": {}}, "pre_tokenizer": {"type": "ByteLevel"}}'
    )
    with pytest.raises(ModelError, match=r"the tokenizer's files are damaged: KeyError\('merges'\)$"):
        hf_tokenizer(tmp_path)


def test_merges_in_another_order_than_the_ids_are_refused(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "gpt2-vocab" / "vocab.json", tmp_path)
    lines = (GOLDEN / "gpt2-vocab" / "merges.txt").read_text().splitlines()
    (tmp_path / "merges.txt").write_text("\n".join([lines[0], *reversed(lines[1:])]))
    with pytest.raises(ModelError, match="the merges are not pairs in the order of the ids"):
        hf_tokenizer(tmp_path)


# ---- demo ----


def test_demo_tokens_are_bytes() -> None:
    tokenizer = load_text("demo").tokenizer
    assert tokenizer.encode("é<|im_end|>") == list("é<|im_end|>".encode())
    assert tokenizer.vocab_size == 259
    assert tokenizer.encode_with_special("<|im_end|>") == [257]
