"""What the kernel benchmark measures is right: its attention is attention, its costs and slopes are arithmetic."""

from __future__ import annotations

import pytest

from bench import attention, linear
from bench.context import OUTPUT_LEN, slopes
from bench.cost import Cost, model_cost
from bench.peaks import Peaks
from bench.team import Team

_PEAKS = Peaks(cores=2, int8_gops=1000.0, float32_gflops=200.0, read_gbytes_per_s=20.0, read_pages_gbytes_per_s=15.0)


@pytest.mark.parametrize("variant", sorted(attention.VARIANTS))
@pytest.mark.parametrize(
    "shape",
    [attention.Shape(40, 2), attention.Shape(700, 1), attention.Shape(100, 1, query_len=33)],
    ids=["short", "split", "prefill"],
)
def test_every_variant_of_attention_computes_dense_attention(variant: str, shape: attention.Shape) -> None:
    problem = attention.Problem(shape, team_size=2, pool_bytes=1 << 20)
    assert attention.error(problem, attention.VARIANTS[variant], Team(2)) < attention.TOLERANCE


def test_bytes_and_operations_of_attention_are_counted_by_what_a_query_sees() -> None:
    assert attention.Shape(100, 3).num_bytes == 3 * 100 * 3 * 64 * 2 * 2
    assert attention.Shape(100, 3).num_operations == 3 * 100 * 9 * 64 * 4
    assert attention.Shape(4, 1, query_len=2).num_operations == (3 + 4) * 9 * 64 * 4


def test_every_weight_type_can_be_measured() -> None:
    for kind in linear.TYPES:
        assert linear.packed_layer(kind).nbytes >= linear.N_IN * linear.N_OUT * 0.55


def test_the_cost_of_the_demo_model_is_that_of_its_tensors() -> None:
    weights_a_layer = 64 * (64 + 2 * 32 + 64 + 3 * 128)  # q, k and v, o; gate, up and down
    assert model_cost("demo", "auto", "none") == Cost(
        weight_bytes=4 * (4 * weights_a_layer + 272 * 64),  # float32; the head's 264 rows are whole panels
        kv_bytes_per_token=4 * 2 * 2 * 16 * 2,
        linear_operations_per_token=2 * 4 * weights_a_layer,
        attention_operations_per_pair=4 * 4 * 4 * 16,
    )
    assert model_cost("demo", "f32", "none").kv_bytes_per_token == 2 * 4 * 2 * 2 * 16 * 2


def test_slopes_are_found_where_the_times_follow_the_arithmetic() -> None:
    cost = Cost(
        weight_bytes=96_000_000,
        kv_bytes_per_token=20_000,
        linear_operations_per_token=250_000_000,
        attention_operations_per_pair=70_000,
    )
    lengths = (128, 1024, 4096, 8192)
    results = [
        {
            "median_tpot_ms": 1e3 * cost.tpot_s(length, _PEAKS),
            "median_ttft_ms": 1e3 * cost.ttft_s(length - OUTPUT_LEN, _PEAKS),
        }
        for length in lengths
    ]
    found = slopes(lengths, results, cost, _PEAKS)
    assert found["predicted"] == {"tpot_us_per_token": 1.0, "ttft_us_per_token": 250.0, "ttft_ns_per_pair": 350.0}
    assert found["measured"] == pytest.approx(found["predicted"])
