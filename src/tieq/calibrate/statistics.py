"""What calibration measured, as records that are saved beside the artifact and that solvers, probe and plan read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.errors import TieqError
from tieq.kept import content_digest

FORMAT_VERSION = 5

# Added to the diagonal, as a share of its mean, where calibration text may have left a direction out.
_TABLE_DAMPING, _DIAGONAL_DAMPING = 0.1, 0.01
# Means of second moments with which float32 still has room for squares of errors on either side.
_SMALLEST, _LARGEST = 1e-30, 1e30


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
        with np.errstate(over="ignore"):  # what is not finite then is not used
            cost = {"lookup": self.lookup, "logits": self.logits}.get(role, self.lookup + self.logits)
        return damped(cost, _TABLE_DAMPING)


@dataclasses.dataclass(frozen=True)
class RowUse:
    """How often each row of the table is used, ``[rows]`` float32 each.

    Attributes:
        lookups: share of the calibration text's tokens, all of it, that look the row up; sums to one.
        probability: mean probability that the model gives the row's token; sums to one.
        spread: mean of ``p (1 - p)`` of the row's token; sums to ``c``.
    """

    lookups: NDArray[np.float32]
    probability: NDArray[np.float32]
    spread: NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class TokenSample:
    """Single calibration positions that the cost matrices leave out, for predictions that averages cannot make.

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
        table: cost of the vocabulary table; it and what follows only from a full measurement.
        rows: how often each row is used.
        sample: single positions.
        gradients: mean square of the loss gradient at each output, by matrix name, ``[rows]`` float32, nats squared
            per unit squared.
    """

    second_moments: dict[str, NDArray[np.float32]]
    tokens: int
    table: TableCost | None = None
    rows: RowUse | None = None
    sample: TokenSample | None = None
    gradients: dict[str, NDArray[np.float32]] = dataclasses.field(default_factory=dict)

    def save(self, path: Path, about: dict[str, Any], *, whole: bool = False) -> None:
        """Write a calibration file (safetensors), with what it belongs to.

        Args:
            path: file to write.
            about: what was measured on what, plain values; :meth:`load` returns it.
            whole: also write output gradients and single positions, which only the cache keeps.
        """
        from safetensors.numpy import save_file

        tensors = {name: np.ascontiguousarray(value) for name, value in sorted(self.tensors(whole=whole).items())}
        # One key, because safetensors writes several in an order that changes from run to run.
        known = {**about, "version": FORMAT_VERSION, "tokens": self.tokens, "content_sha256": content_digest(tensors)}
        save_file(tensors, path, metadata={"tieq": json.dumps(known, sort_keys=True)})

    @classmethod
    def load(cls, path: Path) -> tuple[Statistics, dict[str, Any]]:
        """Read a calibration file back, equal bit for bit, with what it belongs to.

        Raises:
            TieqError: if it is no calibration file of this version, or its content is not what was written.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="numpy") as file:
                about = json.loads(file.metadata()["tieq"])
                version, expected, tokens = about.pop("version"), about.pop("content_sha256"), int(about.pop("tokens"))
                tensors = {name: np.array(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise TieqError(f"is no calibration file ({error}).", where=str(path)) from error
        if version != FORMAT_VERSION:
            raise TieqError(f"has format version {version}, this tieq reads {FORMAT_VERSION}.", where=str(path))
        if content_digest(tensors) != expected:
            raise TieqError("is damaged: its content has another SHA-256.", where=str(path))
        prefixes = (_GRADIENTS, *_PREFIXES.values())
        return cls(
            second_moments={name: value for name, value in tensors.items() if not name.startswith(prefixes)},
            tokens=tokens,
            table=_record(TableCost, tensors),
            rows=_record(RowUse, tensors),
            sample=_record(TokenSample, tensors),
            gradients={
                name.removeprefix(_GRADIENTS): value for name, value in tensors.items() if name.startswith(_GRADIENTS)
            },
        ), about

    def tensors(self, *, whole: bool) -> dict[str, NDArray[Any]]:
        """What a calibration file holds: second moments under their matrix's name, the rest under prefixes."""
        kept: dict[str, NDArray[Any]] = dict(self.second_moments)
        if whole:
            kept |= {f"{_GRADIENTS}{name}": value for name, value in self.gradients.items()}
        for record in (self.table, self.rows, self.sample if whole else None):
            if record is not None:
                prefix = _PREFIXES[type(record)]
                kept |= {f"{prefix}{field.name}": getattr(record, field.name) for field in dataclasses.fields(record)}
        return kept

    def problems(self) -> tuple[str, ...]:
        """What of it says nothing, and what is done without it; one sentence each."""
        unusable = [name for name, value in self.second_moments.items() if usable_importance(value) is None]
        found = []
        if unusable:
            more = f" and {len(unusable) - 1} more" if len(unusable) > 1 else ""
            found.append(
                f"calibration says nothing about {unusable[0]}{more} (its inputs are zero or not finite): "
                "rounded with equal weights."
            )
        if self.table is not None and usable_importance(self.table.of("table")) is None:
            found.append("the table's cost is zero: the table is rounded by its inputs' second moments.")
        return tuple(found)

    def importance(self, name: str, role: str, logits: str) -> NDArray[np.float32] | None:
        """What a solver weighs errors of a matrix with: None where it was not measured, ones where that says nothing.

        Args:
            name: the matrix.
            role: ``table``, ``lookup``, ``logits`` or ``body``.
            logits: name under which the logits role's inputs stand.
        """
        if role != "body" and self.table is not None:
            cost = usable_importance(self.table.of(role))
            if cost is not None:
                return cost
        measured = self.second_moments.get(logits if role in ("table", "logits") else name)
        if measured is None:
            return None
        found = usable_importance(measured)
        return np.ones(len(measured), np.float32) if found is None else found


_GRADIENTS = "gradients."
_PREFIXES: dict[type[Any], str] = {TableCost: "table.", RowUse: "rows.", TokenSample: "sample."}


def _record(kind: type[Any], tensors: dict[str, NDArray[Any]]) -> Any:
    fields = {field.name: tensors.get(f"{_PREFIXES[kind]}{field.name}") for field in dataclasses.fields(kind)}
    return None if any(value is None for value in fields.values()) else kind(**fields)


def damped(matrix: NDArray[np.float32], share: float) -> NDArray[np.float32]:
    """Add ``share`` of the mean of the diagonal to the diagonal of ``[columns, columns]``; beyond float32, nothing."""
    level = share * float(matrix.diagonal().mean(dtype=np.float64))
    raised: NDArray[np.float32] = matrix.copy()
    if level < _LARGEST:
        np.fill_diagonal(raised, matrix.diagonal() + np.float32(level))
    return raised


def usable_importance(moments: NDArray[np.float32] | None) -> NDArray[np.float32] | None:
    """Importance from second moments, or None where they say nothing (absent, not finite, all zero or nearly)."""
    if moments is None or not np.isfinite(moments).all():
        return None
    level = float(np.mean(moments if moments.ndim == 1 else moments.diagonal(), dtype=np.float64))
    if not _SMALLEST <= level <= _LARGEST:
        return None
    if moments.ndim == 2:
        return moments
    # A column that calibration never excited still matters a little elsewhere.
    raised: NDArray[np.float32] = (moments + np.float32(_DIAGONAL_DAMPING) * moments.mean()).astype(np.float32)
    return raised
