"""What calibration measured, as records that are saved beside the artifact and that solvers, probe and plan read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

# Added to the diagonal, as a share of its mean, where calibration text may have left a direction out.
_TABLE_DAMPING, _DIAGONAL_DAMPING = 0.1, 0.01


@dataclasses.dataclass(frozen=True)
class TableCost:
    """Cost of a row error by role, ``[columns, columns]`` float32 each, in nats per token.

    ``lookup`` is for a row that is looked up at every position, ``logits`` for the sum over all rows' errors as if each
    row were the average one: :class:`RowUse` tells the rows apart.
    """

    lookup: NDArray[np.float32]
    logits: NDArray[np.float32]

    def of(self, role: str) -> NDArray[np.float32]:
        """The matrix for a table that plays ``lookup``, ``logits`` or (``table``) both, damped."""
        cost = {"lookup": self.lookup, "logits": self.logits}.get(role, self.lookup + self.logits)
        return damped(cost, _TABLE_DAMPING)


@dataclasses.dataclass(frozen=True)
class RowUse:
    """How often each row of the table is used, ``[rows]`` float32 each.

    Attributes:
        lookups: share of the calibration tokens that look the row up; sums to one.
        probability: mean probability that the model gives the row's token; sums to one.
        spread: mean of ``p (1 - p)`` of the row's token; sums to ``c``.
    """

    lookups: NDArray[np.float32]
    probability: NDArray[np.float32]
    spread: NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class TokenSample:
    """Single calibration positions, for predictions that averages cannot make.

    Attributes:
        ids: looked-up token, ``[tokens]`` int64.
        hidden: what the logits role reads, ``[tokens, columns]`` float32.
        gradient: loss gradient at the looked-up row, ``[tokens, columns]`` float32, nats per unit of the stored weight.
    """

    ids: NDArray[np.int64]
    hidden: NDArray[np.float32]
    gradient: NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What was measured.

    Attributes:
        second_moments: mean square of each input, by matrix name, ``[columns]`` float32.
        tokens: number of tokens behind them.
        gradients: mean square of the loss gradient at each output, by matrix name, ``[rows]`` float32, nats squared
            per unit squared; like what follows only from a full measurement.
        table: cost of the vocabulary table.
        rows: how often each row is used.
        sample: single positions.
    """

    second_moments: dict[str, NDArray[np.float32]]
    tokens: int
    gradients: dict[str, NDArray[np.float32]] = dataclasses.field(default_factory=dict)
    table: TableCost | None = None
    rows: RowUse | None = None
    sample: TokenSample | None = None

    def save(self, path: Path, source: dict[str, str]) -> None:
        """Write ``calibration.safetensors``: mean squares, the table's cost and use, with the text's identity."""
        from safetensors.numpy import save_file

        # One key, because safetensors writes several in an order that changes from run to run.
        metadata = {"tieq": json.dumps({"tokens": self.tokens, **source}, sort_keys=True)}
        kept = dict(sorted(self.second_moments.items()))
        if self.table is not None:
            kept |= {"table.lookup_cost": self.table.lookup, "table.logits_cost": self.table.logits}
        if self.rows is not None:
            kept |= {f"rows.{field.name}": getattr(self.rows, field.name) for field in dataclasses.fields(RowUse)}
        save_file(kept, path, metadata=metadata)

    def importance(self, name: str, role: str, logits: str) -> NDArray[np.float32] | None:
        """What a solver weighs errors of a matrix with, or None where nothing usable was measured.

        Args:
            name: the matrix.
            role: ``table``, ``lookup``, ``logits`` or ``body``.
            logits: name under which the logits role's inputs stand.
        """
        if role != "body" and self.table is not None:
            return usable_importance(self.table.of(role))
        return usable_importance(self.second_moments.get(logits if role in ("table", "logits") else name))


def damped(matrix: NDArray[np.float32], share: float) -> NDArray[np.float32]:
    """Add ``share`` of the mean of the diagonal to the diagonal of ``[columns, columns]``."""
    raised: NDArray[np.float32] = matrix + np.eye(len(matrix), dtype=np.float32) * np.float32(
        share * float(matrix.diagonal().mean())
    )
    return raised


def usable_importance(moments: NDArray[np.float32] | None) -> NDArray[np.float32] | None:
    """Importance from second moments, or None where they say nothing (absent, not finite, all zero)."""
    if moments is None or not np.isfinite(moments).all() or not moments.any():
        return None
    if moments.ndim == 2:
        return moments
    # A column that calibration never excited still matters a little elsewhere.
    raised: NDArray[np.float32] = (moments + np.float32(_DIAGONAL_DAMPING) * moments.mean()).astype(np.float32)
    return raised
