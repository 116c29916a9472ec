"""Round to nearest with the scale that llama.cpp's reference quantizers use: from the extreme weights alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tieq.codecs.schemes import Codes, Scales, Scheme
from tieq.solve.grid import as_blocks, clip_to_reach, round_to_grid, signed_extreme, span_scales, to_half


def nearest(
    weights: NDArray[np.float32], scheme: Scheme, importance: NDArray[np.float32] | None = None
) -> tuple[Codes, Scales]:
    """Scale each block so that its extreme weights land on the ends of the grid, then round; importance unused.

    Symmetric schemes have one end for the largest weight; affine ones reach from the smallest to the largest.
    """
    blocks = as_blocks(weights, scheme)
    if scheme.affine:
        blocks = clip_to_reach(blocks, scheme)
        scales = span_scales(blocks, scheme)
    else:
        low, high = (np.float32(end - scheme.zero_point) for end in scheme.code_range)
        extreme = signed_extreme(blocks)
        scales = to_half(extreme / (np.where(extreme > 0, high, low) if scheme.positive else low))
    return round_to_grid(blocks, scales, scheme), scales
