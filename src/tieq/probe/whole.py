"""A whole quantized model measured in the float model's code: the table by role, then the body with it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from tieq.metrics import SequenceScore, summarize
from tieq.probe.runs import Case, LookedUp, RoleRuns
from tieq.source.reference import ReferenceModel
from tieq.source.role_runs import Table, hidden_states, with_weights
from tieq.text import Sequences


def whole_costs(
    model: ReferenceModel,
    lookup: Table,
    logits: Table,
    body: Iterable[tuple[str, bool, Table]],
    sequences: Sequences,
    allowed: NDArray[np.bool_],
) -> dict[str, float]:
    """KL in nats per token: ``lookup`` and ``logits`` alone, the ``table`` in both, the ``whole`` model.

    ``body`` is what the body adds to the table: whole less table.

    Args:
        model: the float model; left as it was.
        lookup: decoded lookup table, ``[rows, columns]``.
        logits: decoded logits table; the same array where one table plays both roles.
        body: decoded matrices of the body, see :func:`tieq.source.role_runs.with_weights`.
        sequences: tokens.
        allowed: ids that count, ``[rows]``.
    """
    runs = RoleRuns(model, sequences, allowed)
    looked_up = runs.look_up(lookup)
    with with_weights(model, body):
        hidden = [hidden_states(model, ids, lookup) for ids in sequences.ids]
    everything = LookedUp(hidden, looked_up.residual_error)
    found = runs.score(
        {
            "lookup": Case(looked_up),
            "logits": Case(None, logits),
            "table": Case(looked_up, logits),
            "whole": Case(everything, logits),
        }
    )
    costs = {name: _kl(scores) for name, scores in found.items()}
    return {**costs, "body": costs["whole"] - costs["table"]}


def _kl(scores: list[SequenceScore]) -> float:
    return summarize(scores).kl.value
