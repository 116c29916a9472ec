"""Round with error feedback under a full quadratic cost, then descend on codes and scales one by one.

The cost of a row error e is ``e' J e`` with J ``[columns, columns]``. First pass (Frantar et al. 2022, GPTQ): blocks
left to right; each candidate scale is tried with its own feedback inside the block, the best is kept, and its error
is passed on to later columns through the Cholesky factor of ``J^-1``. Then coordinate descent: the least-squares scale
of each block and the best single code, with ``J e`` kept current; no step raises the cost.
"""

from __future__ import annotations

import concurrent.futures
import os

import numpy as np
from numpy.typing import NDArray

from tieq.codecs.schemes import Codes, Scales, Scheme
from tieq.solve.grid import as_blocks, clip_to_reach
from tieq.solve.scale_search import LANDINGS

_SWEEPS = 3
_PIECE_ROWS = 512


def hessian(
    weights: NDArray[np.float32], scheme: Scheme, importance: NDArray[np.float32] | None = None
) -> tuple[Codes, Scales]:
    """Round under the cost matrix ``importance`` (``[columns, columns]``; a vector stands for a diagonal one).

    Raises:
        ValueError: if the matrix is not positive definite.
    """
    from tieq.solve.kernels import solve_rows

    shape = as_blocks(weights, scheme).shape
    matrix = _as_matrix(importance, weights.shape[1])
    factor, cost = _feedback_factor(matrix), matrix.astype(np.float32)
    low, high = (np.float32(end - scheme.zero_point) for end in scheme.code_range)
    targets = np.concatenate([end * LANDINGS[scheme.bits] for end in (low, high)]).astype(np.float32)
    steps = np.empty(weights.shape, dtype=np.float32)
    scales = np.empty(shape[:2], dtype=np.float32)

    def solve(start: int) -> None:
        piece = slice(start, start + _PIECE_ROWS)
        rows = np.ascontiguousarray(clip_to_reach(weights[piece], scheme))
        solve_rows(rows, factor, cost, targets, scheme.block, low, high, _SWEEPS, steps[piece], scales[piece])

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(solve, range(0, weights.shape[0], _PIECE_ROWS)))
    codes = (steps + np.float32(scheme.zero_point)).astype(np.uint8).reshape(shape)
    return codes, scales.astype(np.float16)


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
