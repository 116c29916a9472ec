"""Codes of least full cost under the scales that ggml chose, for the types whose scales are themselves compressed.

ggml encodes with the diagonal of the cost as importance. Its scales stand; the codes are found anew with error feedback
and coordinate descent under the whole cost (:mod:`tieq.solve.error_feedback`). A row in which feedback does worse than
ggml's own codes descends from those, so that no row costs more than ggml's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.codecs import ggml
from tieq.codecs.k_quants import LAYOUTS
from tieq.solve.error_feedback import Grid, solve_grid
from tieq.solve.grid import HALF_MAX

_PIECE_ROWS = 1024


def encode_under_cost(
    weights: NDArray[np.float32], name: str, importance: NDArray[np.float32] | None
) -> NDArray[np.uint8]:
    """Encode float32 ``[rows, columns]`` to rows of bytes of a type in :data:`tieq.codecs.k_quants.LAYOUTS`.

    Args:
        weights: the matrix.
        name: the ggml type.
        importance: the cost of an error as for a :class:`tieq.solve.Solver`: a vector, a matrix or None.

    Raises:
        TieqError: if the block does not divide the columns.
        ValueError: if the cost matrix is not positive definite.
    """
    layout = LAYOUTS[name]
    diagonal = importance
    if importance is not None and importance.ndim == 2:
        diagonal = np.ascontiguousarray(importance.diagonal())
    rows = ggml.encode(weights, name, diagonal)
    scales, minima = layout.scales(rows)
    levels = np.array(layout.levels, dtype=np.int8)
    grid = Grid(
        levels=levels.astype(np.float32),
        width=layout.group,
        # Past any weight that ggml's scales reach: 2**14 bounds the product of scale and level in all layouts.
        reach=float(HALF_MAX) * 2**14,
        shapes=np.empty((0, 2), dtype=np.float32),
        affine=bool(minima.any()),
        refits=False,
    )
    steps = solve_grid(weights, importance, grid, scales, minima, _translate(layout.unpack(rows), levels))
    codes = np.zeros(256, dtype=np.uint8)
    codes[levels.view(np.uint8)] = np.arange(len(levels))
    return layout.replace(rows, _translate(steps.view(np.uint8), codes))


def _translate(values: NDArray[np.uint8], table: NDArray[Any]) -> NDArray[Any]:
    """``table[values]``, in pieces: numpy widens an index to eight bytes."""
    translated = np.empty(values.shape, dtype=table.dtype)
    for start in range(0, len(values), _PIECE_ROWS):
        piece = slice(start, start + _PIECE_ROWS)
        translated[piece] = table[values[piece]]
    return translated
