"""The second-order prediction beside each measurement, from calibration alone."""

from __future__ import annotations

import dataclasses

import numpy as np

from tieq.calibrate import TokenSample
from tieq.cost import logits_cost, lookup_cost
from tieq.source.role_runs import Table


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicted KL by role, nats per token; ``both`` is their sum, as if the two errors were independent."""

    lookup: float
    logits: float

    @property
    def both(self) -> float:
        """Cost of both roles."""
        return self.lookup + self.logits


def predict(
    lookup: Table, logits: Table, found_lookup: Table, found_logits: Table, sample: TokenSample, thin: TokenSample
) -> Prediction:
    """Predict what tables cost that stand in for the model's own, all ``[rows, columns]`` float32.

    Args:
        lookup: the model's own lookup table.
        logits: its logits table.
        found_lookup: what is looked up instead.
        found_logits: what scores instead.
        sample: calibration positions for the lookup role.
        thin: positions for the logits role, each of which takes two products with a whole table.
    """
    errors = lookup - found_lookup
    cost = lookup_cost(errors, sample)
    if logits is not lookup or found_logits is not found_lookup:
        errors = logits - found_logits
    return Prediction(cost, logits_cost(errors, logits, thin))


def thinned(sample: TokenSample, positions: int) -> TokenSample:
    """At most ``positions`` of the sample, spread evenly over it."""
    if len(sample.ids) <= positions:
        return sample
    kept = np.linspace(0, len(sample.ids), positions, endpoint=False).astype(np.int64)
    return TokenSample(sample.ids[kept], sample.hidden[kept], sample.gradient[kept])
