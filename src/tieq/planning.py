"""``tieq plan``: which precision for the table and which for each matrix, for a size or a quality that the user names.

Candidates are priced to second order from calibration alone; then the chosen plan is quantized and measured in the
float model by role, and the choice is made again with each role's prices multiplied by what the measurement found.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tieq import artifact, text
from tieq.budget import Budget, Selection, front, least_cost, least_size
from tieq.calibrate import Statistics
from tieq.candidates import Choices, body_choices, bytes_of, table_choices
from tieq.errors import RefusedError, TieqError
from tieq.pipeline import (
    BODY_TOKENS,
    allowed_ids,
    calibrate_job,
    calibration_request,
    describe_sequences,
    make_sequences,
)
from tieq.plan import Plan, make_plan
from tieq.prepare import Job, prepare
from tieq.probe import whole_costs
from tieq.progress import counter, say, stage
from tieq.quantize import BodyRun, QuantizedCheckpoint, quantize
from tieq.recipe import Precision, Recipe
from tieq.report.manifest import versions
from tieq.source.reference import ReferenceModel, load_model
from tieq.study import write_study
from tieq.text import Sequences

# What a container holds beside the matrices and float tensors: a graph's nodes for each matrix and for the rest.
_ONNX_NODES_PER_MATRIX, _ONNX_REST = 9_000, 200_000
_GGUF_PER_TENSOR = 96


def plan(
    model: str,
    recipe: Recipe,
    budget: Budget,
    formats: tuple[str, ...] | None = None,
    *,
    out: Path | None = None,
    tie: bool | None = None,
    calibration: Iterable[str | Path] = (),
    evaluation: list[Path] | None = None,
    cache: bool = True,
    measured: bool = True,
) -> dict[str, Any]:
    """Choose the precision of every matrix.

    Args:
        model: alias, hub id, folder or ``.gguf`` file.
        recipe: effort and sampling, and the precisions where there is no budget.
        budget: the bound.
        formats: containers that will be written.
        out: folder for ``plan.json`` and its picture; None writes nothing.
        tie: see :func:`tieq.source.tie.tie_graph`.
        calibration: text instead of the default calibration text.
        evaluation: text files instead of the default evaluation text.
        cache: take calibration from the user's cache, and keep it there.
        measured: quantize and measure the choice in the float model, and correct it.

    Returns:
        The document that ``plan.json`` holds; ``choices`` is what :func:`tieq.pipeline.export` takes.

    Raises:
        TieqError: on bad input, or if no plan meets the bound; the message names the nearest.
    """
    if out is not None:
        artifact.check_target(out)
    calibration_text = text.calibration_corpus(calibration)
    evaluation_text = text.file_corpus(evaluation) if evaluation else text.default_corpus(text.EVALUATION)
    job = prepare(model, recipe, formats, tie=tie)
    wanted = calibration_request(job, calibration_text)
    if wanted is None:
        raise RefusedError(
            "a plan needs calibration, which this effort or a model without a tokenizer leaves out.",
            where=job.model,
            todo="Use `--effort standard` or `best`.",
        )
    with stage("reference model"):
        reference = load_model(job.source, tied=job.graph.tied, table=job.table)
    found = calibrate_job(job, wanted, lambda: reference, full=True, cache=cache)
    if found.statistics.table is None:
        raise RefusedError("calibration found no cost of the table to plan with.", where=job.model)
    choices = _candidates(job, found.statistics)
    planner = _Planner(job, choices, budget)
    selection = planner.select({})
    factors: dict[str, float] = {}
    costs: dict[str, float] = {}
    if measured:
        evaluated = make_sequences(job.source, job.tokenizer, job.graph.rows, evaluation_text, recipe.evaluation)
        body = BodyRun(reference, found.sequences.spread(BODY_TOKENS)) if recipe.effort == "best" else None
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "quantized.safetensors"
            made = planner.plan_of(selection)
            quantize(job.source, made, job.floats, path, found.statistics, job.parts.logits, body)
            with stage("measuring the plan in the float model"):
                costs = _measured(job, reference, QuantizedCheckpoint(path), made, evaluated)
        factors = planner.factors(selection, costs)
        selection = planner.select(factors)
    document = planner.document(selection, factors, costs)
    document |= {
        "calibration": describe_sequences(found.sequences, calibration_text),
        "evaluation": describe_sequences(evaluated, evaluation_text) if measured else None,
    }
    if out is not None:
        from tieq.report.pictures import draw_plan

        write_study(out, "plan", document, draw_plan)
        say(f"written: {out}")
    return document


def export_choices(
    model: str,
    recipe: Recipe,
    budget: Budget,
    plan_file: Path | None,
    out: Path,
    formats: tuple[str, ...] | None,
    *,
    tie: bool | None,
    calibration: Iterable[str | Path],
    evaluation: list[Path] | None,
    cache: bool,
) -> dict[str, Precision] | None:
    """What an export follows beyond its recipe: a plan file, a plan made for its budget, or nothing (None).

    A bound on KL is worth a measurement of the plan before it is followed; under a size the order of the prices
    decides, and the export measures what comes out.
    """
    if plan_file is not None:
        return read_choices(plan_file)
    if budget == Budget():
        return None
    artifact.check_target(out)
    document = plan(
        model,
        recipe,
        budget,
        formats,
        tie=tie,
        calibration=calibration,
        evaluation=evaluation,
        cache=cache,
        measured=budget.kl is not None,
    )
    say(f"plan: {_sentence(document)}")
    return _precisions(document["choices"])


def _sentence(document: dict[str, Any]) -> str:
    chosen = [row["label"] for rows in document["tables"].values() for row in rows if row["chosen"]]
    body = ", ".join(f"{count} x {scheme}" for scheme, count in document["body"].items())
    size = document["predicted"]["file_bytes"] / 1e6
    return (
        f"table {' / '.join(chosen)}; body {body}; about {size:.1f} MB, predicted KL {document['predicted']['kl']:.3g}"
    )


def read_choices(path: Path) -> dict[str, Precision]:
    """The choices of a ``plan.json``.

    Raises:
        TieqError: if the file is none.
    """
    try:
        return _precisions(json.loads(path.read_text(encoding="utf-8"))["choices"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TieqError(f"is no plan of `tieq plan` ({error}).", where=str(path)) from error


def _precisions(chosen: dict[str, Any]) -> dict[str, Precision]:
    return {name: Precision.model_validate(precision) for name, precision in chosen.items()}


def _candidates(job: Job, statistics: Statistics) -> dict[str, Choices]:
    found: dict[str, Choices] = {}
    with counter("candidates", len(job.plan.decisions), "matrices") as advance:
        for decision in job.plan.decisions:
            values = job.source.read(decision.stored)
            weights = np.ascontiguousarray(values.T if decision.transposed else values)
            importance = statistics.importance(decision.name, decision.role, job.parts.logits)
            make = body_choices if decision.role == "body" else table_choices
            found[decision.name] = make(decision, weights, statistics, importance, job.recipe, job.plan.formats)
            advance(1)
    return found


def _measured(
    job: Job, reference: ReferenceModel, checkpoint: QuantizedCheckpoint, made: Plan, sequences: Sequences
) -> dict[str, float]:
    tables = [checkpoint.refined(decision.name) for decision in made.tables]
    body = (
        (decision.name, decision.transposed, checkpoint.decode(decision.name))
        for decision in made.decisions
        if decision.role == "body"
    )
    allowed = allowed_ids(job.tokenizer, job.graph.rows)
    return whole_costs(reference, tables[0], tables[-1], body, sequences, allowed)


class _Planner:
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
                    f"no plan is that small: the smallest has about {least / 1e6:.1f} MB.",
                    where=f"--target-size {self._budget.size / 1e6:g}MB",
                    todo="Allow more, or write fewer containers: ONNX alone may use 2 bits.",
                )
            return found
        if self._budget.kl is not None:
            found = least_size(self._items, self._budget.kl, factors)
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
            size = bytes_of(decision, self._job.plan.formats)
            chosen[item.name] = min(
                item.candidates, key=lambda c: (c.label.split(" ")[0] != decision.scheme, abs(c.nbytes - size))
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
        floor = 1e-6
        return {
            role: measured[role] / predicted[role] if min(measured[role], predicted[role]) > floor else 1.0
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
