"""/metrics, /status and the access log."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagedserve.contract.messages import Status
from tests.api_server import http, serving
from tests.fake_scheduler import FakeScheduler, byte_steps
from tests.server import eventually

REPOSITORY = Path(__file__).parents[2]
MODEL = {"model_name": "demo"}


class BusyScheduler(FakeScheduler):
    """Tells figures other than zero."""

    def _status(self, *, blocks: bool) -> Status:
        return msgspec.structs.replace(
            super()._status(blocks=blocks),
            num_running=3,
            num_waiting=2,
            num_free_blocks=16,
            num_cached_blocks=32,
            num_referenced_blocks=16,
            num_prompt_tokens=100,
            num_generation_tokens=50,
            num_cached_tokens=40,
            num_queried_tokens=90,
            num_preemptions=5,
            num_finished={"stop": 7, "length": 8},
        )


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """The API in front of a busy scheduler."""
    with (
        BusyScheduler(tmp_path / "s", byte_steps(b"abcde", finish_reason="stop")) as fake,
        serving(fake.endpoint) as url,
    ):
        yield url


def samples(url: str) -> dict[tuple[str, str], float]:
    """All samples: (name, the labels but the model's, written out) -> value."""
    values = {}
    for family in text_string_to_metric_families(http.get(f"{url}/metrics").text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "demo"
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "model_name")
            values[sample.name, labels] = sample.value
    return values


def test_the_schedulers_figures_have_vllms_names(url: str) -> None:
    values = samples(url)
    assert {name: values[f"vllm:{name}", ""] for name in ("num_requests_running", "num_requests_waiting")} == {
        "num_requests_running": 3,
        "num_requests_waiting": 2,
    }
    assert values["vllm:kv_cache_usage_perc", ""] == 0.25
    assert values["vllm:prefix_cache_queries_total", ""] == 90
    assert values["vllm:prefix_cache_hits_total", ""] == 40
    assert values["vllm:num_preemptions_total", ""] == 5
    assert values["vllm:prompt_tokens_total", ""] == 100
    assert values["vllm:generation_tokens_total", ""] == 50
    assert values["vllm:request_success_total", "finished_reason=stop"] == 7
    assert values["vllm:request_success_total", "finished_reason=length"] == 8
    assert values["vllm:request_success_total", "finished_reason=abort"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_counted_once_in_each_histogram(url: str, stream: bool) -> None:
    body = {"prompt": "abc", "stream": stream}
    assert http.post(f"{url}/v1/completions", json=body).status_code == 200
    values = samples(url)
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
    ):
        assert values[f"vllm:{name}_count", ""] == 1, name
    assert values["vllm:request_prompt_tokens_sum", ""] == 3
    assert values["vllm:request_generation_tokens_sum", ""] == 5


def test_a_refused_request_is_counted_in_no_histogram(url: str) -> None:
    assert http.post(f"{url}/v1/completions", json={"prompt": "a", "n": 0}).status_code == 400
    assert http.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 200
    assert samples(url)["vllm:e2e_request_latency_seconds_count", ""] == 1


def test_every_metric_of_the_dashboard_exists(url: str) -> None:
    http.post(f"{url}/v1/completions", json={"prompt": "abc"})
    names = {name for name, _ in samples(url)}
    dashboard = json.loads((REPOSITORY / "configs" / "grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    used = {word for e in expressions for word in e.replace("(", " ").replace("{", " ").replace("[", " ").split()}
    used = {word for word in used if word.startswith("vllm:")}
    assert len(used) > 12
    assert used <= names


def test_status_tells_the_pools_blocks_and_the_ttfts_since(url: str) -> None:
    http.post(f"{url}/v1/completions", json={"prompt": "abc"})
    status = http.get(f"{url}/status?blocks=true").json()
    assert status["block_states"] == "0123" * 16
    ((at, seconds),) = status["ttft"]
    assert 0 < seconds < 5
    assert http.get(f"{url}/status?since={at}").json()["ttft"] == []


def test_each_answer_has_one_line_of_json_in_the_log(url: str, caplog: pytest.LogCaptureFixture) -> None:
    def lines() -> list[dict[str, object]]:
        all_lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == "pagedserve.access"]
        return [line for line in all_lines if line["path"] != "/health"]

    with caplog.at_level(logging.INFO, "pagedserve.access"):
        http.post(f"{url}/v1/completions", json={"prompt": "abc"}, headers={"X-Request-Id": "mine-1"})
        http.get(f"{url}/nowhere")
        assert eventually(lambda: len(lines()) == 2, 10)  # a line is written once its answer is out
    first, second = lines()
    assert first.pop("duration_ms") > 0
    assert first == {
        "request_id": "mine-1",
        "client": "127.0.0.1",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "cached_tokens": 16,
    }
    assert (second["path"], second["status"]) == ("/nowhere", 404)


def test_a_request_id_is_honoured_or_made(url: str) -> None:
    response = http.post(f"{url}/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    assert response.json()["id"] == "cmpl-mine-1"
    for useless in ("", "x" * 129, "two words"):
        made = http.get(f"{url}/version", headers={"X-Request-Id": useless}).headers["x-request-id"]
        assert len(made) == 32
