from __future__ import annotations

import numpy as np
import pytest

from tieq.calibrate import RowUse, Statistics, TableCost, TokenSample
from tieq.cost import row_costs
from tieq.probe import frequency_bands, thinned

ROWS, COLUMNS = 1000, 8


def statistics() -> Statistics:
    random = np.random.default_rng(0)
    use = (1 / np.arange(1, ROWS + 1)).astype(np.float32)
    use = random.permutation(use / use.sum())
    factor = random.standard_normal((COLUMNS, COLUMNS)).astype(np.float32)
    cost = TableCost(factor @ factor.T, np.eye(COLUMNS, dtype=np.float32))
    return Statistics({}, 1, cost, RowUse(use, use, use))


def test_rows_are_cut_from_the_most_to_the_least_frequent() -> None:
    measured = statistics()
    assert measured.rows is not None
    ids = np.random.default_rng(1).integers(0, ROWS, (4, 100))
    bands = frequency_bands(measured, ids)
    assert [len(rows) for rows in bands.members] == [1, 9, 40, 150, 800]
    assert sorted(np.concatenate(bands.members).tolist()) == list(range(ROWS))
    use = measured.rows.lookups
    for earlier, later in zip(bands.members, bands.members[1:], strict=False):
        assert use[earlier].min() >= use[later].max()
    assert sum(bands.expected) == pytest.approx(1, abs=1e-5)
    assert sum(bands.tokens) == pytest.approx(1, abs=1e-12)
    first = bands.members[0][0]
    assert bands.tokens[0] == np.count_nonzero(ids == first) / ids.size


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_a_table_with_fewer_rows_than_bands_has_empty_bands(rows: int) -> None:
    use = np.full(rows, 1 / rows, np.float32)
    bands = frequency_bands(Statistics({}, 1, None, RowUse(use, use, use)), np.zeros((1, 4), np.int64))
    assert sum(len(members) for members in bands.members) == rows
    assert bands.tokens[0] == 1.0


def test_costs_add_up_to_those_of_all_rows_and_each_role_has_its_own_errors() -> None:
    measured = statistics()
    bands = frequency_bands(measured, np.zeros((1, 4), np.int64))
    random = np.random.default_rng(2)
    first, second = (random.standard_normal((ROWS, COLUMNS)).astype(np.float32) for _ in range(2))
    same, apart = bands.costs(first, first, measured), bands.costs(first, second, measured)
    # float32 sums of a thousand rows against float64 ones.
    assert sum(same["lookup"]) == pytest.approx(float(row_costs(first, measured)[0].sum()), rel=1e-4)
    assert sum(same["logits"]) == pytest.approx(float(row_costs(first, measured)[1].sum()), rel=1e-4)
    assert apart["lookup"] == same["lookup"]
    assert sum(apart["logits"]) == pytest.approx(float(row_costs(second, measured)[1].sum()), rel=1e-4)


def test_a_thinned_sample_keeps_rows_together_and_spreads_over_the_whole() -> None:
    ids = np.arange(100)
    values = np.repeat(ids[:, None], 3, axis=1).astype(np.float32)
    found = thinned(TokenSample(ids, values, -values), 8)
    assert found.ids.tolist() == [0, 12, 25, 37, 50, 62, 75, 87]
    assert np.array_equal(found.hidden[:, 0], found.ids)
    assert np.array_equal(found.gradient[:, 2], -found.ids)
    whole = TokenSample(ids, values, values)
    assert thinned(whole, 100) is whole
