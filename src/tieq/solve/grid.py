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


def clip_to_reach(blocks: Blocks, scheme: Scheme) -> Blocks:
    """Clip to what the largest fp16 scale can reach, so that squared errors stay finite."""
    reach = HALF_MAX * np.float32(
        max(scheme.code_range[1] - scheme.zero_point, scheme.zero_point - scheme.code_range[0])
    )
    return np.clip(blocks, -reach, reach)


def to_half(scales: NDArray[np.float32]) -> Scales:
    """Round scales to fp16, saturating."""
    return np.clip(scales, -HALF_MAX, HALF_MAX).astype(np.float16)


def inverse(scales: Scales) -> NDArray[np.float32]:
    """``1 / scale`` as float32, zero where the scale is zero."""
    wide = scales.astype(np.float32)
    return np.divide(1.0, wide, out=np.zeros_like(wide), where=wide != 0)


def round_to_grid(blocks: Blocks, scales: Scales, scheme: Scheme) -> Codes:
    """Nearest codes for given scales; a block with scale zero gets the zero point."""
    low, high = scheme.code_range
    steps = np.rint(blocks * inverse(scales)[..., None]) + np.float32(scheme.zero_point)
    codes: Codes = np.clip(steps, low, high).astype(np.uint8)
    return codes
