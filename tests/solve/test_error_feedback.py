"""The error-feedback solver under a full cost matrix."""

from __future__ import annotations

import numpy as np
import pytest

from tieq.codecs import ggml
from tieq.codecs.schemes import SCHEMES, Scheme, dequantize
from tieq.solve import SOLVERS
from tieq.solve.kernels import half

COLUMNS = 128


def correlated_cost(seed: int = 0) -> np.ndarray:
    """A positive definite matrix with uneven, correlated columns."""
    random = np.random.default_rng(seed)
    inputs = random.standard_normal((512, COLUMNS)) @ random.standard_normal((COLUMNS, COLUMNS))
    inputs *= np.exp(random.standard_normal(COLUMNS))
    moment = inputs.T @ inputs / len(inputs)
    return (moment + 0.05 * moment.diagonal().mean() * np.eye(COLUMNS)).astype(np.float32)


def costs(weights: np.ndarray, scheme: Scheme, solver: str, cost: np.ndarray) -> np.ndarray:
    """Cost of each row's error, in float64."""
    return costs_of(weights, dequantize(*SOLVERS[solver](weights, scheme, cost), scheme), cost)


def costs_of(weights: np.ndarray, decoded: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Cost of each row of ``weights - decoded``, in float64."""
    error = weights.astype(np.float64) - decoded
    return np.einsum("ri,ij,rj->r", error, cost.astype(np.float64), error)


each_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


@each_scheme
def test_it_costs_less_than_scale_search_on_nearly_every_row(scheme):
    weights = np.random.default_rng(1).standard_normal((400, COLUMNS)).astype(np.float32)
    cost = correlated_cost()
    ours, theirs = costs(weights, scheme, "hessian", cost), costs(weights, scheme, "scale-search", cost)
    # Both are heuristics, so a row may lose; with correlated columns feedback gains far more than that on the whole.
    assert ours.sum() < 0.8 * theirs.sum()
    assert (ours < theirs).mean() > 0.95


@pytest.mark.parametrize("scheme", [each for name, each in SCHEMES.items() if name in ggml.GGML_TYPES])
@pytest.mark.parametrize("seed", range(3))
def test_it_costs_less_than_ggmls_encoder_with_the_diagonal(scheme, seed):
    random = np.random.default_rng(seed)
    sizes = np.exp(0.5 * random.standard_normal((200, 1)))
    weights, cost = (random.standard_t(5, (200, COLUMNS)) * sizes).astype(np.float32), correlated_cost(seed)
    diagonal = np.ascontiguousarray(cost.diagonal())
    theirs = costs_of(weights, ggml.decode(ggml.encode(weights, scheme.name, diagonal), scheme.name), cost)
    ours = costs(weights, scheme, "hessian", cost)
    # As against scale search, which costs no more than ggml's encoder.
    assert ours.sum() < 0.8 * theirs.sum()
    assert (ours < theirs).mean() > 0.95


@pytest.mark.parametrize("name", ["q4_1", "q5_1"])
def test_the_descent_fits_scale_and_minimum_of_an_affine_block_together(name):
    """Against every pair of fp16 neighbours: the last sweep left no better scale, minimum or pair for its codes."""
    weights, cost = (
        np.random.default_rng(6).standard_normal((20, 32)).astype(np.float32) + 3,
        correlated_cost()[:32, :32],
    )
    scheme = SCHEMES[name]
    codes, scales = SOLVERS["hessian"](weights, scheme, cost)
    found = costs_of(weights, dequantize(codes, scales, scheme), cost)
    for moves in [(1, 0), (-1, 0), (0, 1), (0, -1)]:
        # Two fp16 steps: within one, the rounded least-squares point need not be the best of its neighbours.
        moved = (scales.view(np.int16) + 2 * np.array(moves, np.int16)).view(np.float16)
        assert (found <= costs_of(weights, dequantize(codes, moved, scheme), cost) * (1 + 1e-5)).mean() > 0.9


@pytest.mark.parametrize("threads", [1, 3])
@each_scheme
def test_results_depend_neither_on_threads_nor_on_the_rows_around(scheme, threads, monkeypatch):
    weights, cost = np.random.default_rng(7).standard_normal((600, COLUMNS)).astype(np.float32), correlated_cost()
    codes, scales = SOLVERS["hessian"](weights, scheme, cost)
    monkeypatch.setattr("os.cpu_count", lambda: threads)
    for piece in (slice(0, 600), slice(5, 6), slice(100, 333)):
        again = SOLVERS["hessian"](weights[piece], scheme, cost)
        assert again[0].tobytes() == codes[piece].tobytes()
        assert again[1].tobytes() == scales[piece].tobytes()


def test_without_correlation_it_is_as_good_as_scale_search():
    weights = np.random.default_rng(2).standard_normal((200, COLUMNS)).astype(np.float32)
    importance = np.exp(np.random.default_rng(3).standard_normal(COLUMNS)).astype(np.float32)
    cost = np.diag(importance)
    ours, theirs = (costs(weights, SCHEMES["q4_0"], name, cost).sum() for name in ("hessian", "scale-search"))
    # The same candidates, then sweeps that never raise the cost; float32 sums differ by 1e-5.
    assert ours <= theirs * (1 + 1e-5)


def test_a_vector_stands_for_its_diagonal_matrix():
    weights = np.random.default_rng(4).standard_normal((64, COLUMNS)).astype(np.float32)
    importance = np.linspace(0.5, 2, COLUMNS, dtype=np.float32)
    by_vector = SOLVERS["hessian"](weights, SCHEMES["q4_0"], importance)
    by_matrix = SOLVERS["hessian"](weights, SCHEMES["q4_0"], np.diag(importance))
    assert all(np.array_equal(left, right) for left, right in zip(by_vector, by_matrix, strict=True))


def test_a_matrix_that_is_not_positive_definite_is_refused():
    cost = correlated_cost()
    cost[0, 0] = -1.0
    with pytest.raises(ValueError, match="not positive definite"):
        SOLVERS["hessian"](np.ones((2, COLUMNS), np.float32), SCHEMES["q4_0"], cost)


def test_half_rounds_as_ieee_binary16_does():
    random = np.random.default_rng(5)
    values = np.concatenate(
        [
            random.standard_normal(2000) * 10.0 ** random.uniform(-9, 5, 2000),
            np.arange(-40, 40) * 2.0**-25,  # around and between subnormals, ties included
            [0.0, 65504.0, -65504.0, 1.0 + 2.0**-11, 1.0 + 3 * 2.0**-11],
        ]
    )
    values = np.clip(values, -65504, 65504)
    assert np.array_equal([half(value) for value in values], values.astype(np.float16).astype(np.float64))
    assert (half(1e9), half(-1e9)) == (65504.0, -65504.0)
