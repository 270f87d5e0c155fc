"""The `team` segment: control words, then every array that the members share within a step.

Nothing here outlives a step but the token ids that it samples, which the next one may read. The layout is a function of
the model and the instance's limits, the same in each member.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pagedserve.contract import segments
from pagedserve.contract.control import CONTROL_BYTES
from pagedserve.contract.messages import Ids, Int32, Setup, pack_ids
from pagedserve.contract.sampling import MAX_LOGPROBS
from workers.kernels.attention import attention_scratch_bytes
from workers.kernels.linear_pack import WTYPE_Q8_0
from workers.kernels.quantize import act_row_bytes
from workers.weights import WeightLayout

SAMPLED_PLACES = 3  # a step reads what the one before it sampled, and may be run again when the one after it has run
LOGITS_ROWS = 32  # rows whose logits exist at once: 6 MB of a vocabulary of 49,152

_ALIGNMENT = 64


class Arena:
    """A mapped `team` segment. `address(name)` is where an array is in this process."""

    def __init__(self, segment: segments.Segment, offsets: dict[str, int], num_bytes: int, max_rows: int) -> None:
        self._segment = segment  # keeps the mapping alive
        self._memory = segment.memory
        self._offsets = offsets
        self._max_rows = max_rows
        self.control = int(self._memory.ctypes.data)  # address of the control words
        self._sampled = self.address("sampled")
        self.num_bytes = num_bytes

    def address(self, name: str) -> int:
        """Address of an array."""
        return self.control + self._offsets[name]

    def sampled(self, step_id: int, num_sampled: int) -> Ids:
        """What a step's rows have sampled, round after round."""
        begin = self.sampled_address(step_id) - self.control
        return self._memory[begin : begin + 4 * num_sampled].tobytes()

    def sampled_address(self, step_id: int) -> int:
        """Where a step's rows put the token ids that they sample, [num_rounds, R]: max_num_batched_tokens at most."""
        return self._sampled + step_id % SAMPLED_PLACES * 4 * self._max_rows

    def logprobs(self, counts: Int32) -> dict[str, bytes]:
        """The columns of StepResult for rows that asked for `counts` [R] most likely tokens (-1: for nothing)."""
        num_rows = len(counts)
        wanted = np.arange(MAX_LOGPROBS) < counts[:, None]  # [R, MAX_LOGPROBS]
        return {
            "logprobs": self._array("logprobs", "<f4", 1)[:num_rows].tobytes(),
            "ranks": self._array("ranks", "<i4", 1)[:num_rows].tobytes(),
            "top_token_ids": pack_ids(self._array("top_ids", "<i4", MAX_LOGPROBS)[:num_rows][wanted]),
            "top_logprobs": self._array("top_logprobs", "<f4", MAX_LOGPROBS)[:num_rows][wanted].tobytes(),
        }

    def _array(self, name: str, dtype: str, width: int) -> npt.NDArray[Any]:
        begin = self._offsets[name]
        array = self._memory[begin : begin + 4 * self._max_rows * width].view(dtype)
        return array if width == 1 else array.reshape(self._max_rows, width)


def create(setup: Setup, layout: WeightLayout) -> Arena:
    """Make the segment, zeroed."""
    offsets, num_bytes = plan_arena(setup, layout)
    segment = segments.create(segments.segment_name(setup.tag, "team"), num_bytes)
    return Arena(segment, offsets, num_bytes, setup.max_num_batched_tokens)


def attach(setup: Setup, layout: WeightLayout) -> Arena:
    """Map the segment that the preparing worker made."""
    offsets, num_bytes = plan_arena(setup, layout)
    segment = segments.attach(segments.segment_name(setup.tag, "team"))
    return Arena(segment, offsets, num_bytes, setup.max_num_batched_tokens)


def plan_arena(setup: Setup, layout: WeightLayout) -> tuple[dict[str, int], int]:
    """Offset of each array, and the segment's size in bytes."""
    spec = layout.spec
    tokens = setup.max_num_batched_tokens
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    attention_width = spec.num_heads * spec.head_dim
    sizes = {
        "x": 4 * tokens * spec.hidden_size,  # the residual stream, float32
        "normed": 4 * tokens * spec.hidden_size,
        "qkv": 4 * tokens * heads,
        "attention": 4 * tokens * attention_width,
        "attention_scratch": attention_scratch_bytes(setup.max_model_len, spec.num_heads, spec.head_dim),
        "gate_up": 4 * tokens * (2 if spec.gated else 1) * spec.intermediate_size,
        "activated": 4 * tokens * spec.intermediate_size,
        "output": 4 * tokens * spec.hidden_size,
        "q_hidden": max(tokens, 2 * LOGITS_ROWS) * act_row_bytes(WTYPE_Q8_0, spec.hidden_size),  # 2: the head's terms
        "q_attention": tokens * act_row_bytes(WTYPE_Q8_0, attention_width),
        "q_activated": tokens * act_row_bytes(WTYPE_Q8_0, spec.intermediate_size),
        "sampled_x": 4 * LOGITS_ROWS * spec.hidden_size,  # the last layer goes on with the rows that sample
        "sampled_attention": 4 * LOGITS_ROWS * attention_width,
        "q_sampled_attention": LOGITS_ROWS * act_row_bytes(WTYPE_Q8_0, attention_width),
        "logits": 4 * LOGITS_ROWS * (-(-spec.embedding_rows // 16) * 16),
        "sampled": SAMPLED_PLACES * 4 * tokens,
        "logprobs": 4 * tokens,
        "ranks": 4 * tokens,
        "top_ids": 4 * tokens * MAX_LOGPROBS,
        "top_logprobs": 4 * tokens * MAX_LOGPROBS,
    }
    offsets, offset = {}, CONTROL_BYTES
    for name, size in sizes.items():
        offsets[name] = offset
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, offset
