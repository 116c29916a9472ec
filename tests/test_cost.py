from __future__ import annotations

import numpy as np
import pytest
import tiny

from tieq.calibrate import Statistics, measure
from tieq.cost import expected_lookups, logits_cost, lookup_cost, row_costs
from tieq.metrics import log_softmax
from tieq.source.reference import ReferenceModel
from tieq.source.role_runs import hidden_states, logits_of
from tieq.text import Sequences

IDS = np.random.default_rng(0).integers(0, tiny.ROWS, (64, 32))


@pytest.fixture(scope="module")
def model() -> ReferenceModel:
    return ReferenceModel(tiny.model("llama"))


@pytest.fixture(scope="module")
def statistics(model: ReferenceModel) -> Statistics:
    return measure(model, Sequences(IDS, ("d",) * len(IDS), False), full=True)


@pytest.fixture(scope="module")
def table(model: ReferenceModel) -> np.ndarray:
    return model.module.get_input_embeddings().weight.detach().numpy()


def errors(table: np.ndarray, size: float = 0.003) -> np.ndarray:
    return size * np.random.default_rng(1).standard_normal(table.shape).astype(np.float32)


def kl(
    model: ReferenceModel, rows: np.ndarray, lookup: np.ndarray | None = None, logits: np.ndarray | None = None
) -> float:
    total = 0.0
    for row in rows:
        expected = log_softmax(model.logits(row))
        found = log_softmax(logits_of(model, hidden_states(model, row, lookup), logits))
        total += float((np.exp(expected) * (expected - found)).sum())
    return total / rows.size


def test_the_logits_cost_is_the_kl_of_small_errors(model, statistics, table) -> None:
    wrong = errors(table)
    sample = statistics.sample
    measured = kl(model, sample.ids.reshape(-1, IDS.shape[1]), logits=table - wrong)
    # The same positions, so what is left is the third order: logit errors of some 0.03.
    assert logits_cost(wrong, table, sample) == pytest.approx(measured, rel=0.05)


def test_the_lookup_cost_predicts_the_kl_within_its_sampling_error(model, statistics, table) -> None:
    wrong = errors(table)
    measured = kl(model, IDS, lookup=table - wrong)
    # One sampled target a position: each of 320 terms is a squared normal with a relative deviation of about 1.4 to 2,
    # hence up to 11 % at one sigma; errors that meet at one position through attention are left out, some 10 %.
    assert lookup_cost(wrong, statistics.sample) == pytest.approx(measured, rel=0.35)


def test_row_costs_add_up_to_the_prediction_for_errors_without_direction(statistics, table) -> None:
    wrong = errors(table)
    lookup, logits = row_costs(wrong, statistics)
    assert lookup.shape == logits.shape == (tiny.ROWS,)
    assert statistics.sample is not None
    # Errors that know nothing of the rows: averages over rows of 64 columns, some 10 %.
    assert float(lookup.sum()) == pytest.approx(lookup_cost(wrong, statistics.sample), rel=0.25)
    assert float(logits.sum()) == pytest.approx(logits_cost(wrong, table, statistics.sample), rel=0.25)


def test_a_rows_cost_follows_its_use_and_the_square_of_its_error(statistics, table) -> None:
    wrong = errors(table)
    once, twice = row_costs(wrong, statistics), row_costs(2 * wrong, statistics)
    for single, double in zip(once, twice, strict=True):
        assert np.allclose(double, 4 * single, rtol=1e-4)
    wrong[5] = 0
    assert row_costs(wrong, statistics)[0][5] == 0
    assert float(expected_lookups(statistics.rows).sum()) == pytest.approx(1, abs=1e-4)
