"""Search each block's scale for the least weighted squared error, then refit it by least squares.

Candidates put the block's extreme weight at, inside and beyond either end of the grid, or spread an affine grid over
parts of the block's range; the best is refitted to its own codes (``s = sum w q x / sum w q^2``; for affine grids scale
and minimum together) and kept if that helps. Weights of an error: importance of the column.
"""

from __future__ import annotations

import concurrent.futures
import os

import numpy as np
from numpy.typing import NDArray

from tieq.codecs.schemes import Codes, Scales, Scheme
from tieq.solve.grid import (
    Blocks,
    as_blocks,
    clip_to_reach,
    nearest_steps,
    reach,
    round_to_grid,
    span_scales,
    to_half,
)

# Where the extreme weight may land, as a share of the grid's reach on that side, by bits: coarse grids gain from
# clipping, fine ones do not.
LANDINGS: dict[int, NDArray[np.float32]] = {
    2: np.append(np.linspace(0.4, 1.4, 15, dtype=np.float32), np.float32(1)),
    4: np.append(np.linspace(0.74, 1.1, 13, dtype=np.float32), np.float32(1)),
    5: np.append(np.linspace(0.8, 1.1, 13, dtype=np.float32), np.float32(1)),
    8: np.array([1.0], dtype=np.float32),
}
# Refits of symmetric and of affine grids: codes and scales of the latter take longer to settle.
_REFITS = (1, 3)
# What an affine grid leaves out of its block's range below and above (negative: what it reaches beyond), in its own
# steps: shifts of a fraction of a step change which way weights round, and with fine grids this gains most.
_TRIM = (-0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0)
TRIMS: NDArray[np.float32] = np.array([(below, above) for below in _TRIM for above in _TRIM], dtype=np.float32)

# Rows are taken in pieces that stay in the processor's cache; results do not depend on the piece size.
_PIECE_WEIGHTS = 1 << 17


def scale_search(
    weights: NDArray[np.float32], scheme: Scheme, importance: NDArray[np.float32] | None = None
) -> tuple[Codes, Scales]:
    """Best scale of each block among the candidates, then a least-squares refit."""
    blocks = as_blocks(weights, scheme)
    rows, count, block = blocks.shape
    if importance is not None and importance.ndim == 2:
        importance = np.ascontiguousarray(importance.diagonal())
    weighting = None if importance is None else importance.reshape(count, block)
    codes = np.empty(blocks.shape, dtype=np.uint8)
    scales = np.empty((rows, count, 2) if scheme.affine else (rows, count), dtype=np.float16)
    step = max(1, _PIECE_WEIGHTS // weights.shape[1])

    def solve(start: int) -> None:
        piece = slice(start, start + step)
        if scheme.affine:
            codes[piece], scales[piece] = _search_affine(blocks[piece], scheme, weighting)
        else:
            scales[piece] = _search_symmetric(blocks[piece], scheme, weighting, codes[piece])

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(solve, range(0, rows, step)))
    return codes, scales


def _search_symmetric(
    blocks: Blocks, scheme: Scheme, weighting: NDArray[np.float32] | None, codes: Codes
) -> NDArray[np.float16]:
    """Fill ``codes`` ``[rows, blocks, block]``, contiguous; returns the scales ``[rows, blocks]``."""
    from tieq.solve.scale_kernels import search

    rows, count, block = blocks.shape
    weights = np.ones((1, block), np.float32) if weighting is None else np.ascontiguousarray(weighting, np.float32)
    first, zero = scheme.code_range[0], np.float32(scheme.zero_point)
    steps = np.array(scheme.code_range, np.float32) - zero
    ends = np.concatenate([end * LANDINGS[scheme.bits] for end in steps])
    refits = _REFITS[False] if scheme.bits < 8 else 0
    flat, scales = np.ascontiguousarray(blocks.reshape(-1, block)), np.empty(rows * count, np.float32)
    reached = np.float32(reach(scheme))
    search(flat, weights, ends, steps, reached, first, scheme.positive, refits, codes.reshape(-1, block), scales)
    return scales.astype(np.float16).reshape(rows, count)


def _search_affine(blocks: Blocks, scheme: Scheme, weighting: NDArray[np.float32] | None) -> tuple[Codes, Scales]:
    blocks = clip_to_reach(blocks, scheme)
    best_scale = np.zeros((*blocks.shape[:2], 2), dtype=np.float16)
    best_error = _error(blocks, best_scale, scheme, weighting)
    for below, above in TRIMS:
        _keep_better(blocks, span_scales(blocks, scheme, below, above), scheme, weighting, best_scale, best_error)
    for _ in range(_REFITS[True]):
        refitted = _least_squares(blocks, best_scale, scheme, weighting)
        _keep_better(blocks, refitted, scheme, weighting, best_scale, best_error)
    return round_to_grid(blocks, best_scale, scheme), best_scale


def _keep_better(
    blocks: Blocks,
    scale: Scales,
    scheme: Scheme,
    weighting: NDArray[np.float32] | None,
    best_scale: Scales,
    best_error: NDArray[np.float32],
) -> None:
    error = _error(blocks, scale, scheme, weighting)
    better = error < best_error
    best_scale[better] = scale[better]
    best_error[better] = error[better]


def _gap(blocks: Blocks, steps: Blocks, scale: Scales) -> Blocks:
    gap = steps * -scale[..., :1].astype(np.float32)
    gap += blocks
    gap -= scale[..., 1:].astype(np.float32)
    return gap


def _error(blocks: Blocks, scale: Scales, scheme: Scheme, weighting: NDArray[np.float32] | None) -> NDArray[np.float32]:
    gap = _gap(blocks, nearest_steps(blocks, scale, scheme), scale)
    gap *= gap
    if weighting is not None:
        gap *= weighting
    total: NDArray[np.float32] = gap.sum(axis=-1)
    return total


def _least_squares(blocks: Blocks, scale: Scales, scheme: Scheme, weighting: NDArray[np.float32] | None) -> Scales:
    steps = nearest_steps(blocks, scale, scheme)
    weighted = steps if weighting is None else steps * weighting
    power = (weighted * steps).sum(axis=-1)
    # Changes of scale and minimum against the old ones: a minimum far from zero would swamp the sums of the weights.
    gap = _gap(blocks, steps, scale)
    ones = np.ones_like(blocks) if weighting is None else np.broadcast_to(weighting, blocks.shape)
    total, cross = ones.sum(axis=-1), weighted.sum(axis=-1)
    gain, gain_of_one = (weighted * gap).sum(axis=-1), (ones * gap).sum(axis=-1)
    determinant = power * total - cross * cross
    usable = determinant > 1e-6 * power * total  # else all codes are equal, but for rounding
    change = np.divide(total * gain - cross * gain_of_one, determinant, out=np.zeros_like(power), where=usable)
    wished = to_half(scale[..., 0].astype(np.float32) + change)
    # The minimum for the scale as it was rounded.
    shift = gain_of_one - cross * (wished.astype(np.float32) - scale[..., 0].astype(np.float32))
    shift = np.divide(shift, total, out=np.zeros_like(total), where=total > 0)
    return np.stack([wished, to_half(scale[..., 1].astype(np.float32) + shift)], axis=-1)
