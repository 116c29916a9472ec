"""KL, top-1 agreement and perplexity ratio against a reference, with standard errors over sequences."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

# Positions that are compared at a time, so that a 262,144-token vocabulary fits in memory in float64.
_POSITIONS = 32


@dataclasses.dataclass(frozen=True)
class SequenceScore:
    """Sums over one sequence: KL in nats and agreements per position, negative log-likelihoods per prediction."""

    positions: int
    kl: float
    same_top: int
    predictions: int
    nll_reference: float
    nll: float


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over tokens and its standard error over sequences (None for a single sequence)."""

    value: float
    standard_error: float | None


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a runtime's logits are worth against the reference on some sequences."""

    kl: Estimate
    top1: Estimate
    perplexity_ratio: Estimate
    reference_perplexity: float
    sequences: int
    tokens: int


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities in float64 along the last axis."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide


def score_sequence(
    ids: NDArray[np.int64],
    reference: NDArray[np.float32],
    candidate: NDArray[np.float32],
    allowed: NDArray[np.bool_],
) -> SequenceScore:
    """Compare two sets of logits ``[length, vocab]`` for one sequence.

    Only the ids that the tokenizer can emit (``allowed``, ``[vocab]``) take part: padding rows of the table have
    logits but no meaning. Columns of ``candidate`` beyond the reference's are ignored.
    """
    length, vocab = reference.shape
    kl = nll_reference = nll = 0.0
    same = 0
    column_of = np.cumsum(allowed) - 1
    for start in range(0, length, _POSITIONS):
        piece = slice(start, min(start + _POSITIONS, length))
        expected = log_softmax(reference[piece][:, allowed])
        found = log_softmax(candidate[piece, :vocab][:, allowed])
        kl += float((np.exp(expected) * (expected - found)).sum())
        same += int((expected.argmax(-1) == found.argmax(-1)).sum())
        for row, position in enumerate(range(piece.start, min(piece.stop, length - 1))):
            column = column_of[ids[position + 1]]
            nll_reference -= float(expected[row, column])
            nll -= float(found[row, column])
    return SequenceScore(length, kl, same, length - 1, nll_reference, nll)


def summarize(scores: list[SequenceScore]) -> Scores:
    """Means over tokens, standard errors over sequences (delta method for the perplexity ratio)."""
    kl = _mean([score.kl / score.positions for score in scores])
    top1 = _mean([score.same_top / score.positions for score in scores])
    gap = _mean([(score.nll - score.nll_reference) / score.predictions for score in scores])
    ratio = math.exp(gap.value)
    predictions = sum(score.predictions for score in scores)
    reference = math.exp(sum(score.nll_reference for score in scores) / predictions)
    return Scores(
        kl,
        top1,
        Estimate(ratio, None if gap.standard_error is None else ratio * gap.standard_error),
        reference,
        len(scores),
        sum(score.positions for score in scores),
    )


def _mean(values: list[float]) -> Estimate:
    array = np.array(values, dtype=np.float64)
    error = float(array.std(ddof=1) / math.sqrt(len(array))) if len(array) > 1 else None
    return Estimate(float(array.mean()), error)
