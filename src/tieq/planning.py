"""``tieq plan``: which precision for the table and which for each matrix, for a size or a quality that the user names.

Candidates are priced to second order from calibration alone; then the chosen plan is quantized and measured in the
float model by role, and the choice is made again with each role's prices multiplied by what the measurement found.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tieq import artifact, text
from tieq.budget import Budget
from tieq.calibrate import Statistics
from tieq.candidates import Choices, body_choices, table_choices
from tieq.errors import RefusedError, TieqError
from tieq.pipeline import BODY_TOKENS
from tieq.plan import Plan
from tieq.planner import Planner
from tieq.prepare import Job, prepare
from tieq.probe import whole_costs
from tieq.progress import counter, say, stage
from tieq.quantize import BodyRun, QuantizedCheckpoint, quantize
from tieq.recipe import Precision, Recipe, Sampling
from tieq.sampled import (
    allowed_ids,
    calibrate_job,
    calibration_request,
    describe_sequences,
    make_sequences,
)
from tieq.source.locate import open_source
from tieq.source.reference import ReferenceModel, load_model
from tieq.study import write_study
from tieq.text import Sequences


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
    planner = Planner(job, choices, budget)
    selection = planner.select({})
    factors: dict[str, float] = {}
    costs: dict[str, float] = {}
    if measured:
        evaluated = make_sequences(
            job.source, job.tokenizer, job.graph.rows, evaluation_text, recipe.evaluation or Sampling()
        )
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
        return read_choices(plan_file, model)
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


def read_choices(path: Path, model: str | None = None) -> dict[str, Precision]:
    """The choices of a ``plan.json``.

    Args:
        path: the file that ``tieq plan`` wrote.
        model: what it is to be used for; it has to have the weights that the plan was made for.

    Raises:
        TieqError: if the file is no plan, or one for another model.
    """
    document = read_plan(path)
    if model is not None and open_source(model).fingerprint() != document["model"]["fingerprint"]:
        raise TieqError("was made for other weights.", where=str(path), todo=f"Run `tieq plan {model}` again.")
    return _precisions(document["choices"])


def read_plan(path: Path) -> dict[str, Any]:
    """A ``plan.json`` that ``tieq plan`` wrote.

    Raises:
        TieqError: if the file is none.
    """
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        chosen = _precisions(document["choices"])
        complete = bool(chosen) and {"model", "formats", "budget"} <= set(document)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        complete = False
    if not complete:
        raise TieqError(
            "is no plan of `tieq plan`, or a damaged one.", where=str(path), todo="Give its plan.json, or plan again."
        )
    return document


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
