"""Reads the tokenizer of a Hugging Face folder: tokenizer.json, or vocab.json with merges.txt.

Byte-level BPE goes through tiktoken wherever ids and merges allow, anything else through the `tokenizers` package.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagedserve.contract.errors import ModelError
from pagedserve.models.hf import read_json
from pagedserve.text.byte_bpe import NORMALIZATIONS, WORD_PATTERNS, ByteBpe, ranks_of
from pagedserve.text.tokenizer import PieceEncoder, Tokenizer
from pagedserve.text.vocabulary import Vocabulary, byte_level

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def hf_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder. ModelError names the file that is missing, damaged or of an unsupported kind."""
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.exists() else {}
    try:
        if (folder / "tokenizer.json").exists():
            return _from_tokenizer_json(folder / "tokenizer.json", config)
        return _from_vocab_and_merges(folder, config)
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder}: the tokenizer's files are damaged: {error!r}") from None


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The texts of bos_token, eos_token, … of a tokenizer_config.json, which gives them as text or as an object."""
    found = {}
    for name in SPECIAL_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _from_tokenizer_json(path: Path, config: Mapping[str, Any]) -> Tokenizer:
    tokenizer = read_json(path)
    model = tokenizer["model"]
    added = {token["content"]: token for token in tokenizer.get("added_tokens") or []}
    control = {text: int(token["id"]) for text, token in added.items() if token.get("special")}
    prefix = _template_prefix(tokenizer.get("post_processor"))
    bos_token = special_tokens(config).get("bos_token")
    if not prefix and config.get("add_bos_token") and bos_token in control:
        prefix = [control[bos_token]]
    vocabulary: dict[str, int] = model["vocab"] if isinstance(model.get("vocab"), dict) else {}
    pieces = _byte_bpe(tokenizer, {text: i for text, i in vocabulary.items() if text not in added})
    if pieces is None:
        from pagedserve.text.hf_pieces import HfPieces

        fallback = HfPieces(path, frozenset(control.values()))
        return Tokenizer(
            fallback,
            Vocabulary(
                fallback.token_bytes(), control, bos_token_id=prefix[0] if prefix else None, add_bos=bool(prefix)
            ),
            strip_leading_space=fallback.adds_space,
        )
    user_defined = {text: int(token["id"]) for text, token in added.items() if not token.get("special")}
    return _byte_level_tokenizer(pieces, vocabulary, control, user_defined, prefix)


def _from_vocab_and_merges(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    for name in ("vocab.json", "merges.txt"):
        if not (folder / name).exists():
            raise ModelError(f"{folder / name}: missing (and there is no tokenizer.json)")
    vocabulary: dict[str, int] = read_json(folder / "vocab.json")
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    ranks = ranks_of(vocabulary, [(a, b) for a, b in pairs], ignore_merges=False) if _all_pairs(pairs) else None
    if ranks is None:
        raise ModelError(f"{folder / 'merges.txt'}: the merges are not pairs in the order of the ids in vocab.json")
    pattern = "qwen2" if str(config.get("tokenizer_class", "")).startswith("Qwen2") else "gpt-2"
    added = {token["content"]: (int(i), token) for i, token in (config.get("added_tokens_decoder") or {}).items()}
    control = {text: i for text, (i, token) in added.items() if token.get("special")}
    # Old folders name their control tokens only here, or (GPT-2) nowhere.
    control |= {text: vocabulary[text] for text in special_tokens(config).values() if text in vocabulary}
    if "<|endoftext|>" in vocabulary:
        control["<|endoftext|>"] = vocabulary["<|endoftext|>"]
    user_defined = {text: i for text, (i, token) in added.items() if text not in control}
    pieces = ByteBpe(ranks, WORD_PATTERNS[pattern], NORMALIZATIONS.get(pattern))
    bos_token = special_tokens(config).get("bos_token", "")
    prefix = [control[bos_token]] if config.get("add_bos_token") and bos_token in control else []
    return _byte_level_tokenizer(pieces, vocabulary, control, user_defined, prefix)


def _byte_level_tokenizer(
    pieces: PieceEncoder,
    vocabulary: Mapping[str, int],
    control: Mapping[str, int],
    user_defined: Mapping[str, int],
    prefix: list[int],
) -> Tokenizer:
    token_bytes = [b""] * (max([*vocabulary.values(), *control.values(), *user_defined.values()]) + 1)
    for token, i in vocabulary.items():
        token_bytes[i] = byte_level(token)
    for token, i in (*control.items(), *user_defined.items()):
        token_bytes[i] = token.encode()
    bos_token_id = prefix[0] if prefix else None
    return Tokenizer(pieces, Vocabulary(token_bytes, control, user_defined, bos_token_id, add_bos=bool(prefix)))


def _all_pairs(pairs: list[list[str]]) -> bool:
    return all(len(pair) == 2 for pair in pairs)


def _byte_bpe(tokenizer: Mapping[str, Any], vocabulary: Mapping[str, int]) -> ByteBpe | None:
    """The tokenizer.json as a ByteBpe, or None where it is something else."""
    model, normalizer = tokenizer["model"], tokenizer.get("normalizer")
    pattern = _word_pattern(tokenizer.get("pre_tokenizer"))
    if model.get("type") != "BPE" or pattern is None or model.get("dropout") or model.get("byte_fallback"):
        return None
    if normalizer is not None and normalizer.get("type") != "NFC":
        return None
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    if not _all_pairs(pairs):
        return None
    ranks = ranks_of(vocabulary, [(a, b) for a, b in pairs], ignore_merges=bool(model.get("ignore_merges")))
    if ranks is None:
        return None
    try:
        return ByteBpe(ranks, pattern, "NFC" if normalizer else None)
    except ValueError:  # the pattern is in a dialect that tiktoken's engine does not read
        return None


def _word_pattern(pre_tokenizer: Mapping[str, Any] | None) -> str | None:
    """The one regular expression that cuts words as the pre-tokenizer does, or None."""
    steps = (pre_tokenizer or {}).get("pretokenizers") or [pre_tokenizer or {}]
    kinds = [step.get("type") for step in steps]
    last = steps[-1]
    if kinds[-1] != "ByteLevel" or last.get("add_prefix_space"):
        return None
    uses_gpt2_pattern = last.get("use_regex", True)
    if kinds == ["ByteLevel"] and uses_gpt2_pattern:
        return WORD_PATTERNS["gpt-2"]
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") and uses_gpt2_pattern:
        return WORD_PATTERNS["smollm"]
    if kinds == ["Split", "ByteLevel"] and not uses_gpt2_pattern:
        pattern = steps[0].get("pattern", {}).get("Regex")
        if steps[0].get("behavior") == "Isolated" and not steps[0].get("invert") and isinstance(pattern, str):
            return pattern
    return None


def _template_prefix(post_processor: Mapping[str, Any] | None) -> list[int]:
    """The ids that a TemplateProcessing puts before a text; it may be one of a sequence."""
    for step in (post_processor or {}).get("processors") or [post_processor or {}]:
        if step.get("type") != "TemplateProcessing":
            continue
        ids: list[int] = []
        for item in step["single"]:
            if "SpecialToken" not in item:
                break
            ids += step["special_tokens"][item["SpecialToken"]["id"]]["ids"]
        return ids
    return []
