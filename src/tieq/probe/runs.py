"""The float model over evaluation text, kept so that tables can be measured against it in one role or both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tieq.metrics import SequenceScore
from tieq.probe.score import Expected
from tieq.source.reference import ReferenceModel
from tieq.source.residual import residual_stream
from tieq.source.role_runs import Table, logits_of
from tieq.text import Sequences

# Logits that are held at a time, in float32 values: 256 positions of 49,152 rows, 64 of 262,144.
_LOGITS = 1 << 24


@dataclasses.dataclass(frozen=True)
class LookedUp:
    """What one body pass over all sequences found for a table in the lookup role.

    Attributes:
        hidden: what the logits role then reads, ``[length, columns]`` float32 for each sequence.
        residual_error: relative error of the residual stream before the first and after each decoder block,
            ``[blocks + 1]`` float64: RMS of the error over RMS of the reference, a mean over tokens.
    """

    hidden: list[NDArray[np.float32]]
    residual_error: NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Case:
    """Tables to measure: ``looked_up`` is None for the model's own lookup, ``logits`` for its own logits table."""

    looked_up: LookedUp | None = None
    logits: Table | None = None


class RoleRuns:
    """The float model's runs over the evaluation sequences.

    A table in the lookup role takes a body pass (:meth:`look_up`); in the logits role it takes a matrix product over
    hidden states that are there already (:meth:`score`).

    Attributes:
        before_norm: what the last decoder block hands to the final norm, ``[length, columns]`` for each sequence.
        hidden: what the logits role reads, likewise.
    """

    def __init__(
        self,
        model: ReferenceModel,
        sequences: Sequences,
        allowed: NDArray[np.bool_],
        advance: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Run the model once over all sequences.

        Args:
            model: the float model.
            sequences: tokens.
            allowed: ids that count, ``[rows]``.
            advance: told 1 after each sequence.
        """
        self._model, self._sequences, self._allowed = model, sequences, allowed
        self.hidden: list[NDArray[np.float32]] = []
        self._streams: list[NDArray[np.float32]] = []
        for ids in sequences.ids:
            hidden, stream = residual_stream(model, ids)
            self.hidden.append(hidden)
            self._streams.append(stream)
            advance(1)
        self.before_norm = [stream[-1] for stream in self._streams]

    def look_up(self, table: Table, advance: Callable[[int], None] = lambda count: None) -> LookedUp:
        """Run the body with another table ``[rows, columns]`` in the lookup role."""
        hidden, errors = [], []
        for ids, expected in zip(self._sequences.ids, self._streams, strict=True):
            states, stream = residual_stream(self._model, ids, table)
            hidden.append(states)
            errors.append(_relative(stream - expected, expected))
            advance(1)
        return LookedUp(hidden, np.concatenate(errors, axis=1).mean(axis=1))

    def score(
        self, cases: dict[str, Case], advance: Callable[[int], None] = lambda count: None
    ) -> dict[str, list[SequenceScore]]:
        """Score tables against the model's own, one score a sequence; the cases share the reference's logits."""
        found: dict[str, list[SequenceScore]] = {name: [] for name in cases}
        step = max(1, _LOGITS // len(self._allowed))
        for number, ids in enumerate(self._sequences.ids):
            for scores in found.values():
                scores.append(SequenceScore(len(ids), len(ids) - 1))
            for start in range(0, len(ids), step):
                piece = slice(start, start + step)
                own = logits_of(self._model, self.hidden[number][piece])
                expected = Expected(own, ids[start + 1 : start + 1 + step], self._allowed)
                for name, case in cases.items():
                    hidden = self.hidden if case.looked_up is None else case.looked_up.hidden
                    expected.add(found[name][-1], logits_of(self._model, hidden[number][piece], case.logits))
            advance(1)
        return found


def _relative(errors: NDArray[np.float32], expected: NDArray[np.float32]) -> NDArray[np.float64]:
    """RMS ratio of vectors along the last axis, float64."""
    ratio: NDArray[np.float64] = np.sqrt(_power(errors) / np.maximum(_power(expected), np.finfo(np.float64).tiny))
    return ratio


def _power(values: NDArray[np.float32]) -> NDArray[np.float64]:
    power: NDArray[np.float64] = np.square(values, dtype=np.float64).sum(axis=-1)
    return power
