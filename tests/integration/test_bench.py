"""`pagedserve bench` from its command line to its result file, on the demo model."""

from __future__ import annotations

import json

import pytest

from tests.server import RunFolder

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]  # the first start on a machine compiles the kernels


def test_latency_and_serve_measure_a_server_of_their_own_and_compare_tells_ratios() -> None:
    folder = RunFolder()
    try:
        demo = ("--model", "demo", "--pool-tokens", "4096", "--workers", "2")
        shape = ("--num-prompts", "3", "--input-len", "20", "--output-len", "8")
        done = folder.run("bench", "latency", *shape, *demo, "--json", "a.json")
        assert done.returncode == 0, done.stderr
        assert "Median TPOT (ms)" in done.stdout
        rate = ("--concurrency", "2", "--request-rate", "50", "--shared-len", "64", "--repeat", "2")
        done = folder.run("bench", "serve", *shape, *demo, *rate, "--json", "b.json", "--label", "loaded")
        assert done.returncode == 0, done.stderr
        latency, serve = (json.loads((folder.path / name).read_text()) for name in ("a.json", "b.json"))
        assert (latency["benchmark"], serve["benchmark"], serve["label"]) == ("latency", "serve", "loaded")
        assert latency["setup"]["workers"] == 2
        for document, prompt_len in ((latency, 20), (serve, 84)):
            (result,) = document["results"]
            assert (result["completed"], result["failed"]) == (3, 0)
            assert (result["total_input_tokens"], result["total_output_tokens"]) == (3 * prompt_len, 24)
            assert result["server"]["num_steps"] > 0
            shares = [result["server"][f"{part}_share"] for part in ("kernel", "worker", "outside")]
            assert sum(shares) == pytest.approx(100.0, abs=0.1)
        assert len(serve["results"][0]["durations"]) == 2
        assert serve["results"][0]["total_cached_tokens"] > 0
        done = folder.run("bench", "compare", "a.json", "b.json")
        assert done.returncode == 0, done.stderr
        assert "median_ttft_ms" in done.stdout
        assert folder.segments() == []
    finally:
        folder.remove()


def test_bench_refuses_in_one_line() -> None:
    folder = RunFolder()
    try:
        for arguments, words in (
            (("latency", "conc99"), "error: unknown workload 'conc99'"),
            (("serve", "conc8", "--num-prompts", "3"), "error: conc8: expected workloads or a shape"),
            (("serve", "--extra-body", "["), "error: --extra-body: expected a JSON object"),
            (("latency", "--url", "http://127.0.0.1:9"), "error: http://127.0.0.1:9: "),
        ):
            done = folder.run("bench", *arguments)
            assert done.returncode != 0
            assert done.stderr.startswith(words), done.stderr
            assert len(done.stderr.splitlines()) == 1, done.stderr
    finally:
        folder.remove()
