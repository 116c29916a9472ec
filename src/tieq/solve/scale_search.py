"""Search each block's scale for the least weighted squared error, then refit it by least squares.

Candidates put the block's extreme weight at, inside and beyond either end of the grid; the best is refitted to its
own codes (``s = sum w q x / sum w q^2``) and kept if that helps. Weights of an error: importance of the column.
"""

from __future__ import annotations

import concurrent.futures
import os

import numpy as np
from numpy.typing import NDArray

from tieq.codecs.schemes import Codes, Scales, Scheme
from tieq.solve.grid import Blocks, as_blocks, clip_to_reach, inverse, round_to_grid, signed_extreme, to_half

# Where the extreme weight may land, as a share of the grid's reach on that side, by bits: coarse grids gain from
# clipping, fine ones do not.
LANDINGS: dict[int, NDArray[np.float32]] = {
    2: np.append(np.linspace(0.4, 1.4, 15, dtype=np.float32), np.float32(1)),
    4: np.append(np.linspace(0.74, 1.1, 13, dtype=np.float32), np.float32(1)),
    5: np.append(np.linspace(0.8, 1.1, 13, dtype=np.float32), np.float32(1)),
    8: np.array([1.0], dtype=np.float32),
}
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
    scales = np.empty((rows, count), dtype=np.float16)
    step = max(1, _PIECE_WEIGHTS // weights.shape[1])

    def solve(start: int) -> None:
        piece = slice(start, start + step)
        codes[piece], scales[piece] = _solve_piece(blocks[piece], scheme, weighting)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(solve, range(0, rows, step)))
    return codes, scales


def _solve_piece(blocks: Blocks, scheme: Scheme, weighting: NDArray[np.float32] | None) -> tuple[Codes, Scales]:
    blocks = clip_to_reach(blocks, scheme)
    extreme = signed_extreme(blocks)
    ends = [float(end - scheme.zero_point) for end in scheme.code_range]
    best_scale = np.zeros(extreme.shape, dtype=np.float16)
    best_error = _error(blocks, best_scale, scheme, weighting)
    for end in ends:
        for landing in LANDINGS[scheme.bits]:
            scale = to_half(extreme / np.float32(end * landing))
            _keep_better(blocks, scale, scheme, weighting, best_scale, best_error)
    if scheme.bits < 8:
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


def _steps(blocks: Blocks, scale: Scales, scheme: Scheme) -> NDArray[np.float32]:
    low, high = (end - scheme.zero_point for end in scheme.code_range)
    steps = blocks * inverse(scale)[..., None]
    np.rint(steps, out=steps)
    return np.clip(steps, low, high, out=steps)


def _error(blocks: Blocks, scale: Scales, scheme: Scheme, weighting: NDArray[np.float32] | None) -> NDArray[np.float32]:
    gap = _steps(blocks, scale, scheme)
    gap *= -scale.astype(np.float32)[..., None]
    gap += blocks
    gap *= gap
    if weighting is not None:
        gap *= weighting
    total: NDArray[np.float32] = gap.sum(axis=-1)
    return total


def _least_squares(blocks: Blocks, scale: Scales, scheme: Scheme, weighting: NDArray[np.float32] | None) -> Scales:
    steps = _steps(blocks, scale, scheme)
    weighted = steps if weighting is None else steps * weighting
    power = (weighted * steps).sum(axis=-1)
    fitted = np.divide((weighted * blocks).sum(axis=-1), power, out=np.zeros_like(power), where=power > 0)
    return to_half(fitted)
