"""Reads the tokenizer that a GGUF file carries: its vocabulary, merges or scores, and the kinds of its tokens."""

from __future__ import annotations

from pagedserve.contract.errors import ModelError
from pagedserve.models.gguf_file import GgufFile
from pagedserve.models.settings import Settings
from pagedserve.text.sentencepiece import SPACE, SentencePieceBpe
from pagedserve.text.tokenizer import PieceEncoder, Tokenizer
from pagedserve.text.vocabulary import Vocabulary, byte_level

# tokenizer.ggml.token_type
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 3, 4, 5, 6

# Names of word patterns in files -> the pattern of byte_bpe.WORD_PATTERNS.
_PATTERN_OF = {
    "default": "gpt-2",
    "gpt-2": "gpt-2",
    "gpt2": "gpt-2",
    "smollm": "smollm",
    "llama-bpe": "llama-bpe",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
}


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer of a GGUF file. ModelError names the file and what is missing or unsupported."""
    settings = file.settings("tokenizer.ggml.")
    model = settings.text("model")
    if model == "gpt2":
        return _byte_bpe(settings)
    if model == "llama":
        return _sentencepiece(settings)
    raise settings.wrong("model", "'gpt2' or 'llama'", model)


def _byte_bpe(settings: Settings) -> Tokenizer:
    from pagedserve.text.byte_bpe import NORMALIZATIONS, WORD_PATTERNS, ByteBpe, ranks_of

    tokens, types = _tokens_and_types(settings)
    pre = settings.text("pre", "default")
    if pre not in _PATTERN_OF:
        raise settings.wrong("pre", f"one of {', '.join(_PATTERN_OF)}", pre)
    pattern = _PATTERN_OF[pre]
    normal = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == _NORMAL}
    merges = [_pair(settings, merge) for merge in settings.strings("merges")]
    ranks = ranks_of(normal, merges, ignore_merges=pattern == "llama-bpe")
    if ranks is None:
        raise ModelError(f"{settings.path}: tokenizer.ggml.merges are not in the order of the tokens that they make")
    token_bytes = [
        byte_level(token) if kind == _NORMAL else token.encode() for token, kind in zip(tokens, types, strict=True)
    ]
    pieces = ByteBpe(ranks, WORD_PATTERNS[pattern], NORMALIZATIONS.get(pattern))
    return Tokenizer(pieces, _vocabulary(settings, tokens, types, token_bytes, add_bos=False))


def _pair(settings: Settings, merge: str) -> tuple[str, str]:
    first, space, second = merge.partition(" ")
    if not space:
        raise settings.wrong("merges", "two tokens with a space between", merge)
    return first, second


def _sentencepiece(settings: Settings) -> Tokenizer:
    tokens, types = _tokens_and_types(settings)
    scores = settings.numbers("scores")
    if len(scores) != len(tokens):
        raise settings.wrong("scores", f"{len(tokens)} numbers", f"{len(scores)} numbers")
    pairs = list(zip(tokens, types, strict=True))
    byte_of = {i: bytes([int(token[3:5], 16)]) for i, (token, kind) in enumerate(pairs) if kind == _BYTE}
    token_bytes = [
        byte_of[i] if kind == _BYTE else token.replace(SPACE, " ").encode() if kind == _NORMAL else token.encode()
        for i, (token, kind) in enumerate(pairs)
    ]
    ids_of_bytes = {byte[0]: i for i, byte in byte_of.items()}
    pieces: PieceEncoder = SentencePieceBpe(
        {token: i for i, (token, kind) in enumerate(pairs) if kind == _NORMAL},
        scores,
        byte_ids=[ids_of_bytes[byte] for byte in range(256)] if len(ids_of_bytes) == 256 else None,
        unknown_id=settings.integer("unknown_token_id") if settings.has("unknown_token_id") else None,
    )
    space_prefix = settings.flag("add_space_prefix", True)
    return Tokenizer(
        pieces,
        _vocabulary(settings, tokens, types, token_bytes, add_bos=True),
        add_space_prefix=space_prefix,
        strip_leading_space=space_prefix,
        written_space=SPACE,
    )


def _tokens_and_types(settings: Settings) -> tuple[list[str], list[int]]:
    tokens = settings.strings("tokens")
    types = settings.integers("token_type") if settings.has("token_type") else [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise settings.wrong("token_type", f"{len(tokens)} numbers", f"{len(types)} numbers")
    return tokens, types


def _vocabulary(
    settings: Settings, tokens: list[str], types: list[int], token_bytes: list[bytes], *, add_bos: bool
) -> Vocabulary:
    def token_id(key: str) -> int | None:
        return settings.integer(key) if settings.has(key) else None

    pairs = list(enumerate(zip(tokens, types, strict=True)))
    control = {token: i for i, (token, kind) in pairs if kind in (_CONTROL, _UNUSED)}
    for key in ("bos_token_id", "eos_token_id", "eot_token_id"):  # control tokens whatever their type says
        if (i := token_id(key)) is not None and i < len(tokens):
            control[tokens[i]] = i
    return Vocabulary(
        token_bytes=token_bytes,
        control=control,
        user_defined={token: i for i, (token, kind) in pairs if kind == _USER_DEFINED and token not in control},
        bos_token_id=token_id("bos_token_id"),
        eos_token_id=token_id("eos_token_id"),
        add_bos=settings.flag("add_bos_token", add_bos),
        add_eos=settings.flag("add_eos_token", False),
    )
