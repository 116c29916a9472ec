"""What each matrix would weigh and cost in each scheme that the containers hold, from a sample of its rows.

The sample is solved for real, so that a plan knows what the solver gains. For a table it is the most used rows, which
carry most of the cost, and evenly spaced ones of the rest; for a matrix of the body evenly spaced rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from tieq.budget import Candidate, Item
from tieq.calibrate import Statistics
from tieq.codecs import ggml
from tieq.codecs.schemes import SCHEMES, ggml_kind
from tieq.cost import expected_lookups, matrix_cost, row_costs
from tieq.encoding import round_trip
from tieq.plan import decide
from tieq.recipe import BandScheme, BandWish, Precision, Recipe, SchemeName
from tieq.records import Decision

# Schemes to choose from. Two bits are left to recipes where GGUF is written: few builds of llama.cpp read them.
_IN_ONNX: tuple[SchemeName, ...] = ("q2_0", "q4_0", "q8_0")
_IN_BOTH: tuple[SchemeName, ...] = ("q4_0", "q8_0")
_IN_GGUF: tuple[SchemeName, ...] = ("q3_k", "q4_0", "q4_k", "q4_1", "q5_0", "q5_k", "q5_1", "q6_k", "q8_0")
# Row bands to choose from: shares of the rows with residuals of four and of two bits.
_BANDS = ((0.005, 0.0), (0.01, 0.0), (0.02, 0.0), (0.04, 0.0), (0.08, 0.0), (0.01, 0.04), (0.02, 0.08), (0.0, 0.1))
_USED_SHARE, _MOST_USED, _OTHERS, _BODY_ROWS = 0.15, 16384, 1024, 96
Costs = Mapping[str, NDArray[np.float32]]


@dataclasses.dataclass(frozen=True)
class Choices:
    """A matrix as an item of the knapsack, and the precision that each label stands for."""

    item: Item
    precisions: dict[str, Precision]


def label_of(precision: Precision) -> str:
    """How a plan prints a precision: ``q4_0 + 2 % q4_0``."""
    return " + ".join([precision.scheme, *(f"{100 * band.share:g} % {band.scheme}" for band in precision.bands)])


def bytes_of(decision: Decision, formats: tuple[str, ...]) -> int:
    """Bytes of a matrix, bands included, in the container that needs most."""
    weights, in_onnx = decision.rows * decision.columns, bool({"onnx", "ort"} & set(formats))
    # GGUF repeats the scales of groups; what else there is takes as much in it as in the checkpoint.
    bits = ggml.bits_per_weight(ggml_kind(decision.scheme)) if "gguf" in formats else decision.bits_per_weight
    own = int(weights * bits / 8)
    return own + sum(band.onnx_bytes for band in decision.bands if in_onnx)


def table_choices(
    decision: Decision,
    weights: NDArray[np.float32],
    statistics: Statistics,
    importance: NDArray[np.float32] | None,
    recipe: Recipe,
    formats: tuple[str, ...],
) -> Choices:
    """Candidates for a vocabulary table, with row bands where ONNX is written and both roles share the table.

    Args:
        decision: of the table, as the recipe has it.
        weights: ``[rows, columns]``.
        statistics: of a full measurement.
        importance: what the solver will weigh errors of the table with.
        recipe: for its effort.
        formats: containers that will be written.
    """
    sample = _TableSample.of(statistics, decision.role)
    rows = weights[sample.rows]
    candidates: list[Candidate] = []
    precisions: dict[str, Precision] = {}

    def add(precision: Precision, costs: Costs) -> None:
        made = decide(decision, precision, recipe, formats)
        label = label_of(precision)
        candidates.append(Candidate(label, bytes_of(made, formats), sample.total(costs)))
        precisions[label] = precision

    banded = decision.role == "table" and bool({"onnx", "ort"} & set(formats)) and "litert" not in formats
    for scheme in _schemes(decision.columns, formats):
        made = decide(decision, Precision(scheme=scheme), recipe, formats)
        errors = rows - round_trip(made, rows, importance)
        costs = sample.costs(errors, statistics)
        add(Precision(scheme=scheme), costs)
        if not banded or scheme == "q8_0":
            continue
        refined = {
            residual: sample.costs(errors - _residual(made, residual, errors, importance), statistics)
            for residual in _residuals(decision.columns)
        }
        own = tuple((band.scheme, band.share) for band in recipe.table.bands)
        for bands, mixed in _banded(costs, refined, decision.rows, own):
            add(Precision(scheme=scheme, bands=bands), mixed)
    return Choices(Item(decision.name, tuple(candidates)), precisions)


def body_choices(
    decision: Decision,
    weights: NDArray[np.float32],
    statistics: Statistics,
    importance: NDArray[np.float32] | None,
    recipe: Recipe,
    formats: tuple[str, ...],
) -> Choices:
    """Candidates for a matrix of the body; arguments as for :func:`table_choices`."""
    rows = np.unique(np.linspace(0, decision.rows - 1, min(decision.rows, _BODY_ROWS)).astype(np.int64))
    picked = np.ascontiguousarray(weights[rows])
    inputs, gradients = statistics.second_moments.get(decision.name), statistics.gradients.get(decision.name)
    candidates, precisions = [], {}
    for scheme in _schemes(decision.columns, formats):
        precision = Precision(scheme=scheme)
        made = _one_by_one(decide(decision, precision, recipe, formats))
        cost = 0.0
        if inputs is not None and gradients is not None:
            errors = picked - round_trip(made, picked, importance)
            cost = float(matrix_cost(errors, inputs, gradients[rows]).sum()) * decision.rows / len(rows)
        label = label_of(precision)
        candidates.append(Candidate(label, bytes_of(made, formats), {"body": cost}))
        precisions[label] = precision
    return Choices(Item(decision.name, tuple(candidates)), precisions)


def _one_by_one(decision: Decision) -> Decision:
    """With the solver that weighs columns one by one, as the price does: the full cost has nothing to gain under it."""
    if decision.solver != "hessian":
        return decision
    return dataclasses.replace(decision, solver="scale-search" if decision.scheme in SCHEMES else "ggml")


@dataclasses.dataclass(frozen=True)
class _TableSample:
    """Rows of a table, the most used first, and how many rows each stands for."""

    rows: NDArray[np.int64]
    weights: NDArray[np.float64]
    roles: tuple[str, ...]

    @staticmethod
    def of(statistics: Statistics, role: str) -> _TableSample:
        assert statistics.rows is not None
        spread = statistics.rows.spread / statistics.rows.spread.sum()
        order = np.argsort(-(expected_lookups(statistics.rows) + spread), kind="stable")
        used = min(len(order), _MOST_USED, max(1, int(_USED_SHARE * len(order))))
        rest = order[used:]
        others = rest[np.unique(np.linspace(0, max(len(rest) - 1, 0), min(len(rest), _OTHERS)).astype(np.int64))]
        weights = np.concatenate([np.ones(used), np.full(len(others), len(rest) / max(len(others), 1))])
        roles = ("lookup", "logits") if role == "table" else (role,)
        return _TableSample(np.concatenate([order[:used], others]), weights, roles)

    def costs(self, errors: NDArray[np.float32], statistics: Statistics) -> Costs:
        lookup, logits = row_costs(errors, statistics, self.rows)
        return {role: values for role, values in (("lookup", lookup), ("logits", logits)) if role in self.roles}

    def total(self, costs: Costs) -> dict[str, float]:
        return {role: float(self.weights @ values) for role, values in costs.items()}


def _schemes(columns: int, formats: tuple[str, ...]) -> list[SchemeName]:
    # LiteRT's operators hold what ONNX's hold.
    onnx = bool({"onnx", "ort", "litert"} & set(formats))
    known = _IN_GGUF if not onnx else _IN_BOTH if "gguf" in formats else _IN_ONNX
    found = [s for s in known if columns % (SCHEMES[s].block if s in SCHEMES else ggml.block_size(s)) == 0]
    return found or ["f16"]


def _residuals(columns: int) -> list[BandScheme]:
    known: tuple[BandScheme, ...] = ("q4_0", "q2_0")
    return [scheme for scheme in known if columns % SCHEMES[scheme].block == 0]


def _residual(
    made: Decision, scheme: BandScheme, errors: NDArray[np.float32], importance: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    return round_trip(dataclasses.replace(made, scheme=scheme, bands=()), errors, importance)


def _banded(
    base: Costs, refined: Mapping[BandScheme, Costs], table_rows: int, own: tuple[tuple[BandScheme, float], ...]
) -> Iterator[tuple[tuple[BandWish, ...], Costs]]:
    """Bands of every offered kind and the recipe's own, and the costs of the sampled rows with them."""
    order = np.argsort(-sum(base.values()), kind="stable")
    schemes: tuple[BandScheme, BandScheme] = ("q4_0", "q2_0")
    offered = [tuple((s, share) for s, share in zip(schemes, shares, strict=True) if share) for shares in _BANDS]
    for kinds in dict.fromkeys([*offered, own]):
        mixed = {role: values.copy() for role, values in base.items()}
        start, wishes = 0, []
        for scheme, share in kinds:
            count = round(share * table_rows)
            if scheme not in refined or not count or start + count > len(order):
                break
            rows = order[start : start + count]
            for role, values in mixed.items():
                values[rows] = refined[scheme][role][rows]
            start += count
            wishes.append(BandWish(share=share, scheme=scheme))
        else:
            if wishes:
                yield tuple(wishes), mixed
