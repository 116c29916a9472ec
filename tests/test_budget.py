from __future__ import annotations

import itertools

import numpy as np
import pytest

from tieq.budget import Candidate, Item, front, least_cost, least_size

ONE: dict[str, float] = {}


def items(seed: int, count: int = 5) -> list[Item]:
    """Matrices whose cost falls with their bits, each in its own way."""
    random = np.random.default_rng(seed)
    made = []
    for number in range(count):
        weights, hurt = int(random.integers(50, 500)), float(random.lognormal(-4, 1))
        made.append(
            Item(
                f"m{number}",
                tuple(
                    Candidate(f"{bits} bits", weights * bits, {"body": hurt * 4.0 ** (2 - bits)})
                    for bits in (2, 4, 5, 8)
                ),
            )
        )
    return made


def every_choice(given: list[Item]) -> list[tuple[int, float]]:
    picks = itertools.product(*(item.candidates for item in given))
    return [(sum(c.nbytes for c in pick), sum(c.cost(ONE) for c in pick)) for pick in picks]


@pytest.mark.parametrize("seed", range(6))
def test_the_least_cost_is_near_the_best_of_all_choices(seed: int) -> None:
    given = items(seed)
    all_choices = every_choice(given)
    sizes = sorted(size for size, _ in all_choices)
    for limit in (sizes[len(sizes) // 4], sizes[len(sizes) // 2], sizes[-2]):
        found = least_cost(given, limit, ONE)
        assert found is not None
        assert found.nbytes <= limit
        best = min(cost for size, cost in all_choices if size <= limit)
        # A relaxation: at worst one exchange away from the optimum, which with five matrices can be much of it.
        spare = max(c.cost(ONE) for item in given for c in item.candidates)
        assert best <= found.cost + 1e-12
        assert found.cost <= best + spare


@pytest.mark.parametrize("seed", range(6))
def test_the_least_size_keeps_the_bound_and_no_single_exchange_saves_more(seed: int) -> None:
    given = items(seed)
    costs = sorted(cost for _, cost in every_choice(given))
    limit = costs[len(costs) // 3]
    found = least_size(given, limit, ONE)
    assert found is not None
    assert found.cost <= limit + 1e-12
    for item in given:
        for candidate in item.candidates:
            other = found.cost - found.chosen[item.name].cost(ONE) + candidate.cost(ONE)
            assert candidate.nbytes >= found.chosen[item.name].nbytes or other > limit


def test_what_cannot_be_had_is_none() -> None:
    given = items(0)
    assert least_cost(given, 10, ONE) is None
    assert least_size(given, 0.0, ONE) is None


def test_the_front_falls() -> None:
    points = front(items(1, 30), ONE)
    assert len(points) > 5
    for left, right in itertools.pairwise(points):
        assert left.nbytes < right.nbytes
        assert left.cost > right.cost


def test_a_factor_moves_the_choice_to_the_role_that_it_weighs() -> None:
    table = Item("table", (Candidate("4", 400, {"logits": 0.02}), Candidate("8", 800, {"logits": 0.0})))
    body = Item("body", (Candidate("4", 400, {"body": 0.03}), Candidate("8", 800, {"body": 0.0})))
    plain = least_cost([table, body], 1200, ONE)
    moved = least_cost([table, body], 1200, {"logits": 4.0})
    assert plain is not None
    assert moved is not None
    assert (plain.chosen["table"].label, plain.chosen["body"].label) == ("4", "8")
    assert (moved.chosen["table"].label, moved.chosen["body"].label) == ("8", "4")
    assert moved.cost == pytest.approx(0.03)
