"""KL, top-1 agreement and perplexity ratio against a reference, with standard errors over sequences."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

# Positions that are compared at a time, so that a 262,144-token vocabulary fits in memory in float64.
_POSITIONS = 32
_LARGEST_NATS = 700.0


@dataclasses.dataclass
class SequenceScore:
    """Sums over one sequence for one candidate.

    ``kl`` and ``same_top`` are against the reference, ``kl_to_first`` is KL(first candidate || this one), all in
    nats summed over ``positions``; the negative log-likelihoods are summed over ``predictions``.
    """

    positions: int
    predictions: int
    nll: float = 0.0
    nll_reference: float = 0.0
    kl: float = 0.0
    same_top: int = 0
    kl_to_first: float = 0.0


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over tokens and its standard error over sequences (None for a single sequence)."""

    value: float
    standard_error: float | None


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a runtime's logits are worth against the reference on some sequences.

    ``by_sequence`` holds what the means are over: KL, top-1, and the logarithm of the perplexity ratio.
    """

    kl: Estimate
    top1: Estimate
    perplexity_ratio: Estimate
    reference_perplexity: float
    sequences: int
    tokens: int
    by_sequence: dict[str, list[float]]


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities in float64 along the last axis."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide


def score_sequence(
    ids: NDArray[np.int64],
    reference: NDArray[np.float32] | None,
    candidates: list[NDArray[np.float32]],
    allowed: NDArray[np.bool_],
) -> list[SequenceScore]:
    """Compare the logits ``[length, vocab]`` of several candidates with a reference and with the first of them.

    Only the ids that the tokenizer can emit (``allowed``, ``[vocab]``) take part: padding rows of the table have
    logits but no meaning. Columns beyond ``allowed`` are ignored.
    """
    length = len(ids)
    scores = [SequenceScore(length, length - 1) for _ in candidates]
    if not allowed[ids].all():
        raise ValueError("a token of the sequence is not among the allowed ids")
    column_of = np.cumsum(allowed) - 1
    everything = bool(allowed.all())

    def kept(logits: NDArray[np.float32], piece: slice) -> NDArray[np.float64]:
        part = logits[piece, : len(allowed)]
        return log_softmax(part if everything else part[:, allowed])

    for start in range(0, length, _POSITIONS):
        piece = slice(start, min(start + _POSITIONS, length))
        at = np.arange(piece.start, min(piece.stop, length - 1))
        targets = (at - start, column_of[ids[at + 1]])
        expected = None if reference is None else kept(reference, piece)
        first: NDArray[np.float64] | None = None
        for score, logits in zip(scores, candidates, strict=True):
            found = kept(logits, piece)
            score.nll -= float(found[targets].sum())
            if expected is not None:
                score.nll_reference -= float(expected[targets].sum())
                score.kl += _kl(expected, found)
                score.same_top += int((expected.argmax(-1) == found.argmax(-1)).sum())
            first = found if first is None else first
            score.kl_to_first += _kl(first, found)
    return scores


def _kl(left: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    return 0.0 if left is right else float((np.exp(left) * (left - right)).sum())


def summarize(scores: list[SequenceScore]) -> Scores:
    """Means over tokens, standard errors over sequences (delta method for the perplexity ratio)."""
    gaps = [(score.nll - score.nll_reference) / score.predictions for score in scores]
    kls = [score.kl / score.positions for score in scores]
    tops = [score.same_top / score.positions for score in scores]
    gap = mean(gaps)
    ratio = exp(gap.value)
    predictions = sum(score.predictions for score in scores)
    return Scores(
        kl=mean(kls),
        top1=mean(tops),
        perplexity_ratio=Estimate(ratio, None if gap.standard_error is None else ratio * gap.standard_error),
        reference_perplexity=exp(sum(score.nll_reference for score in scores) / predictions),
        sequences=len(scores),
        tokens=sum(score.positions for score in scores),
        by_sequence={"kl": kls, "top1": tops, "perplexity_ratio": gaps},
    )


def exp(nats: float) -> float:
    """Exponential that is infinite instead of raising: the logits of a broken graph reach hundreds of nats."""
    return math.exp(nats) if nats < _LARGEST_NATS else math.inf


def mean(values: list[float]) -> Estimate:
    """Mean of per-sequence values and its standard error."""
    array = np.array(values, dtype=np.float64)
    error = float(array.std(ddof=1) / math.sqrt(len(array))) if len(array) > 1 else None
    return Estimate(float(array.mean()), error)
