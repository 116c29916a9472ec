"""Rows by how often they are used: which part of the table the tokens read, and where its errors cost."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from numpy.typing import NDArray

from tieq.calibrate import Statistics
from tieq.cost import expected_lookups, row_costs
from tieq.source.role_runs import Table

# Upper ends of the bands, as shares of the rows.
_EDGES = (0.001, 0.01, 0.05, 0.2, 1.0)
_LABELS = ("top 0.1 %", "0.1 to 1 %", "1 to 5 %", "5 to 20 %", "the other 80 %")


@dataclasses.dataclass(frozen=True)
class Bands:
    """Rows ranked by expected lookups, in bands from the most to the least frequent.

    Attributes:
        members: row numbers of each band.
        expected: share of lookups that calibration expects in each band.
        tokens: share of the evaluation tokens in each band.
    """

    members: tuple[NDArray[np.int64], ...]
    expected: tuple[float, ...]
    tokens: tuple[float, ...]

    def rows(self) -> list[dict[str, float | int | str]]:
        """One plain dictionary a band."""
        return [
            {"label": label, "rows": len(rows), "expected_share": expected, "token_share": tokens}
            for label, rows, expected, tokens in zip(_LABELS, self.members, self.expected, self.tokens, strict=True)
        ]

    def costs(self, lookup_errors: Table, logits_errors: Table, statistics: Statistics) -> dict[str, list[float]]:
        """Predicted cost of each band by role, nats per token.

        Args:
            lookup_errors: original minus quantized, ``[rows, columns]``, of the table that is looked up.
            logits_errors: of the table that scores; the same array where one table plays both roles.
            statistics: of a full measurement.
        """
        lookup, logits = row_costs(lookup_errors, statistics)
        if logits_errors is not lookup_errors:
            logits = row_costs(logits_errors, statistics)[1]
        return {
            role: [float(costs[rows].sum(dtype=np.float64)) for rows in self.members]
            for role, costs in (("lookup", lookup), ("logits", logits))
        }


def frequency_bands(statistics: Statistics, ids: NDArray[np.int64]) -> Bands:
    """Cut the rows into bands: the top 0.1 %, up to 1 %, 5 %, 20 %, and the rest.

    Args:
        statistics: of a full measurement, by whose expected lookups rows are ranked.
        ids: evaluation tokens, whose shares are counted.
    """
    assert statistics.rows is not None
    expected = expected_lookups(statistics.rows)
    order = np.argsort(-expected, kind="stable")
    counts = np.bincount(ids.reshape(-1), minlength=len(order))
    edges = [0, *(int(np.ceil(share * len(order))) for share in _EDGES)]
    members = tuple(order[start:end] for start, end in itertools.pairwise(edges))
    return Bands(
        members,
        tuple(float(expected[rows].sum(dtype=np.float64)) for rows in members),
        tuple(float(counts[rows].sum() / ids.size) for rows in members),
    )
