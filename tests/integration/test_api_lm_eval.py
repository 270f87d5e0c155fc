"""lm-evaluation-harness itself, in `local-completions` mode, on a small task of local data; skipped where it is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.api_server import http

TASK = """
task: likelier
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: 0
doc_to_choice: [" blue", " a very green one", " !"]
metric_list: [{{metric: acc}}]
"""


def test_its_scores_are_the_sums_of_our_logprobs(api_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    questions = ["The sky is", "Grass is", "My favourite colour is"]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"question": question}) + "\n" for question in questions))
    (tmp_path / "likelier.yaml").write_text(TASK.format(data=data))
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=f"model=demo,base_url={api_url}/v1/completions,num_concurrent=2,tokenizer_backend=remote",
        tasks=["likelier"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    for sample in results["samples"]["likelier"]:
        for (context, continuation), ((loglikelihood, _),) in zip(
            (args for args in sample["arguments"]), sample["resps"], strict=True
        ):
            body = {"prompt": context + continuation, "max_tokens": 0, "echo": True, "logprobs": 1}
            (choice,) = http.post(f"{api_url}/v1/completions", json=body).json()["choices"]
            ours = sum(choice["logprobs"]["token_logprobs"][len(context) :])
            assert float(loglikelihood) == pytest.approx(ours, abs=1e-4)
