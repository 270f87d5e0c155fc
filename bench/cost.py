"""What the arithmetic of a model says of a step: bytes read, operations done. For predictions; measures nothing."""

from __future__ import annotations

from dataclasses import dataclass

from bench.peaks import Peaks
from pagedserve.models.open import open_checkpoint
from workers.weights import plan_layout


@dataclass(frozen=True)
class Cost:
    """Of one model in one mode of computing. Layers with a sliding window count as if they had none."""

    weight_bytes: int  # read by a step, however many tokens it has
    kv_bytes_per_token: int  # of context, read for each token that is decoded
    linear_operations_per_token: int  # without the head, which only tokens that sample need
    attention_operations_per_pair: int  # of a query and a token that it sees

    def tpot_s(self, context: int, peaks: Peaks) -> float:
        """The least time of one decoded token: its bytes at the speed of memory."""
        return (self.weight_bytes + self.kv_bytes_per_token * context) / peaks.read_gbytes_per_s / 1e9

    def ttft_s(self, prompt_len: int, peaks: Peaks) -> float:
        """The least time of a prompt: linear layers at the int8 peak, attention to what comes before at float32's."""
        pairs = prompt_len * (prompt_len + 1) / 2
        linear = prompt_len * self.linear_operations_per_token / peaks.int8_gops
        return (linear + pairs * self.attention_operations_per_pair / peaks.float32_gflops) / 1e9


def model_cost(path: str, compute: str, quantize: str) -> Cost:
    """The cost of the model in a file or folder; `compute` and `quantize` as in the configuration."""
    checkpoint = open_checkpoint(path)
    spec = checkpoint.spec
    matrices = plan_layout(checkpoint, spec, compute, quantize).matrices
    read = [matrix for name, matrix in matrices.items() if name != "embed" or spec.tied]
    layers = [matrix for name, matrix in matrices.items() if name.startswith("layers.")]
    return Cost(
        weight_bytes=sum(matrix.num_bytes for matrix in read),
        kv_bytes_per_token=spec.kv_bytes_per_token(4 if compute == "f32" else 2),
        linear_operations_per_token=2 * sum(matrix.n_out * matrix.n_in for matrix in layers),
        attention_operations_per_pair=4 * spec.num_layers * spec.num_heads * spec.head_dim,
    )
