"""The scale search of symmetric grids, compiled.

Blocks are taken 16 at a time with the blocks innermost: no sum mixes blocks, so results depend neither on how they are
grouped nor on the processor's vector width.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

_LANES = 16
_HALF_MAX = np.float32(65504)
_SMALLEST_NORMAL = np.float32(2.0**-14)
_UP, _DOWN = np.float32(2.0**24), np.float32(2.0**-24)


@numba.njit(cache=True, nogil=True, inline="always")
def _half(value: np.float32) -> np.float32:
    """Round to fp16 and back, to nearest even, saturating."""
    value = min(max(value, -_HALF_MAX), _HALF_MAX)
    small = np.float32(np.rint(value * _UP)) * _DOWN
    bits = np.float32(value).view(np.int32)
    bits = (bits + np.int32(0xFFF) + ((bits >> np.int32(13)) & np.int32(1))) & np.int32(~0x1FFF)
    normal = min(max(np.int32(bits).view(np.float32), -_HALF_MAX), _HALF_MAX)
    # Both are computed: a branch would keep the loop over lanes from being one instruction.
    rounded: np.float32 = small if abs(value) < _SMALLEST_NORMAL else normal
    return rounded


@numba.njit(cache=True, nogil=True)
def search(
    blocks: NDArray[np.float32],
    weighting: NDArray[np.float32],
    ends: NDArray[np.float32],
    steps: NDArray[np.float32],
    reach: np.float32,
    first: int,
    positive: bool,
    refits: int,
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32],
) -> None:
    """Fill ``codes`` ``[n, block]`` and ``scales`` ``[n]``, which fp16 holds.

    Args:
        blocks: weights, ``[n, block]``.
        weighting: weight of an error, ``[count, block]``; block i takes row ``i % count``.
        ends: where a block's extreme weight may land, in steps, ``[candidates]``.
        steps: least and greatest step, ``[2]``.
        reach: largest magnitude that the grid can reach, to which weights are clipped.
        first: code of the least step.
        positive: whether scales may not be negative.
        refits: least-squares refits.
        codes: set.
        scales: set.
    """
    low, high = steps[0], steps[1]
    shift = np.float32(first) - low
    x = np.empty((blocks.shape[1], _LANES), np.float32)
    w = np.empty((blocks.shape[1], _LANES), np.float32)
    extreme, scale = np.empty(_LANES, np.float32), np.empty(_LANES, np.float32)
    best_scale, best_error = np.empty(_LANES, np.float32), np.empty(_LANES, np.float32)
    # Made once and not for every candidate.
    error, inverse = np.empty(_LANES, np.float32), np.empty(_LANES, np.float32)
    for start in range(0, len(blocks), _LANES):
        _load(blocks, weighting, start, reach, x, w)
        _begin(x, w, extreme, best_scale, best_error)
        for end in ends:
            for lane in range(_LANES):
                scale[lane] = _half(abs(extreme[lane] / end) if positive else extreme[lane] / end)
            _keep_better(x, w, low, high, scale, best_scale, best_error, error, inverse)
        for _ in range(refits):
            _fit(x, w, low, high, best_scale, scale)
            _keep_better(x, w, low, high, scale, best_scale, best_error, error, inverse)
        for lane in range(_LANES):
            inverse[lane] = _inverse(best_scale[lane])
        for j in range(len(x)):
            for lane in range(_LANES):
                x[j, lane] = _step(x[j, lane] * inverse[lane], low, high) + shift
        for lane in range(min(_LANES, len(blocks) - start)):
            scales[start + lane] = best_scale[lane]
            for j in range(len(x)):
                codes[start + lane, j] = np.uint8(x[j, lane])


@numba.njit(cache=True, nogil=True, inline="always")
def _step(value: np.float32, low: np.float32, high: np.float32) -> np.float32:
    step: np.float32 = min(max(np.float32(np.rint(value)), low), high)
    return step


@numba.njit(cache=True, nogil=True, inline="always")
def _inverse(scale: np.float32) -> np.float32:
    inverse: np.float32 = np.float32(1) / scale if scale != 0 else np.float32(0)
    return inverse


@numba.njit(cache=True, nogil=True)
def _load(
    blocks: NDArray[np.float32],
    weighting: NDArray[np.float32],
    start: int,
    reach: np.float32,
    x: NDArray[np.float32],
    w: NDArray[np.float32],
) -> None:
    """Transpose the next blocks into ``[block, lanes]``; lanes without one are zero."""
    x[:] = 0
    w[:] = 0
    for lane in range(min(_LANES, len(blocks) - start)):
        row = (start + lane) % len(weighting)
        for j in range(len(x)):
            x[j, lane] = min(max(blocks[start + lane, j], -reach), reach)
            w[j, lane] = weighting[row, j]


@numba.njit(cache=True, nogil=True)
def _begin(
    x: NDArray[np.float32],
    w: NDArray[np.float32],
    extreme: NDArray[np.float32],
    best_scale: NDArray[np.float32],
    best_error: NDArray[np.float32],
) -> None:
    """Each lane's weight of largest magnitude, and the error of the scale zero."""
    extreme[:] = 0
    best_scale[:] = 0
    best_error[:] = 0
    for j in range(len(x)):
        for lane in range(_LANES):
            if abs(x[j, lane]) > abs(extreme[lane]):
                extreme[lane] = x[j, lane]
            best_error[lane] += w[j, lane] * (x[j, lane] * x[j, lane])


@numba.njit(cache=True, nogil=True)
def _keep_better(
    x: NDArray[np.float32],
    w: NDArray[np.float32],
    low: np.float32,
    high: np.float32,
    scale: NDArray[np.float32],
    best_scale: NDArray[np.float32],
    best_error: NDArray[np.float32],
    error: NDArray[np.float32],
    inverse: NDArray[np.float32],
) -> None:
    """Take each lane's ``scale`` where its error is less than the best; the last two arrays are overwritten."""
    for lane in range(_LANES):
        error[lane], inverse[lane] = 0, _inverse(scale[lane])
    for j in range(len(x)):
        for lane in range(_LANES):
            gap = x[j, lane] - _step(x[j, lane] * inverse[lane], low, high) * scale[lane]
            error[lane] += w[j, lane] * (gap * gap)
    for lane in range(_LANES):
        if error[lane] < best_error[lane]:
            best_error[lane] = error[lane]
            best_scale[lane] = scale[lane]


@numba.njit(cache=True, nogil=True)
def _fit(
    x: NDArray[np.float32],
    w: NDArray[np.float32],
    low: np.float32,
    high: np.float32,
    given: NDArray[np.float32],
    scale: NDArray[np.float32],
) -> None:
    """The least-squares scale of each lane for the codes of a given one."""
    upper, lower = np.zeros(_LANES, np.float32), np.zeros(_LANES, np.float32)
    inverse = np.empty(_LANES, np.float32)
    for lane in range(_LANES):
        inverse[lane] = _inverse(given[lane])
    for j in range(len(x)):
        for lane in range(_LANES):
            q = _step(x[j, lane] * inverse[lane], low, high)
            upper[lane] += w[j, lane] * q * x[j, lane]
            lower[lane] += w[j, lane] * q * q
    for lane in range(_LANES):
        scale[lane] = _half(upper[lane] / lower[lane]) if lower[lane] > 0 else np.float32(0)
