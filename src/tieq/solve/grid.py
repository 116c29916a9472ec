"""What the solvers share: blocks, the signed extreme of a block, rounding to a scheme's grid."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tieq.codecs.schemes import Codes, Scales, Scheme

Blocks = NDArray[np.float32]
# Largest finite fp16; a block beyond it saturates instead of turning into infinity.
HALF_MAX = np.float32(65504)


def as_blocks(weights: NDArray[np.float32], scheme: Scheme) -> Blocks:
    """View ``[rows, columns]`` as ``[rows, blocks, block]``."""
    return weights.reshape(weights.shape[0], scheme.blocks(weights.shape[1]), scheme.block)


def signed_extreme(blocks: Blocks) -> NDArray[np.float32]:
    """The weight of largest magnitude in each block, with its sign: ``[..., block]`` to ``[...]``."""
    at = np.abs(blocks).argmax(axis=-1, keepdims=True)
    return np.take_along_axis(blocks, at, axis=-1)[..., 0]


def reach(scheme: Scheme) -> float:
    """Largest magnitude that the largest fp16 scale (and minimum) can reach."""
    low, high = scheme.code_range
    steps = max(high - scheme.zero_point, scheme.zero_point - low) + scheme.affine
    return float(HALF_MAX) * steps


def clip_to_reach(blocks: Blocks, scheme: Scheme) -> Blocks:
    """Clip to what the grid can reach, so that squared errors stay finite."""
    return np.clip(blocks, -reach(scheme), reach(scheme))


def to_half(scales: NDArray[np.float32]) -> Scales:
    """Round scales to fp16, saturating."""
    return np.clip(scales, -HALF_MAX, HALF_MAX).astype(np.float16)


def inverse(scales: Scales) -> NDArray[np.float32]:
    """``1 / scale`` as float32, zero where the scale is zero."""
    wide = scales.astype(np.float32)
    return np.divide(1.0, wide, out=np.zeros_like(wide), where=wide != 0)


def span_scales(blocks: Blocks, scheme: Scheme, below: float = 0, above: float = 0) -> Scales:
    """Scales and minima ``[..., 2]`` of an affine grid over each block's range, less these steps at its two ends."""
    lowest = blocks.min(axis=-1)
    step = (blocks.max(axis=-1) - lowest) / np.float32(scheme.code_range[1])
    scale = step * np.float32(1 - (below + above) / scheme.code_range[1])
    return to_half(np.stack([scale, lowest + np.float32(below) * step], axis=-1))


def nearest_steps(blocks: Blocks, scales: Scales, scheme: Scheme) -> Blocks:
    """Nearest centred codes (code - zero point) for given scales, as floats; zero where the scale is zero."""
    low, high = (np.float32(end - scheme.zero_point) for end in scheme.code_range)
    if scheme.affine:
        steps = blocks - scales[..., 1:].astype(np.float32)
        steps *= inverse(scales[..., 0])[..., None]
    else:
        steps = blocks * inverse(scales)[..., None]
    np.rint(steps, out=steps)
    return np.clip(steps, low, high, out=steps)


def round_to_grid(blocks: Blocks, scales: Scales, scheme: Scheme) -> Codes:
    """Nearest codes for given scales; a block with scale zero gets the zero point."""
    codes: Codes = (nearest_steps(blocks, scales, scheme) + np.float32(scheme.zero_point)).astype(np.uint8)
    return codes
