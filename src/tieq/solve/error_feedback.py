"""Round with error feedback under a full quadratic cost, then descend on codes and scales one by one.

The cost of a row error e is ``e' J e`` with J ``[columns, columns]``. First pass (Frantar et al. 2022, GPTQ): blocks
left to right; each candidate scale is tried with its own feedback inside the block, the best is kept, and its error
is passed on to later columns through the Cholesky factor of ``J^-1``. Then coordinate descent: the least-squares scale
(and minimum) of each block and the best single code, with ``J e`` kept current; no step raises the cost.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.codecs.schemes import Codes, Scales, Scheme
from tieq.solve.grid import as_blocks, reach
from tieq.solve.scale_search import LANDINGS, TRIMS

_SWEEPS = 3


def hessian(
    weights: NDArray[np.float32], scheme: Scheme, importance: NDArray[np.float32] | None = None
) -> tuple[Codes, Scales]:
    """Round under the cost matrix ``importance`` (``[columns, columns]``; a vector stands for a diagonal one).

    Raises:
        ValueError: if the matrix is not positive definite.
    """
    shape = as_blocks(weights, scheme).shape
    low, high = (end - scheme.zero_point for end in scheme.code_range)
    if scheme.affine:
        shapes = TRIMS / np.float32(high)
    else:
        landings = np.concatenate([end * LANDINGS[scheme.bits] for end in (low, high)])
        shapes = np.stack([landings, landings], axis=1)
    levels = np.arange(low, high + 1, dtype=np.float32)
    grid = Grid(
        levels,
        scheme.block,
        reach(scheme),
        shapes.astype(np.float32),
        scheme.affine,
        refits=True,
        positive=scheme.positive,
    )
    scales, minima = np.zeros((2, *shape[:2]), dtype=np.float32)
    steps = solve_grid(weights, importance, grid, scales, minima)
    # Levels as bytes wrap around at 256, and so does the sum: the codes come out right for negative levels too.
    codes = (steps.view(np.uint8) + np.uint8(scheme.zero_point)).reshape(shape)
    if scheme.affine:
        scales = np.stack([scales, minima], axis=-1)
    return codes, scales.astype(np.float16)


@dataclasses.dataclass(frozen=True)
class Grid:
    """What a weight may become: ``level * scale + minimum``.

    Attributes:
        levels: whole numbers of int8's range in ascending order, float32.
        width: columns that share a scale.
        reach: largest magnitude that the grid has.
        shapes: ``[candidates, 2]`` scales to try in each block, see :func:`tieq.solve.kernels.solve_tile`; none where
            the scales are given.
        affine: whether blocks have minima.
        refits: whether the descent may fit the scales anew, as fp16 numbers.
        positive: whether scales may not be negative.
    """

    levels: NDArray[np.float32]
    width: int
    reach: float
    shapes: NDArray[np.float32]
    affine: bool
    refits: bool
    positive: bool = False


def solve_grid(
    weights: NDArray[np.float32],
    importance: NDArray[np.float32] | None,
    grid: Grid,
    scales: NDArray[np.float32],
    minima: NDArray[np.float32],
    starts: NDArray[np.int8] | None = None,
) -> NDArray[np.int8]:
    """Levels ``[rows, columns]`` of least cost; ``scales`` and ``minima`` ``[rows, blocks]`` are read or filled.

    ``starts`` are levels ``[rows, columns]`` that the result must not cost more than, where the scales are given.

    Raises:
        ValueError: if the cost matrix is not positive definite.
    """
    from tieq.solve.kernels import TILE, solve_tile

    rows, columns = weights.shape
    matrix = _as_matrix(importance, columns)
    factor, cost = _feedback_factor(matrix), matrix.astype(np.float32)
    steps = np.empty(weights.shape, dtype=np.int8)

    def tile(values: NDArray[Any]) -> NDArray[np.float32]:
        """Rows ``[count, n]`` as ``[n, TILE]`` float32, with rows of zeros to fill it."""
        filled = np.zeros((values.shape[1], TILE), dtype=np.float32)
        filled[:, : len(values)] = values.T
        return filled

    def solve(first: int) -> None:
        piece = slice(first, first + TILE)
        wanted = tile(np.clip(weights[piece], -grid.reach, grid.reach))
        step, scale, minimum = np.empty_like(wanted), tile(scales[piece]), tile(minima[piece])
        start = wanted[:0] if starts is None else tile(starts[piece])
        solve_tile(
            wanted, factor, cost, grid.levels, grid.width, grid.shapes, grid.affine, grid.refits, grid.positive,
            _SWEEPS, start, step, scale, minimum,
        )  # fmt: skip
        for whole, part in ((steps, step), (scales, scale), (minima, minimum)):
            whole[piece] = part.T[: rows - first]

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(solve, range(0, rows, TILE)))
    return steps


def _as_matrix(importance: NDArray[np.float32] | None, columns: int) -> NDArray[np.float64]:
    if importance is None:
        return np.eye(columns)
    wide = importance.astype(np.float64)
    return np.diag(wide) if wide.ndim == 1 else wide


def _feedback_factor(cost: NDArray[np.float64]) -> NDArray[np.float32]:
    """Upper Cholesky factor U of ``cost^-1 = U' U``, as float32."""
    try:
        lower = np.linalg.cholesky(np.linalg.inv(cost))
    except np.linalg.LinAlgError as error:
        raise ValueError("the cost matrix is not positive definite") from error
    upper: NDArray[np.float32] = np.ascontiguousarray(lower.T, dtype=np.float32)
    return upper
