"""What the final norm does to the columns that the logits role reads.

An error in column j of the table costs about ``E[h_j^2]`` times its square, so a few large columns of h would make a
few columns of the table matter most. The norm scales each token's vector to one size and then each column by its gain.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_TOP = 0.01


def norm_effect(before: list[NDArray[np.float32]], after: list[NDArray[np.float32]]) -> dict[str, Any]:
    """Compare hidden states before the norm's gain with those after it.

    Args:
        before: what the last decoder block hands over, ``[length, columns]`` for each sequence.
        after: what the logits role reads, likewise.

    Returns:
        a plain dictionary: ``top_columns`` and for each side ``rms`` (of the unscaled states), ``kurtosis`` (of all
        values, 3 for normal ones), ``participation`` (effective number of columns, ``(sum m)^2 / sum m^2`` with m the
        second moments) and ``top_share`` (share of the second moments in the largest 1 % of columns).
    """
    states = np.concatenate(before)
    sides = {"before": (states, _equal_tokens(states)), "after": (np.concatenate(after),) * 2}
    described = {name: _describe(raw, values) for name, (raw, values) in sides.items()}
    return {"top_columns": _top_count(states.shape[1]), **described, "sentence": _sentence(described, states.shape[1])}


def column_moments(states: list[NDArray[np.float32]], *, equal_tokens: bool) -> NDArray[np.float64]:
    """Second moments ``[columns]``; with ``equal_tokens`` each token's vector is scaled to RMS 1 first."""
    values = np.concatenate(states)
    return _moments(_equal_tokens(values) if equal_tokens else values)


def top_column_share(weights: NDArray[np.float64]) -> float:
    """Share of the sum of ``[columns]`` that the largest 1 % of them (at least one) hold."""
    top = np.sort(weights)[-_top_count(len(weights)) :]
    return float(top.sum() / max(float(weights.sum()), np.finfo(np.float64).tiny))


def _top_count(columns: int) -> int:
    return max(1, round(_TOP * columns))


def _equal_tokens(values: NDArray[np.float32]) -> NDArray[np.float32]:
    rms = np.sqrt(np.square(values, dtype=np.float64).mean(axis=1, keepdims=True))
    scaled: NDArray[np.float32] = (values / np.maximum(rms, np.finfo(np.float32).tiny)).astype(np.float32)
    return scaled


def _moments(values: NDArray[np.float32]) -> NDArray[np.float64]:
    moments: NDArray[np.float64] = np.square(values, dtype=np.float64).mean(axis=0)
    return moments


def _describe(raw: NDArray[np.float32], values: NDArray[np.float32]) -> dict[str, float]:
    squares = np.square(values, dtype=np.float64)
    moments = squares.mean(axis=0)
    return {
        "rms": float(np.sqrt(np.square(raw, dtype=np.float64).mean())),
        "kurtosis": float(np.square(squares).mean() / squares.mean() ** 2),
        "participation": float(moments.sum() ** 2 / np.square(moments).sum()),
        "top_share": top_column_share(moments),
    }


def _sentence(sides: dict[str, dict[str, float]], columns: int) -> str:
    before, after = sides["before"], sides["after"]
    evened = after["participation"] >= before["participation"]
    top = _top_count(columns)
    return (
        f"The final norm's gain {'evens the columns out' if evened else 'sharpens the columns'}: the largest {top} of "
        f"{columns} hold {before['top_share']:.1%} of the second moments before it and {after['top_share']:.1%} after "
        f"it (effective columns {before['participation']:.0f} and {after['participation']:.0f}), and it is the second "
        "moment after it that weighs a column's error in the logits role."
    )
