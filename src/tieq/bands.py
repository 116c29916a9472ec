"""Row bands: rows of a table that are worth more bits get a residual on top of the base table.

A band holds, for its rows only, the quantized ``w - dequantized(base)``; the value of a row is base plus residual.
Bands of one table have no row in common. Where a container wants a lookup into a band from any row, one row that is all
zero follows the band's own, and a row map sends every row outside the band there.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.calibrate import Statistics
from tieq.codecs.schemes import SCHEMES, Scales, Scheme, dequantize, pack_codes, unpack_codes
from tieq.cost import row_costs
from tieq.errors import RefusedError
from tieq.recipe import BandWish
from tieq.records import BandDecision, Decision
from tieq.solve import SOLVERS

_LARGEST_SMALL_MAP = np.iinfo(np.uint16).max


@dataclasses.dataclass(frozen=True)
class Band:
    """A band as it is stored.

    Attributes:
        scheme: of the residuals.
        rows: row numbers of the table, ascending, ``[band rows]`` int32.
        packed: codes in ONNX bit order, ``[band rows, blocks, bytes]`` uint8.
        scales: ``[band rows, blocks]`` float16.
    """

    scheme: str
    rows: NDArray[np.int32]
    packed: NDArray[np.uint8]
    scales: Scales

    def decode(self) -> NDArray[np.float32]:
        """Dequantized residuals ``[band rows, columns]``."""
        scheme = SCHEMES[self.scheme]
        return dequantize(unpack_codes(self.packed, scheme.bits), self.scales, scheme)

    def padded(self, table_rows: int) -> tuple[NDArray[np.uint8], Scales, NDArray[np.int32]]:
        """Codes, scales and the table's row of each, with the zero row where the band leaves rows out.

        The zero row names the band's last row again: adding zero to it changes nothing.
        """
        if len(self.rows) == table_rows:
            return self.packed, self.scales, self.rows
        scheme = SCHEMES[self.scheme]
        zeros = np.full((1, self.packed.shape[1], scheme.block), scheme.zero_point, np.uint8)
        packed = np.concatenate([self.packed, pack_codes(zeros, scheme.bits)])
        scales = np.concatenate([self.scales, np.zeros((1, self.scales.shape[1]), np.float16)])
        return packed, scales, np.append(self.rows, self.rows[-1:])

    def row_map(self, table_rows: int) -> NDArray[Any]:
        """Place of each row of the table in the padded band, ``[table rows]``, uint16 where that is enough."""
        dtype = _map_dtype(len(self.rows))
        found = np.full(table_rows, len(self.rows), dtype)
        found[self.rows] = np.arange(len(self.rows), dtype=dtype)
        return found


def _map_dtype(band_rows: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if band_rows <= _LARGEST_SMALL_MAP else np.int32)


def decide_bands(
    wishes: tuple[BandWish, ...], name: str, rows: int, columns: int, base: str
) -> tuple[BandDecision, ...]:
    """Rows and bytes of each band of a table.

    Args:
        wishes: the recipe's bands, most worthwhile rows first.
        name: the table.
        rows: its rows.
        columns: its columns.
        base: its scheme.

    Raises:
        RefusedError: if the base leaves no residual that a band can hold, a band's block does not divide the columns,
            or a band has no row.
    """
    if wishes and base not in SCHEMES:
        raise RefusedError(
            f"row bands refine a table in {', '.join(SCHEMES)}, not in {base}.",
            where=name,
            todo="Choose another scheme for the table or leave `bands` out.",
        )
    decided = []
    for number, wish in enumerate(wishes):
        scheme = SCHEMES[wish.scheme]
        if columns % scheme.block:
            raise RefusedError(
                f"a {scheme.name} band needs columns divisible by {scheme.block}, not {columns}.",
                where=name,
                todo="Choose another scheme for the band or leave it out.",
            )
        first, last = (round(math.fsum(w.share for w in wishes[:end]) * rows) for end in (number, number + 1))
        if last == first:
            raise RefusedError(
                f"a band of the share {wish.share} has no row in a table of {rows}.",
                where=name,
                todo=f"Use a share of at least {1 / rows:.2g}.",
            )
        decided.append(_sized(wish, last - first, rows, columns, scheme))
    return tuple(decided)


def _sized(wish: BandWish, count: int, rows: int, columns: int, scheme: Scheme) -> BandDecision:
    blocks = scheme.blocks(columns)
    padded = count + (count < rows)
    onnx = padded * (columns * scheme.bits // 8 + 2 * blocks + 4) + rows * _map_dtype(count).itemsize
    # Row numbers are stored in four bytes each.
    own = count * (columns * scheme.bits // 8 + 2 * blocks + 4)
    return BandDecision(wish.share, scheme.name, count, own, onnx)


def rank_rows(errors: NDArray[np.float32], statistics: Statistics) -> NDArray[np.int64]:
    """Rows ``[rows]``, the most worthwhile first: by what their errors cost in both roles, ties by row number.

    Args:
        errors: original minus base table, ``[rows, columns]`` float32.
        statistics: of a full measurement.
    """
    lookup, logits = row_costs(errors, statistics)
    return np.argsort(-(lookup + logits), kind="stable")


def encode_bands(
    decision: Decision,
    weights: NDArray[np.float32],
    base: NDArray[np.float32],
    statistics: Statistics | None,
    importance: NDArray[np.float32] | None,
) -> dict[str, NDArray[Any]]:
    """Choose and quantize the rows of each band: ``NAME.band0.codes``, ``.scales`` and ``.rows``, and so on.

    Args:
        decision: of the table, with bands.
        weights: original table, ``[rows, columns]``.
        base: the table as the base scheme decodes, ``[rows, columns]``.
        statistics: of a full measurement.
        importance: what the base table was solved with.

    Raises:
        RefusedError: if the statistics do not say what a row's error costs.
    """
    if statistics is None or statistics.table is None or statistics.rows is None:
        raise RefusedError(
            "row bands need the table's cost and use, which were not measured.",
            where=decision.name,
            todo="Calibrate fully, or leave `bands` out.",
        )
    errors = weights - base
    order = rank_rows(errors, statistics)
    tensors: dict[str, NDArray[Any]] = {}
    start = 0
    for number, band in enumerate(decision.bands):
        rows = np.sort(order[start : start + band.rows])
        start += band.rows
        scheme = SCHEMES[band.scheme]
        codes, scales = SOLVERS[decision.solver](np.ascontiguousarray(errors[rows]), scheme, importance)
        prefix = band_prefix(decision.name, number)
        tensors[f"{prefix}.codes"] = pack_codes(codes, scheme.bits)
        tensors[f"{prefix}.scales"] = scales
        tensors[f"{prefix}.rows"] = rows.astype(np.int32)
    return tensors


def band_prefix(name: str, number: int) -> str:
    """Beginning of the names of a band's tensors."""
    return f"{name}.band{number}"
