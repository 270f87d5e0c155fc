"""Logprobs in the shapes of the endpoints: tokens by their text. Computes no probability."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

import numpy as np

from pagedserve.api.answers import ChatLogprobs, CompletionLogprobs, PromptLogprobs, TokenLogprob, TopLogprob
from pagedserve.contract.messages import TokenLogprobs, unpack_ids
from pagedserve.text.tokenizer import Tokenizer


def _text(token: bytes) -> str:
    """A token's text; where it is no whole text, its bytes, as OpenAI writes them."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _top(entry: TokenLogprobs) -> Iterable[tuple[int, float]]:
    logprobs: list[float] = np.frombuffer(entry.top_logprobs, dtype="<f4").tolist()
    token_ids: list[int] = unpack_ids(entry.top_token_ids).tolist()
    return zip(token_ids, logprobs, strict=True)


class _Names:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id, skip_special_tokens=False)

    def text(self, token_id: int) -> str:
        return _text(self.bytes(token_id))


class CompletionLogprobsWriter:
    """Logprobs of one output of /v1/completions, as its tokens come; offsets count on from one call to the next."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._names = _Names(tokenizer)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def take(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> CompletionLogprobs:
        """The lists for these tokens. An entry None (nothing precedes the first token of a prompt) is null."""
        answer = CompletionLogprobs([], [], [], [])
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            name = self._names.text(token_id)
            answer.tokens.append(name)
            answer.text_offset.append(self._offset)
            self._offset += len(self._utf8.decode(self._names.bytes(token_id)))
            if entry is None:
                answer.token_logprobs.append(None)
                answer.top_logprobs.append(None)
                continue
            top = {self._names.text(other): logprob for other, logprob in _top(entry)}
            answer.token_logprobs.append(entry.logprob)
            answer.top_logprobs.append(top | {name: entry.logprob})
        return answer


def chat_logprobs(tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """The logprobs of some tokens of a chat's answer."""
    names = _Names(tokenizer)
    return ChatLogprobs(
        [
            TokenLogprob(
                names.text(token_id),
                entry.logprob,
                list(names.bytes(token_id)),
                [TopLogprob(names.text(other), logprob, list(names.bytes(other))) for other, logprob in _top(entry)],
            )
            for token_id, entry in zip(token_ids, logprobs, strict=True)
        ]
    )


def prompt_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
) -> PromptLogprobs:
    """The prompt's logprobs in vLLM's shape: for each token its own entry and the likeliest, by token id."""
    names = _Names(tokenizer)

    def entry_of(token_id: int, logprob: float, rank: int) -> dict[str, object]:
        return {"logprob": logprob, "rank": rank, "decoded_token": names.text(token_id)}

    answer: PromptLogprobs = []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        if entry is None:
            answer.append(None)
            continue
        top = {str(other): entry_of(other, logprob, rank) for rank, (other, logprob) in enumerate(_top(entry), 1)}
        answer.append({str(token_id): entry_of(token_id, entry.logprob, entry.rank)} | top)
    return answer
