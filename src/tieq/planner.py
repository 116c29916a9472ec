"""Selects precisions within a budget among priced candidates, and says what was selected."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from tieq import artifact
from tieq.budget import Budget, Selection, front, least_cost, least_size
from tieq.candidates import Choices, bytes_of, label_of
from tieq.errors import TieqError
from tieq.plan import Plan, make_plan
from tieq.prepare import Job
from tieq.recipe import BandWish, Precision
from tieq.records import Decision
from tieq.report.manifest import versions

# What a container holds beside the matrices and float tensors: a graph's nodes for each matrix and for the rest.
_ONNX_NODES_PER_MATRIX, _ONNX_REST = 6_500, 30_000
_GGUF_PER_TENSOR = 96
# And the number of each row of the table, by which a LiteRT product looks it up.
_LITERT_PER_MATRIX, _LITERT_REST, _LITERT_PER_ROW = 2_200, 30_000, 4
# A runtime adds its own rounding of activations, and another text is a little dearer or cheaper.
_MARGIN = 0.9
_LEAST_COST = 1e-6  # nats per token, under which a ratio of costs says nothing


class Planner:
    """Selects under a budget, and says what was selected."""

    def __init__(self, job: Job, choices: dict[str, Choices], budget: Budget) -> None:
        self._job, self._choices, self._budget = job, choices, budget
        self._items = [choice.item for choice in choices.values()]
        self._fixed = _fixed_bytes(job)

    def select(self, factors: Mapping[str, float]) -> Selection:
        """The best selection within the budget.

        Raises:
            TieqError: if there is none.
        """
        if self._budget.size is not None:
            found = least_cost(self._items, self._budget.size - self._fixed, factors)
            if found is None:
                least = front(self._items, factors)[0].nbytes + self._fixed
                raise TieqError(
                    f"no plan is that small: the smallest has about {least / 1e6:.3g} MB.",
                    where=f"--target-size {self._budget.size / 1e6:g}MB",
                    todo="Allow more.",
                )
            return found
        if self._budget.kl is not None:
            found = least_size(self._items, _MARGIN * self._budget.kl, factors)
            if found is None:
                best = front(self._items, factors)[-1].cost
                raise TieqError(
                    f"no plan is predicted to be that good: the best reaches about {best:.2g}.",
                    where=f"--max-kl {self._budget.kl:g}",
                    todo="Allow more.",
                )
            return found
        return self._as_the_recipe(factors)

    def _as_the_recipe(self, factors: Mapping[str, float]) -> Selection:
        chosen = {}
        for decision in self._job.plan.decisions:
            item = self._choices[decision.name].item
            size, exact = bytes_of(decision, self._job.plan.formats), _label(decision)
            chosen[item.name] = min(
                item.candidates,
                key=lambda c: (c.label != exact, c.label.split(" ")[0] != decision.scheme, abs(c.nbytes - size)),
            )
        picked = chosen.values()
        return Selection(chosen, sum(c.nbytes for c in picked), sum(c.cost(factors) for c in picked))

    def plan_of(self, selection: Selection) -> Plan:
        """The plan that an export would follow."""
        job = self._job
        return make_plan(
            job.parts, job.graph, job.recipe, job.plan.formats, job.table, choices=self._precisions(selection)
        )

    def _precisions(self, selection: Selection) -> dict[str, Precision]:
        return {name: self._choices[name].precisions[c.label] for name, c in selection.chosen.items()}

    def factors(self, selection: Selection, measured: Mapping[str, float]) -> dict[str, float]:
        """Measured over predicted by role; roles that cost nothing keep one."""
        predicted = _by_role(selection)
        return {
            role: measured[role] / predicted[role] if min(measured[role], predicted[role]) > _LEAST_COST else 1.0
            for role in predicted
        }

    def document(
        self, selection: Selection, factors: Mapping[str, float], measured: Mapping[str, float]
    ) -> dict[str, Any]:
        """Plain dictionary for ``plan.json``."""
        job = self._job
        tables = [decision.name for decision in job.plan.tables]
        points = front(self._items, factors)
        return {
            "format": artifact.FORMAT_VERSION,
            "kind": "plan",
            "model": {"label": job.source.label, "origin": job.source.origin, "fingerprint": job.source.fingerprint()},
            "formats": list(job.plan.formats),
            "effort": job.recipe.effort,
            "budget": dataclasses.asdict(self._budget),
            "predicted": {
                "kl": selection.cost,
                "by_role": {r: v * factors.get(r, 1.0) for r, v in _by_role(selection).items()},
                "file_bytes": selection.nbytes + self._fixed,
                "fixed_bytes": self._fixed,
            },
            "measured": dict(measured),
            "factors": dict(factors),
            "choices": {n: p.model_dump(mode="json") for n, p in self._precisions(selection).items()},
            "tables": {name: self._table_rows(name, selection, factors) for name in tables},
            "split": self._split(factors),
            "body": _body_mix(selection, set(tables)),
            "front": [{"file_bytes": p.nbytes + self._fixed, "kl": p.cost, **self._labels(p)} for p in points],
            "versions": versions("numba"),
        }

    def _labels(self, point: Selection) -> dict[str, Any]:
        tables = [decision.name for decision in self._job.plan.tables]
        return {"table": " / ".join(point.chosen[name].label for name in tables), "body": _body_mix(point, set(tables))}

    def _table_rows(self, name: str, selection: Selection, factors: Mapping[str, float]) -> list[dict[str, Any]]:
        return [
            {
                "label": candidate.label,
                "bytes": candidate.nbytes,
                "costs": {role: factors.get(role, 1.0) * value for role, value in candidate.costs.items()},
                "chosen": candidate is selection.chosen[name],
            }
            for candidate in sorted(self._choices[name].item.candidates, key=lambda c: c.nbytes)
        ]

    def _split(self, factors: Mapping[str, float]) -> list[dict[str, Any]]:
        """What two tables of two schemes would weigh and cost; the shared table's own errors, each in one role."""
        if not self._job.graph.tied:
            return []
        plain = [c for c in self._choices[self._job.plan.tables[0].name].item.candidates if "+" not in c.label]
        return [
            {
                "lookup": first.label,
                "logits": second.label,
                "bytes": first.nbytes + second.nbytes,
                "cost": factors.get("lookup", 1.0) * first.costs["lookup"]
                + factors.get("logits", 1.0) * second.costs["logits"],
            }
            for first in plain
            for second in plain
            if first is not second
        ]


