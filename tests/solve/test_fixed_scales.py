"""The full-cost solver under ggml's compressed scales."""

from __future__ import annotations

import numpy as np
import pytest

from tieq.codecs import ggml
from tieq.codecs.k_quants import LAYOUTS
from tieq.errors import TieqError
from tieq.solve import encode_under_cost

COLUMNS = 256

each_type = pytest.mark.parametrize("name", LAYOUTS)


def cost_matrix(seed: int, mixing: float = 1.0) -> np.ndarray:
    """A positive definite matrix with uneven columns, correlated as far as they are mixed."""
    random = np.random.default_rng(seed)
    mixed = np.eye(COLUMNS) + mixing * random.standard_normal((COLUMNS, COLUMNS)) / np.sqrt(COLUMNS)
    inputs = random.standard_normal((1024, COLUMNS)) @ mixed * np.exp(0.7 * random.standard_normal(COLUMNS))
    moment = inputs.T @ inputs / len(inputs)
    return (moment + 0.05 * moment.diagonal().mean() * np.eye(COLUMNS)).astype(np.float32)


def heavy_tailed(seed: int, rows: int = 150) -> np.ndarray:
    random = np.random.default_rng(seed)
    sizes = np.exp(0.5 * random.standard_normal((rows, 1)))
    return (0.02 * random.standard_t(5, (rows, COLUMNS)) * sizes).astype(np.float32)


def costs(weights: np.ndarray, rows: np.ndarray, name: str, cost: np.ndarray) -> np.ndarray:
    """Cost of each row's error, in float64."""
    error = weights - ggml.decode(rows, name).astype(np.float64)
    return np.einsum("ri,ij,rj->r", error, cost.astype(np.float64), error)


@each_type
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mixing", [0.0, 1.0, 4.0])
def test_no_row_costs_more_than_with_ggmls_encoder(name: str, seed: int, mixing: float) -> None:
    weights, cost = heavy_tailed(seed), cost_matrix(seed, mixing)
    ours = costs(weights, encode_under_cost(weights, name, cost), name, cost)
    theirs = costs(weights, ggml.encode(weights, name, np.ascontiguousarray(cost.diagonal())), name, cost)
    # Costs are compared in float32, as sums of 256 terms: 1e-5 is far above their rounding.
    assert (ours <= theirs * (1 + 1e-5)).all()
    if mixing:
        assert ours.sum() < 0.97 * theirs.sum()


@each_type
def test_rows_that_feedback_would_worsen_keep_ggmls_codes(name: str) -> None:
    # Weights on the grid: ggml's codes may be exact already, and then nothing may move.
    rows = ggml.encode(heavy_tailed(4), name)
    weights, importance = ggml.decode(rows, name), np.ones(COLUMNS, np.float32)
    again = ggml.encode(weights, name, importance)
    theirs = costs(weights, again, name, np.eye(COLUMNS))
    ours = costs(weights, encode_under_cost(weights, name, np.eye(COLUMNS, dtype=np.float32)), name, np.eye(COLUMNS))
    assert (ours <= theirs * (1 + 1e-5)).all()


@each_type
def test_without_importance_codes_are_ggmls_or_nearer(name: str) -> None:
    weights = heavy_tailed(5)
    ours = np.abs(weights - ggml.decode(encode_under_cost(weights, name, None), name))
    theirs = np.abs(weights - ggml.decode(ggml.encode(weights, name), name))
    # With equal weights and no correlation each code is on its own. Where two codes are equally near, rounding decides.
    assert (ours <= theirs + 2.0**-20 * np.abs(weights).max()).all()


@each_type
@pytest.mark.parametrize("threads", [1, 3])
def test_results_depend_neither_on_threads_nor_on_the_rows_around(name: str, threads: int, monkeypatch) -> None:
    weights, cost = heavy_tailed(6), cost_matrix(6)
    rows = encode_under_cost(weights, name, cost)
    monkeypatch.setattr("os.cpu_count", lambda: threads)
    for piece in (slice(0, 150), slice(3, 4), slice(60, 131)):
        assert np.array_equal(encode_under_cost(weights[piece], name, cost), rows[piece])


@each_type
def test_zeros_and_huge_weights_stay_finite(name: str) -> None:
    weights = heavy_tailed(7, rows=4)
    weights[0], weights[1, 5] = 0, 1e4
    decoded = ggml.decode(encode_under_cost(weights, name, cost_matrix(7)), name)
    assert np.isfinite(decoded).all()
    assert not decoded[0].any()


def test_columns_that_the_block_does_not_divide_are_refused() -> None:
    with pytest.raises(TieqError, match="q3_k needs columns divisible by 256, not 96"):
        encode_under_cost(np.ones((2, 96), np.float32), "q3_k", None)


def test_a_matrix_that_is_not_positive_definite_is_refused() -> None:
    with pytest.raises(ValueError, match="not positive definite"):
        encode_under_cost(heavy_tailed(8), "q4_k", -np.eye(COLUMNS, dtype=np.float32))
