"""Rotary frequencies: the plain table and its scalings, in float64. Computes numbers only; reads no file."""

from __future__ import annotations

import math
from collections.abc import Sequence


def frequencies(base: float, rope_dim: int) -> tuple[float, ...]:
    """base ** (-2i / rope_dim) for i < rope_dim / 2 (RoFormer, section 3.2.2)."""
    return tuple(base ** (-2.0 * i / rope_dim) for i in range(rope_dim // 2))


def linear(inv_freq: Sequence[float], factor: float) -> tuple[float, ...]:
    """Positions divided by `factor`: position interpolation."""
    return tuple(f / factor for f in inv_freq)


def divided(inv_freq: Sequence[float], factors: Sequence[float]) -> tuple[float, ...]:
    """Each frequency divided by its own factor, as GGUF's tensor `rope_freqs` gives them."""
    return tuple(f / factor for f, factor in zip(inv_freq, factors, strict=True))


def llama3(
    inv_freq: Sequence[float], *, factor: float, low_freq_factor: float, high_freq_factor: float, original_len: int
) -> tuple[float, ...]:
    """Llama 3.1's scaling: long wavelengths divided by `factor`, short ones kept, a linear blend between.

    The wavelength bounds are original_len / low_freq_factor and original_len / high_freq_factor tokens.
    """
    scaled = []
    for f in inv_freq:
        turns = original_len * f / (2 * math.pi)  # how often this dimension turns within the original context
        blend = min(max((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0), 1.0)
        scaled.append((1 - blend) * f / factor + blend * f)
    return tuple(scaled)