def _label(decision: Decision) -> str:
    bands = tuple(BandWish.model_validate({"share": band.share, "scheme": band.scheme}) for band in decision.bands)
    return label_of(Precision.model_validate({"scheme": decision.scheme, "bands": bands}))


def _by_role(selection: Selection) -> dict[str, float]:
    found: dict[str, float] = {}
    for candidate in selection.chosen.values():
        for role, value in candidate.costs.items():
            found[role] = found.get(role, 0.0) + value
    return found


def _body_mix(selection: Selection, tables: set[str]) -> dict[str, int]:
    """Matrices of the body by scheme."""
    found: dict[str, int] = {}
    for name, candidate in selection.chosen.items():
        if name not in tables:
            found[candidate.label] = found.get(candidate.label, 0) + 1
    return dict(sorted(found.items()))


def _fixed_bytes(job: Job) -> int:
    """Bytes of the largest container that no choice changes: float tensors, graph or metadata."""
    floats = sum(4 * int(np.prod(job.parts.shapes[name])) for name in job.floats)
    sizes = []
    if {"onnx", "ort"} & set(job.plan.formats):
        sizes.append(floats + _ONNX_REST + _ONNX_NODES_PER_MATRIX * len(job.plan.decisions))
    if "litert" in job.plan.formats:
        rest = _LITERT_REST + _LITERT_PER_ROW * job.graph.rows
        sizes.append(floats + rest + _LITERT_PER_MATRIX * len(job.plan.decisions))
    if job.layout is not None:
        metadata = sum(_encoded_bytes(entry.value) for entry in job.layout.metadata.values())
        sizes.append(floats + metadata + _GGUF_PER_TENSOR * len(job.parts.shapes))
    return max(sizes)


def _encoded_bytes(value: object) -> int:
    """About what a GGUF metadata value takes."""
    if isinstance(value, str):
        return 8 + len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, (list, tuple)):
        return 12 + sum(_encoded_bytes(item) if isinstance(item, (str, list, tuple)) else 4 for item in value)
    if isinstance(value, np.ndarray):
        return 12 + value.nbytes
    return 8
