"""Gemma 3 (text, GGUF): norms before and after, tanh GELU gate, scaled embedding, five sliding layers to a global one.

The sliding layers turn with a rope base of their own; only the global ones have the model's base and scaling.
"""

from __future__ import annotations

import dataclasses
import math

from pagedserve.models import rope
from pagedserve.models.family import Family
from pagedserve.models.settings import Settings
from pagedserve.models.spec import LayerSpec, ModelSpec, RopeSpec

_GLOBAL_EVERY = 6
_LOCAL_ROPE_BASE = 10000.0
_GLOBAL, _LOCAL = 0, 1  # indices into ropes
_LAYERS_OF_27B = 62  # the one size whose scores are not scaled by head_dim; GGUF has no key for it


def _refine(spec: ModelSpec, settings: Settings) -> ModelSpec:
    window = settings.integer("attention.sliding_window")
    local_rope = RopeSpec(rope.frequencies(_LOCAL_ROPE_BASE, spec.head_dim), spec.ropes[_GLOBAL].pairing)
    return dataclasses.replace(
        spec,
        ropes=(spec.ropes[_GLOBAL], local_rope),
        layers=tuple(
            LayerSpec(sliding_window=0, rope=_GLOBAL)
            if (layer + 1) % _GLOBAL_EVERY == 0
            else LayerSpec(sliding_window=window, rope=_LOCAL)
            for layer in range(spec.num_layers)
        ),
        embedding_scale=math.sqrt(spec.hidden_size),
        attention_scale=(spec.hidden_size / spec.num_heads) ** -0.5 if spec.num_layers == _LAYERS_OF_27B else 0.0,
    )


FAMILY = Family(
    name="gemma3",
    qk_norm=True,
    post_norms=True,
    gguf_activation="gelu_tanh",
    hf_names={},
    refine_gguf=_refine,
)
