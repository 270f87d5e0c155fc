"""`python -m tests.kernels.isa_probe FILE`: outputs of all kernels, for test_isa.py to compare."""

from __future__ import annotations

import sys

import numpy as np

from tests.kernels import test_linear as linear
from tests.kernels.paged import Paged, Shape
from tests.kernels.test_sample import Row, random_logits
from workers.kernels.activation import gelu_tanh_mul_row, silu_mul_row
from workers.kernels.norm import layer_norm_row, rms_norm_row
from workers.kernels.target import isa_name, target_features


def outputs() -> dict[str, np.ndarray]:
    """Attention over both pool types, head_dims with and without a remainder, a window; sampled ids and logprobs."""
    has_vnni = isa_name() == "avx2" and "avxvnni" in target_features()
    arrays = {"isa": np.array("avx2 with VNNI" if has_vnni else isa_name())}
    for dtype in ("float16", "float32"):
        for head_dim, window in ((64, 0), (80, 0), (48, 90)):
            shape = Shape(num_heads=9, num_kv_heads=3, head_dim=head_dim, window=window, dtype=dtype)
            paged = Paged(shape, [300, 33])
            for query_len in (1, 33):
                arrays[f"attention {dtype} {head_dim} {window} {query_len}"] = np.concatenate(
                    paged.attend([query_len, query_len])
                )
    row = Row(random_logits(5000))
    chosen = [row.run(temperature=0.8, top_k=300, top_p=0.9, position=p, num_logprobs=20) for p in range(50)]
    arrays["sampled"] = np.array(chosen)
    arrays["logprobs"] = np.append(row.top_logprobs[:20], row.logprob)
    return arrays | linear_outputs() | row_outputs()


def linear_outputs() -> dict[str, np.ndarray]:
    """Every weight type x numbers of rows that need every height of register tile."""
    rng, arrays = np.random.default_rng(0), {}
    n_out, n_in = 72, 160  # panels are an odd number: the last one is alone
    for name in linear.TYPES:
        wtype, w = linear.packed(linear.file_bytes(rng, name, n_out, n_in), name, n_out, n_in)
        x = linear.outliers(rng, 13, n_in) / 64
        for rows in range(1, 14):
            arrays[f"linear {name} {rows}"] = linear.run(wtype, w, x[:rows], n_out)
    return arrays


def row_outputs() -> dict[str, np.ndarray]:
    """Norms and activations, whose quantised forms follow from their bits."""
    rng = np.random.default_rng(1)
    x, weight, bias = (rng.standard_normal(100).astype(np.float32) * 4 for _ in range(3))
    outs = np.zeros((4, 100), dtype=np.float32)
    at = [out.ctypes.data for out in outs]
    rms_norm_row(x.ctypes.data, 100, weight.ctypes.data, 1e-5, at[0])
    layer_norm_row(x.ctypes.data, 100, weight.ctypes.data, bias.ctypes.data, 1e-5, at[1])
    silu_mul_row(x.ctypes.data, weight.ctypes.data, 100, at[2])
    gelu_tanh_mul_row(x.ctypes.data, weight.ctypes.data, 100, at[3])
    return {"rows": outs}


if __name__ == "__main__":
    np.savez(sys.argv[1], **outputs())
