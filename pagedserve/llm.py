"""LLM: offline use, in a script or a notebook. Starts a server of its own, asks it, ends it; computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pagedserve.client import Client, Completion, SamplingParams, Stream
from pagedserve.config import load_config
from pagedserve.contract.errors import RequestError
from pagedserve.models.catalog import fetch_if_missing
from pagedserve.private_server import PrivateServer

Message = Mapping[str, Any]
Prompt = str | Sequence[int]
Sampling = SamplingParams | Sequence[SamplingParams] | None
_Start = Callable[[SamplingParams], Stream]


class LLM:
    """A model to call: `with LLM("smollm2") as llm: llm.generate(["Once"], SamplingParams(max_tokens=20))`.

    `settings` are keys of the configuration (workers=2, compute="f32"). `progress` False: nothing is printed. A model
    of the catalogue that is not here yet is fetched. The server ends with `close`, or with this process at the latest.
    PagedServeError says why it could not be started.
    """

    def __init__(self, model: str = "smollm2", *, progress: bool = True, **settings: Any) -> None:
        self._console = Console(stderr=True, quiet=not progress)
        config = load_config({"model": model, **settings})
        path = fetch_if_missing(config.model, config.models_dir, self._tell)
        self._server = PrivateServer(msgspec.structs.replace(config, model=str(path)))
        with self._console.status(f"starting a server for {config.model}"):
            self._server.start()
        try:
            self.client = Client(self._server.endpoint)
        except BaseException:
            self._server.end()
            raise
        num_seqs = self.client.welcome.max_num_seqs
        self._max_live = num_seqs + min(num_seqs, config.max_waiting)  # some wait, so that the server never does

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling = None,
        **options: Any,
    ) -> list[Completion]:
        """Continue prompts (a text, token ids, or several of either); the completions in the order of the prompts.

        `sampling` is for all, or one for each. `options` are those of Client.generate (stop, priority, …). RequestError
        for the first request that cannot be served; the others are then ended.
        """
        several: Sequence[Any] = [prompts] if _is_one_prompt(prompts) else prompts
        return self._run([self._starter(self.client.generate, prompt, options) for prompt in several], sampling)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: Sampling = None,
        **options: Any,
    ) -> list[Completion]:
        """Answer a conversation, or several, of {"role", "content"} messages; the rest is as in `generate`."""
        is_one = bool(conversations) and isinstance(conversations[0], Mapping)
        several: Sequence[Any] = [conversations] if is_one else conversations
        return self._run([self._starter(self.client.chat, messages, options) for messages in several], sampling)

    def close(self) -> None:
        """End the server. Nothing of it stays."""
        self.client.close()
        self._server.end()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _tell(self, text: str) -> None:
        self._console.print(text, highlight=False)

    @staticmethod
    def _starter(start: Callable[..., Stream], prompt: object, options: dict[str, Any]) -> _Start:
        return lambda sampling: start(prompt, sampling=sampling, **options)

    def _run(self, starts: Sequence[_Start], sampling: Sampling) -> list[Completion]:
        params = _one_for_each(sampling, len(starts))
        results: dict[int, Completion] = {}
        live: dict[int, Stream] = {}
        num_started = 0
        try:
            with _progress(self._console) as bar:
                task = bar.add_task("", total=len(starts), rate="")
                while len(results) < len(starts):
                    while num_started < len(starts) and self._has_room(live, params, num_started):
                        live[num_started] = starts[num_started](params[num_started])
                        num_started += 1
                    self.client.pump_until(lambda: any(stream.has_ended for stream in live.values()))
                    for index in [index for index, stream in live.items() if stream.has_ended]:
                        results[index] = live[index].result()
                        del live[index]
                    num_tokens = sum(completion.usage.completion_tokens for completion in results.values())
                    elapsed_s = bar.tasks[0].elapsed
                    rate = f"{num_tokens / elapsed_s:.0f} tokens/s" if elapsed_s else ""
                    bar.update(task, completed=len(results), rate=rate)
        finally:
            for stream in live.values():
                stream.abort()
        return [results[index] for index in range(len(starts))]

    def _has_room(self, live: Mapping[int, Stream], params: Sequence[SamplingParams], index: int) -> bool:
        num_live = sum(_num_sequences(params[other]) for other in live)
        return not live or num_live + _num_sequences(params[index]) <= self._max_live


def _num_sequences(sampling: SamplingParams) -> int:
    return max(sampling.n, sampling.best_of or 1, sampling.beam_width)


def _is_one_prompt(prompts: object) -> bool:
    return isinstance(prompts, str) or (isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int))


def _one_for_each(sampling: Sampling, number: int) -> list[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * number
    if len(sampling) != number:
        raise RequestError(
            f"sampling: expected one for each of {number} prompts, got {len(sampling)}", param="sampling"
        )
    return list(sampling)


def _progress(console: Console) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=console.quiet or not (console.is_terminal or console.is_jupyter))
