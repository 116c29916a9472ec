"""Score many candidates against one reference: the reference's distribution is prepared once.

Logits, exponentials and their products are float32; every sum over the vocabulary and over positions is float64.
:func:`tieq.metrics.score_sequence` does all of it in float64 and takes several times as long.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tieq.metrics import SequenceScore

# Positions at a time: their logits stay in the processor's cache from one step to the next.
_POSITIONS = 8


class Expected:
    """The reference's distribution at some consecutive positions of a sequence.

    Args:
        logits: of the reference, ``[positions, rows]`` float32.
        following: the token after each position, ``[positions]``, or one fewer at the end of the sequence.
        allowed: ids that the tokenizer can emit, ``[rows]``; only these take part.
    """

    def __init__(self, logits: NDArray[np.float32], following: NDArray[np.int64], allowed: NDArray[np.bool_]) -> None:
        self._columns = _columns(allowed)
        self._targets = (np.cumsum(allowed) - 1)[following]
        self._shifted = np.ascontiguousarray(logits[:, self._columns])
        self._best = self._shifted.argmax(axis=1)
        self._shifted -= self._shifted.max(axis=1, keepdims=True)
        self._chances = np.exp(self._shifted)
        self._total = self._chances.sum(axis=1, dtype=np.float64)

    def add(self, score: SequenceScore, logits: NDArray[np.float32]) -> None:
        """Add a candidate's logits ``[positions, rows]`` at the same positions to its score."""
        for start in range(0, len(logits), _POSITIONS):
            piece = slice(start, start + _POSITIONS)
            self._add_piece(score, piece, logits[piece, self._columns])

    def _add_piece(self, score: SequenceScore, piece: slice, logits: NDArray[np.float32]) -> None:
        best = logits.argmax(axis=1)
        shifted = logits - np.take_along_axis(logits, best[:, None], axis=1)
        total = np.exp(shifted).sum(axis=1, dtype=np.float64)
        targets = self._targets[piece]
        at = np.arange(len(targets))
        expected, sums = self._shifted[piece], self._total[piece]
        score.nll += float((np.log(total[at]) - shifted[at, targets]).sum())
        score.nll_reference += float((np.log(sums[at]) - expected[at, targets]).sum())
        score.same_top += int((best == self._best[piece]).sum())
        gaps = np.subtract(expected, shifted, out=shifted)
        gaps *= self._chances[piece]
        score.kl += float((gaps.sum(axis=1, dtype=np.float64) / sums + np.log(total) - np.log(sums)).sum())


def _columns(allowed: NDArray[np.bool_]) -> slice | NDArray[np.bool_]:
    """Allowed columns: as a slice, which copies nothing, where they are the first ones."""
    count = int(allowed.sum())
    return slice(count) if allowed[:count].all() else allowed
