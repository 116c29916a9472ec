"""Round to nearest with the scale that llama.cpp's reference quantizers use: from the largest weight alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tieq.codecs.schemes import Codes, Scales, Scheme
from tieq.solve.grid import as_blocks, round_to_grid, signed_extreme, to_half


def nearest(
    weights: NDArray[np.float32], scheme: Scheme, importance: NDArray[np.float32] | None = None
) -> tuple[Codes, Scales]:
    """Scale each block so that its largest weight lands on the end of the grid, then round; importance unused."""
    blocks = as_blocks(weights, scheme)
    reach = scheme.code_range[0] - scheme.zero_point
    scales = to_half(signed_extreme(blocks) / np.float32(reach))
    return round_to_grid(blocks, scales, scheme), scales
