"""``tieq probe``: what quantizing the vocabulary table costs in each of its roles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tieq import artifact
from tieq.metrics import SequenceScore, mean
from tieq.probe import (
    Bands,
    Case,
    RoleRuns,
    column_moments,
    frequency_bands,
    norm_effect,
    predict,
    thinned,
    top_column_share,
)
from tieq.progress import counter, say
from tieq.recipe import Effort, Sampling
from tieq.source.role_runs import Table
from tieq.study import (
    EVALUATION,
    Choice,
    Study,
    kl_by_sequence,
    open_study,
    scores_by_domain,
    wishes,
    write_study,
)

ROLES = ("lookup", "logits", "both")
# The logits role is predicted from this many calibration positions.
_PREDICTED_POSITIONS = 1024


def probe(
    model: str,
    bits: Iterable[int],
    schemes: Iterable[str] = (),
    *,
    effort: Effort = "standard",
    out: Path | None = None,
    calibration: Iterable[str | Path] = (),
    evaluation: list[Path] | None = None,
    calibrated: Sampling | None = None,
    evaluated: Sampling = EVALUATION,
    cache: bool = True,
) -> dict[str, Any]:
    """Quantize the table to each scheme and measure the float model with it, by role.

    Args:
        model: alias, hub id, folder or ``.gguf`` file.
        bits: widths, as for ``tieq export``.
        schemes: further schemes by name.
        effort: how the table is rounded, as for ``tieq export``.
        out: folder for ``probe.json`` and its pictures; None writes nothing.
        calibration: text instead of the default one, see :func:`tieq.text.calibration_corpus`.
        evaluation: text files instead of the default evaluation text.
        calibrated: how much is calibrated on; None for what the effort wants.
        evaluated: how much is measured on.
        cache: take calibration from the user's cache, and keep it there.

    Returns:
        The document that ``probe.json`` holds; KL and costs in nats per token.

    Raises:
        TieqError: on bad input, before the model is run.
    """
    asked = wishes(bits, schemes)
    if out is not None:
        artifact.check_target(out)
    study, choices = open_study(
        model,
        asked,
        effort,
        calibration=calibration,
        evaluation=evaluation,
        calibrated=calibrated,
        evaluated=evaluated,
        cache=cache,
    )
    bands = frequency_bands(study.statistics, study.sequences.ids)
    with counter("probe", 2 * len(choices) * len(study.sequences.ids), "passes") as advance:
        entries = [{**choice.to_json(), **_measure(study, choice, bands, advance)} for choice in choices]
    document = {
        "format": artifact.FORMAT_VERSION,
        "kind": "probe",
        **study.facts,
        "reference_perplexity": entries[0]["measured"]["both"]["reference_perplexity"],
        "norm": norm_effect(study.runs.before_norm, study.runs.hidden),
        "bands": bands.rows(),
        "schemes": entries,
    }
    if out is not None:
        from tieq.report.pictures import draw_probe

        write_study(out, "probe", document, draw_probe)
        say(f"written: {out}")
    return document


def _measure(study: Study, choice: Choice, bands: Bands, advance: Callable[[int], None]) -> dict[str, Any]:
    lookup, logits = _tables(study, choice)
    looked_up = study.runs.look_up(lookup, advance)
    cases = {"lookup": Case(looked_up), "logits": Case(None, logits), "both": Case(looked_up, logits)}
    scores = study.runs.score(cases, advance)
    measured = {role: scores_by_domain(scores[role], study.sequences.domains) for role in ROLES}
    assert study.statistics.sample is not None
    sample = study.statistics.sample
    predicted = predict(study.lookup, study.logits, lookup, logits, sample, thinned(sample, _PREDICTED_POSITIONS))
    predictions = {role: getattr(predicted, role) for role in ROLES}
    lookup_errors = study.lookup - lookup
    logits_errors = lookup_errors if logits is lookup else study.logits - logits
    return {
        "measured": measured,
        "interaction": dataclasses.asdict(mean(_interactions(scores))),
        "predicted": predictions,
        "predicted_over_measured": {role: _ratio(predictions[role], measured[role]["kl"]["value"]) for role in ROLES},
        "bands": bands.costs(lookup_errors, logits_errors, study.statistics),
        "residual_error": looked_up.residual_error.tolist(),
        "logits_cost_in_top_columns": _top_columns(study.runs, logits_errors),
    }


def _tables(study: Study, choice: Choice) -> tuple[Table, Table]:
    """The quantized tables by role: one and the same where the model is tied."""
    if study.tied:
        table = study.quantized(choice.decision, "table")
        return table, table
    return study.quantized(choice.decision, "lookup"), study.quantized(choice.decision, "logits")


def _interactions(scores: dict[str, list[SequenceScore]]) -> list[float]:
    """What both roles cost together beyond the sum of each alone, by sequence."""
    lookup, logits, both = (kl_by_sequence(scores[role]) for role in ROLES)
    return [together - (first + second) for first, second, together in zip(lookup, logits, both, strict=True)]


def _ratio(predicted: float, measured: float) -> float | None:
    return predicted / measured if measured > 0 else None


def _top_columns(runs: RoleRuns, errors: Table) -> dict[str, float]:
    """Share of the logits role's cost in the dearest 1 % of columns, by the states before and after the norm's gain."""
    squares = np.square(errors, dtype=np.float64).mean(axis=0)
    return {
        "before_norm": top_column_share(column_moments(runs.before_norm, equal_tokens=True) * squares),
        "after_norm": top_column_share(column_moments(runs.hidden, equal_tokens=False) * squares),
    }
