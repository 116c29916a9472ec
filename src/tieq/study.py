"""What ``probe`` and ``compare`` share: a model opened, calibrated and run, and tables quantized for it in memory."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq import artifact, text
from tieq.calibrate import Statistics, measure, request
from tieq.encoding import round_trip
from tieq.errors import TieqError
from tieq.metrics import SequenceScore, summarize
from tieq.plan import make_plan
from tieq.prepare import Job, prepare
from tieq.probe import RoleRuns
from tieq.progress import counter, say, stage
from tieq.quantize import refuse_bad_rows
from tieq.recipe import Effort, Precision, Recipe, Sampling, SchemeName, recipe_for_bits
from tieq.records import Decision
from tieq.report.manifest import file_entries, versions
from tieq.sampled import (
    RANDOM_IDS,
    allowed_ids,
    calibrate_job,
    describe_sequences,
    make_sequences,
    sequence_length,
)
from tieq.source.reference import ReferenceModel, load_model
from tieq.source.role_runs import Table, role_tables

EVALUATION = Sampling(sequences=8, length=256)
# Another seed than the evaluation's, for a model without a tokenizer.
_CALIBRATION_SEED = 1


def table_bytes(decision: Decision) -> int:
    """Bytes of a quantized table, scales included."""
    return int(decision.rows * decision.columns * decision.bits_per_weight / 8)


@dataclasses.dataclass(frozen=True)
class Choice:
    """A scheme that a model's tables can have, and what was asked for to get it.

    Attributes:
        scheme: the scheme that is used.
        asked: bits and scheme names that lead to it.
        notes: one sentence for each that fell back.
        decision: how an export would quantize the (first) table.
    """

    scheme: str
    asked: tuple[str, ...]
    notes: tuple[str, ...]
    decision: Decision

    def nbytes(self) -> int:
        """Bytes of one table, scales included."""
        return table_bytes(self.decision)

    def to_json(self) -> dict[str, Any]:
        """What stands in ``probe.json`` and ``compare.json`` about the scheme."""
        return {
            "scheme": self.scheme,
            "asked": list(self.asked),
            "notes": list(self.notes),
            "solver": self.decision.solver,
            "bits_per_weight": self.decision.bits_per_weight,
            "table_bytes": self.nbytes(),
        }


@dataclasses.dataclass(frozen=True)
class Study:
    """A model with its float runs and calibration; ``lookup`` and ``logits`` are one array where the model is tied."""

    job: Job
    effort: Effort
    model: ReferenceModel
    runs: RoleRuns
    sequences: text.Sequences
    statistics: Statistics
    lookup: Table
    logits: Table
    facts: dict[str, Any]

    @property
    def tied(self) -> bool:
        """Whether one table plays both roles."""
        return self.job.graph.tied

    def quantized(self, decision: Decision, role: str, solver: str | None = None) -> Table:
        """Quantize a table for a role and decode it.

        Args:
            decision: scheme and solver.
            role: ``table`` (both roles), ``lookup`` or ``logits``: whose cost the solver weighs errors with.
            solver: another solver than the decision's, which then weighs nothing.
        """
        table = self.logits if role == "logits" else self.lookup
        if solver is not None:
            return round_trip(dataclasses.replace(decision, solver=solver), table, None)
        return round_trip(decision, table, self._importance(role))

    def _importance(self, role: str) -> NDArray[np.float32] | None:
        names = self.job.parts
        own = names.lookup if role == "lookup" else names.logits
        if self.effort == "quick":
            return None
        if self.effort == "best":
            return self.statistics.importance(own, role, names.logits)
        return dataclasses.replace(self.statistics, table=None).importance(own, role, names.logits)


def open_study(
    model: str,
    wishes: list[tuple[str, SchemeName]],
    effort: Effort,
    *,
    calibration: Iterable[str | Path],
    evaluation: list[Path] | None,
    calibrated: Sampling | None = None,
    evaluated: Sampling = EVALUATION,
    cache: bool = True,
) -> tuple[Study, list[Choice]]:
    """Open a model, calibrate it in full and run it over the evaluation text.

    Args:
        model: alias, hub id, folder or ``.gguf`` file.
        wishes: see :func:`wishes`.
        effort: how tables are quantized.
        calibration: text instead of the default one, see :func:`tieq.text.calibration_corpus`.
        evaluation: text files instead of the default evaluation text.
        calibrated: how much is calibrated on; None for what the effort wants.
        evaluated: how much is measured on.
        cache: take calibration from the user's cache, and keep it there.

    Raises:
        TieqError: on bad input, before the model is run.
    """
    calibration_text = text.calibration_corpus(calibration)
    evaluation_text = text.file_corpus(evaluation) if evaluation else text.default_corpus(text.EVALUATION)
    plain = Precision(scheme="f16")
    recipe = Recipe(effort=effort, table=plain, body=plain, calibration=calibrated)
    job = prepare(model, recipe, ("onnx",))
    sampling = recipe.calibration_sampling
    wanted = None
    if job.tokenizer is not None:
        length = sequence_length(job.source, sampling)
        wanted = request(calibration_text, job.tokenizer, job.graph.rows, sampling.sequences, length)
    choices = _choices(job, wishes, effort)
    for choice in choices:
        for note in choice.notes:
            say(f"note: {note}")
    with stage("reference model"):
        reference = load_model(job.source, tied=job.graph.tied, table=job.table)
    lookup, logits = role_tables(reference)
    refuse_bad_rows(job.parts.lookup, lookup)
    refuse_bad_rows(job.parts.logits, logits)
    sequences = make_sequences(job.source, job.tokenizer, job.graph.rows, evaluation_text, evaluated)
    if wanted is not None:
        found = calibrate_job(job, wanted, lambda: reference, full=True, cache=cache)
        statistics, learned = found.statistics, found.sequences
    else:
        learned = _random_sequences(job, sampling)
        statistics = measure(reference, learned, full=True)
    allowed = allowed_ids(job.tokenizer, job.graph.rows)
    with counter("reference", len(sequences.ids), "sequences") as advance:
        runs = RoleRuns(reference, sequences, allowed, advance)
    facts = {
        "model": {
            "model": job.model,
            "label": job.source.label,
            "origin": job.source.origin,
            "fingerprint": job.source.fingerprint(),
        },
        "tied": job.graph.tied,
        "rows": job.graph.rows,
        "columns": job.graph.columns,
        "scored_ids": int(allowed.sum()),
        "effort": effort,
        "calibration": describe_sequences(learned, calibration_text),
        "evaluation": describe_sequences(sequences, evaluation_text),
        "notes": list(job.graph.notes),
        "versions": versions("matplotlib", "numba"),
    }
    return Study(job, effort, reference, runs, sequences, statistics, lookup, logits, facts), choices


def _random_sequences(job: Job, sampling: Sampling) -> text.Sequences:
    shape = (sampling.sequences, sequence_length(job.source, sampling))
    ids = np.random.default_rng(_CALIBRATION_SEED).integers(0, job.graph.rows, shape)
    return text.Sequences(ids, (RANDOM_IDS,) * len(ids), False)


def wishes(bits: Iterable[int], schemes: Iterable[str] = ()) -> list[tuple[str, SchemeName]]:
    """What to try, as (what was asked for, scheme): bits mean what they mean for ``tieq export``.

    Raises:
        TieqError: for bits or a scheme that do not exist, or if nothing is asked for.
    """
    found = [(f"{width} bits", recipe_for_bits(width).table.scheme) for width in bits]
    known = typing.get_args(SchemeName)
    for name in schemes:
        if name not in known:
            raise TieqError(f"'{name}' is no scheme.", where="--scheme", todo=f"Use one of {', '.join(known)}.")
        found.append((name, typing.cast(SchemeName, name)))
    if not found:
        raise TieqError("no bits and no scheme are named.", todo="Name some, as in --bits 2,4,8.")
    return list(dict.fromkeys(found))


def choose(job: Job, scheme: SchemeName, effort: Effort) -> Decision:
    """How an export to GGUF, which holds every scheme, would quantize the (first) table.

    Raises:
        RefusedError: if the scheme needs importance weights that would not be there.
    """
    parts = dataclasses.replace(job.parts, body=())
    recipe = Recipe(effort=effort, table=Precision(scheme=scheme))
    plan = make_plan(parts, job.graph, recipe, ("gguf",), job.table, calibrated=job.tokenizer is not None)
    return plan.tables[0]


def _choices(job: Job, asked: list[tuple[str, SchemeName]], effort: Effort) -> list[Choice]:
    """One choice a scheme that is really used, from the fewest bits to the most."""
    found: dict[str, Choice] = {}
    for label, scheme in asked:
        decision = choose(job, scheme, effort)
        earlier = found.get(decision.scheme)
        fell = decision.scheme != scheme
        note = f"{label}: {decision.scheme}, {decision.bits_per_weight} bits/weight ({decision.reason})"
        found[decision.scheme] = Choice(
            decision.scheme,
            (*(earlier.asked if earlier else ()), label),
            (*(earlier.notes if earlier else ()), *((note,) if fell else ())),
            decision,
        )
    return sorted(found.values(), key=lambda choice: (choice.decision.bits_per_weight, choice.scheme))


def scores_by_domain(scores: list[SequenceScore], domains: tuple[str, ...]) -> dict[str, Any]:
    """The summary of all sequences, with that of each domain under ``by_domain``, as plain dictionaries."""
    each = {
        name: summarize([score for score, domain in zip(scores, domains, strict=True) if domain == name])
        for name in dict.fromkeys(domains)
    }
    return {
        **dataclasses.asdict(summarize(scores)),
        "by_domain": {name: dataclasses.asdict(found) for name, found in each.items()},
    }


def kl_by_sequence(scores: list[SequenceScore]) -> list[float]:
    """KL in nats per token of each sequence."""
    return [score.kl / score.positions for score in scores]


def write_study(
    out: Path, kind: str, document: dict[str, Any], pictures: Callable[[dict[str, Any], Path], None]
) -> None:
    """Put the document, its pictures and a manifest into an artifact folder, as a whole.

    Args:
        out: the folder; an earlier artifact of tieq's is replaced.
        kind: ``probe`` or ``compare``, which names the document.
        document: what was found.
        pictures: draws the document into a folder.
    """
    with artifact.staged(out) as folder:
        artifact.write_json(folder / f"{kind}.json", document)
        pictures(document, folder)
        manifest = {
            "format": artifact.FORMAT_VERSION,
            "kind": kind,
            "source": document["model"],
            "formats": [],
            "versions": document["versions"],
            "files": file_entries(folder),
        }
        artifact.write_json(folder / artifact.MANIFEST, manifest)
