"""Rounding solvers. Each is one function: weights, scheme and importance in, codes and scales out."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tieq.codecs.schemes import Codes, Scales, Scheme
from tieq.solve.error_feedback import hessian
from tieq.solve.fixed_scales import encode_under_cost
from tieq.solve.nearest import nearest
from tieq.solve.scale_search import scale_search


class Solver(Protocol):
    """The signature of a solver.

    Args:
        weights: ``[rows, columns]`` float32.
        scheme: the grid.
        importance: the cost of an error: a weight a column, ``[columns]`` float32; a symmetric positive definite
            matrix ``[columns, columns]``, of which a solver that knows no better uses the diagonal; or None.

    Returns:
        codes ``[rows, blocks, block]`` uint8 and scales float16: ``[rows, blocks]``, or for an affine scheme
        ``[rows, blocks, 2]`` with the minima.
    """

    def __call__(
        self, weights: NDArray[np.float32], scheme: Scheme, importance: NDArray[np.float32] | None = None
    ) -> tuple[Codes, Scales]:
        """Round the weights to the scheme's grid."""
        ...


__all__ = ["SOLVERS", "Solver", "encode_under_cost"]

SOLVERS: dict[str, Solver] = {"nearest": nearest, "scale-search": scale_search, "hessian": hessian}
