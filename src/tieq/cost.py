"""Second-order cost of table errors in nats per token, by role and row, without running the model again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tieq.calibrate import RowUse, Statistics, TokenSample

_CHUNK_ROWS = 8192
_CHUNK_TOKENS = 64


def row_costs(
    errors: NDArray[np.float32], statistics: Statistics, rows: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """What each row's error costs in the lookup and in the logits role, ``[rows]`` float32, nats per token.

    ``1/2 f e' G e`` and ``1/2 (s / sum s) e' (c H) e`` with the row's use f and s: see :func:`expected_lookups`.

    Args:
        errors: original minus quantized table, ``[rows, columns]`` float32.
        statistics: of a full measurement.
        rows: which rows of the table the errors belong to; None for all of them.
    """
    assert statistics.table is not None
    assert statistics.rows is not None
    lookup, logits = np.empty(len(errors), np.float32), np.empty(len(errors), np.float32)
    for start in range(0, len(errors), _CHUNK_ROWS):
        piece = slice(start, start + _CHUNK_ROWS)
        lookup[piece] = _quadratic(errors[piece], statistics.table.lookup)
        logits[piece] = _quadratic(errors[piece], statistics.table.logits)
    half, chosen = np.float32(0.5), slice(None) if rows is None else rows
    spread = statistics.rows.spread / statistics.rows.spread.sum()
    return lookup * expected_lookups(statistics.rows)[chosen] * half, logits * spread[chosen] * half


def matrix_cost(
    errors: NDArray[np.float32], inputs: NDArray[np.float32], gradients: NDArray[np.float32]
) -> NDArray[np.float32]:
    """What each row's error costs in a matrix of the body, ``[rows]`` float32, nats per token.

    ``1/2 g_r sum_c a_c e_rc^2``: inputs and output gradients are taken as independent, columns as uncorrelated (Martens
    and Grosse 2015, K-FAC, of which this is the diagonal).

    Args:
        errors: original minus quantized rows, ``[rows, columns]``.
        inputs: mean square of each input, ``[columns]``.
        gradients: mean square of the loss gradient at each of these rows' outputs, ``[rows]``.
    """
    found: NDArray[np.float32] = np.square(errors) @ inputs * gradients * np.float32(0.5)
    return found


def expected_lookups(rows: RowUse) -> NDArray[np.float32]:
    """How often a row will be looked up: calibration's count and the model's own expectation, half each.

    The expectation is a prior for tokens that the calibration text never had.
    """
    expected: NDArray[np.float32] = (rows.lookups + rows.probability) * np.float32(0.5)
    return expected


def lookup_cost(errors: NDArray[np.float32], sample: TokenSample) -> float:
    """Predicted KL of the lookup role: ``1/2 mean (g' e)^2`` over the sampled positions, nats per token."""
    products = np.einsum("tc,tc->t", sample.gradient, errors[sample.ids], dtype=np.float64)
    return float(np.square(products).mean() / 2)


def _quadratic(errors: NDArray[np.float32], cost: NDArray[np.float32]) -> NDArray[np.float32]:
    found: NDArray[np.float32] = np.einsum("rc,rc->r", errors @ cost, errors)
    return found


def logits_cost(errors: NDArray[np.float32], table: NDArray[np.float32], sample: TokenSample) -> float:
    """Predicted KL of the logits role: half the variance of the logit errors under the model's own distribution.

    Scaling, softcap and bias of the logits are left out.

    Args:
        errors: original minus quantized table, ``[rows, columns]``.
        table: original table, ``[rows, columns]``.
        sample: calibration positions.
    """
    total = 0.0
    for start in range(0, len(sample.hidden), _CHUNK_TOKENS):
        hidden = sample.hidden[start : start + _CHUNK_TOKENS]
        scores = hidden @ table.T
        scores -= scores.max(axis=1, keepdims=True)
        chances = np.exp(scores, out=scores)
        chances /= chances.sum(axis=1, keepdims=True)
        gaps = hidden @ errors.T
        means = np.einsum("tr,tr->t", chances, gaps)
        total += float((np.einsum("tr,tr,tr->t", chances, gaps, gaps) - np.square(means)).sum())
    return total / len(sample.hidden) / 2
