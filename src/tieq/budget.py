"""Choose one way of storing each matrix so that the predicted KL is least under a size, or the size under a KL.

Costs add up over matrices and roles to second order, so the choice is a multiple-choice knapsack. A price on bytes
splits it into one small choice a matrix (Shoham and Gersho 1988); the price that meets the bound is found by bisection,
and what the bound leaves over is spent greedily.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

# Bisection steps on the logarithm of the price, and its range in nats per byte.
_STEPS = 80
_CHEAPEST, _DEAREST = 1e-16, 1e2
_FRONT_POINTS = 48


@dataclasses.dataclass(frozen=True)
class Budget:
    """The bound: bytes of the largest container, or KL in nats per token; None and None take the recipe as it is."""

    size: int | None = None
    kl: float | None = None


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to store a matrix.

    Attributes:
        label: what it is, as the plan prints it.
        nbytes: bytes in the container.
        costs: predicted KL in nats per token by role: ``lookup``, ``logits``, ``body``.
    """

    label: str
    nbytes: int
    costs: Mapping[str, float]

    def cost(self, factors: Mapping[str, float]) -> float:
        """Sum over the roles, each with its correction factor (1 where none is known)."""
        return sum(factors.get(role, 1.0) * value for role, value in self.costs.items())


@dataclasses.dataclass(frozen=True)
class Item:
    """A matrix and its candidates."""

    name: str
    candidates: tuple[Candidate, ...]


@dataclasses.dataclass(frozen=True)
class Selection:
    """One candidate a matrix: label by name, bytes and predicted KL of all together."""

    chosen: dict[str, Candidate]
    nbytes: int
    cost: float


def least_cost(items: Sequence[Item], limit: int, factors: Mapping[str, float]) -> Selection | None:
    """Least predicted KL with at most ``limit`` bytes, or None where nothing is that small."""
    found = _bisect(items, factors, lambda selection: selection.nbytes <= limit, dear=True)
    if found is None:
        return None
    return _spend(items, found, limit, factors)


def least_size(items: Sequence[Item], limit: float, factors: Mapping[str, float]) -> Selection | None:
    """Fewest bytes with a predicted KL of at most ``limit``, or None where nothing is that good."""
    best = _bisect(items, factors, lambda selection: selection.cost <= limit, dear=False)
    if best is None:
        return None
    return _save(items, best, limit, factors)


def front(items: Sequence[Item], factors: Mapping[str, float]) -> list[Selection]:
    """Selections that no other beats in both bytes and predicted KL, the smallest first."""
    ratio = (_DEAREST / _CHEAPEST) ** (1 / (_FRONT_POINTS - 1))
    found = {
        selection.nbytes: selection
        for selection in (_at_price(items, _CHEAPEST * ratio**step, factors) for step in range(_FRONT_POINTS))
    }
    return [found[nbytes] for nbytes in sorted(found)]


def _bisect(
    items: Sequence[Item], factors: Mapping[str, float], fits: Callable[[Selection], bool], *, dear: bool
) -> Selection | None:
    """The selection at the last price that fits, coming from the dear end of prices or from the cheap one."""
    best = _at_price(items, _DEAREST if dear else 0.0, factors)
    if not fits(best):
        return None
    low, high = _CHEAPEST, _DEAREST
    for _ in range(_STEPS):
        middle = (low * high) ** 0.5
        selection = _at_price(items, middle, factors)
        good = fits(selection)
        best = selection if good else best
        low, high = (low, middle) if good is dear else (middle, high)
    return best


def _at_price(items: Sequence[Item], price: float, factors: Mapping[str, float]) -> Selection:
    """Each matrix's best candidate when a byte costs ``price`` nats; of equals the smaller."""
    return _selection(
        {
            item.name: min(item.candidates, key=lambda c: (c.cost(factors) + price * c.nbytes, c.nbytes))
            for item in items
        },
        factors,
    )


def _selection(chosen: dict[str, Candidate], factors: Mapping[str, float]) -> Selection:
    return Selection(chosen, sum(c.nbytes for c in chosen.values()), sum(c.cost(factors) for c in chosen.values()))


def _spend(items: Sequence[Item], start: Selection, limit: int, factors: Mapping[str, float]) -> Selection:
    """Take the exchange with the largest gain a byte as long as one fits."""
    chosen, used = dict(start.chosen), start.nbytes
    while True:
        best: tuple[float, str, Candidate] | None = None
        for item in items:
            now = chosen[item.name]
            for candidate in item.candidates:
                more, gain = candidate.nbytes - now.nbytes, now.cost(factors) - candidate.cost(factors)
                if gain <= 0 or used + more > limit:
                    continue
                worth = gain / max(more, 1)
                if best is None or worth > best[0]:
                    best = (worth, item.name, candidate)
        if best is None:
            return _selection(chosen, factors)
        used += best[2].nbytes - chosen[best[1]].nbytes
        chosen[best[1]] = best[2]


def _save(items: Sequence[Item], start: Selection, limit: float, factors: Mapping[str, float]) -> Selection:
    """Take the exchange that saves most bytes a nat as long as the KL holds."""
    chosen, cost = dict(start.chosen), start.cost
    while True:
        best: tuple[float, str, Candidate] | None = None
        for item in items:
            now = chosen[item.name]
            for candidate in item.candidates:
                less, loss = now.nbytes - candidate.nbytes, candidate.cost(factors) - now.cost(factors)
                if less <= 0 or cost + loss > limit:
                    continue
                worth = less / max(loss, 1e-15)
                if best is None or worth > best[0]:
                    best = (worth, item.name, candidate)
        if best is None:
            return _selection(chosen, factors)
        cost += best[2].cost(factors) - chosen[best[1]].cost(factors)
        chosen[best[1]] = best[2]
