"""`python -m tests.kernels.isa_probe FILE`: outputs of attention and sampling, for test_isa.py to compare."""

from __future__ import annotations

import sys

import numpy as np

from tests.kernels.paged import Paged, Shape
from tests.kernels.test_sample import Row, random_logits
from workers.kernels.simd import isa_name


def outputs() -> dict[str, np.ndarray]:
    """Attention over both pool types, head_dims with and without a remainder, a window; sampled ids and logprobs."""
    arrays = {"isa": np.array(isa_name())}
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
    return arrays


if __name__ == "__main__":
    np.savez(sys.argv[1], **outputs())
