"""Round to nearest with the scale that llama.cpp's reference quantizers use: from the extreme weights alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tieq.codecs.schemes import Codes, Scales, Scheme
from tieq.solve.grid import (
    Blocks,
    as_blocks,
    clip_to_reach,
    in_pieces,
    round_to_grid,
    signed_extreme,
    span_scales,
    to_half,
)


def nearest(
    weights: NDArray[np.float32], scheme: Scheme, importance: NDArray[np.float32] | None = None
) -> tuple[Codes, Scales]:
    """Scale each block so that its extreme weights land on the ends of the grid, then round; importance unused.

    Symmetric schemes have one end for the largest weight; affine ones reach from the smallest to the largest.
    """
    blocks = as_blocks(weights, scheme)
    codes = np.empty(blocks.shape, dtype=np.uint8)
    scales = np.empty((*blocks.shape[:2], 2) if scheme.affine else blocks.shape[:2], dtype=np.float16)

    def solve(piece: slice) -> None:
        if scheme.affine:
            clipped = clip_to_reach(blocks[piece], scheme)
            scales[piece] = span_scales(clipped, scheme)
            codes[piece] = round_to_grid(clipped, scales[piece], scheme)
        elif scheme.positive:
            scales[piece] = _positive_scales(blocks[piece], scheme)
            codes[piece] = round_to_grid(blocks[piece], scales[piece], scheme)
        else:
            scales[piece] = _round_symmetric(blocks[piece], scheme, codes[piece])

    in_pieces(solve, weights.shape)
    return codes, scales


def _positive_scales(blocks: Blocks, scheme: Scheme) -> Scales:
    low, high = (np.float32(end - scheme.zero_point) for end in scheme.code_range)
    extreme = signed_extreme(blocks)
    return to_half(extreme / np.where(extreme > 0, high, low))


def _round_symmetric(blocks: Blocks, scheme: Scheme, codes: Codes) -> Scales:
    """Fill ``codes``, contiguous; returns the scales ``[rows, blocks]``."""
    from tieq.solve.scale_kernels import round_blocks

    rows, count, block = blocks.shape
    steps = np.array(scheme.code_range, np.float32) - np.float32(scheme.zero_point)
    scales = np.empty(rows * count, np.float32)
    flat = np.ascontiguousarray(blocks.reshape(-1, block))
    round_blocks(flat, steps, scheme.code_range[0], codes.reshape(-1, block), scales)
    return scales.astype(np.float16).reshape(rows, count)
