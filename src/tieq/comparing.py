"""``tieq compare``: what sharing one quantized table costs against two tables, each solved for its own role."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tieq import artifact
from tieq.codecs import ggml
from tieq.codecs.schemes import SCHEMES
from tieq.metrics import Estimate, SequenceScore, mean
from tieq.probe import Case, LookedUp
from tieq.progress import counter, say
from tieq.recipe import BITS, Effort, Sampling
from tieq.records import Decision
from tieq.study import (
    EVALUATION,
    Choice,
    Study,
    choose,
    kl_by_sequence,
    open_study,
    scores_by_domain,
    table_bytes,
    wishes,
    write_study,
)

Scores = list[SequenceScore]
Advance = Callable[[int], None]


def compare(
    model: str,
    bits: Iterable[int],
    *,
    effort: Effort = "best",
    out: Path | None = None,
    calibration: Iterable[str | Path] = (),
    evaluation: list[Path] | None = None,
    calibrated: Sampling | None = None,
    evaluated: Sampling = EVALUATION,
    cache: bool = True,
) -> dict[str, Any]:
    """Measure one shared table against two, at equal bits and at equal bytes, and against naive rounding.

    A model that is really untied has no shared table; then its two tables are measured, and in float what each of
    them costs in the other's role.

    Args:
        model: alias, hub id, folder or ``.gguf`` file.
        bits: widths, as for ``tieq export``.
        effort: how tables are rounded, as for ``tieq export``.
        out: folder for ``compare.json`` and its picture; None writes nothing.
        calibration: text instead of the default one, see :func:`tieq.text.calibration_corpus`.
        evaluation: text files instead of the default evaluation text.
        calibrated: how much is calibrated on; None for what the effort wants.
        evaluated: how much is measured on.
        cache: take calibration from the user's cache, and keep it there.

    Returns:
        The document that ``compare.json`` holds; KL in nats per token.

    Raises:
        TieqError: on bad input, before the model is run.
    """
    asked = wishes(bits)
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
    document = {
        "format": artifact.FORMAT_VERSION,
        "kind": "compare",
        **study.facts,
        "float": None if study.tied else _float_ties(study),
        "schemes": _compare_tied(study, choices) if study.tied else _compare_untied(study, choices),
    }
    if out is not None:
        from tieq.report.pictures import draw_compare

        write_study(out, "compare", document, draw_compare)
        say(f"written: {out}")
    return document


def _compare_tied(study: Study, choices: list[Choice]) -> list[dict[str, Any]]:
    candidates = {found.scheme: found for found in (choose(study.job, name, study.effort) for name in BITS.values())}
    candidates |= {choice.scheme: choice.decision for choice in choices}
    pairs = {choice.scheme: _pairs(choice.decision, candidates.values()) for choice in choices}
    wanted = {(choice.scheme, choice.scheme) for choice in choices} | {p for found in pairs.values() for p in found}
    lookups, heads = ({pair[side] for pair in wanted} for side in (0, 1))
    sequences = len(study.sequences.ids)
    total = sequences * (len(lookups) + len(heads) + sum(3 if _is_plain(choice) else 2 for choice in choices))
    with counter("compare", total, "passes") as advance:
        untied = _solved_by_role(study, candidates, wanted, advance)
        entries = []
        for choice in choices:
            shared, naive = _shared_and_naive(study, choice, advance)
            best = min(pairs[choice.scheme], key=lambda pair: _kl(untied[pair]), default=None)
            made = _entry(study, choice, shared, untied[choice.scheme, choice.scheme], naive)
            if best is not None:
                made["untied_same_bytes"] = {
                    "lookup": best[0],
                    "logits": best[1],
                    "bytes": sum(table_bytes(candidates[name]) for name in best),
                    **scores_by_domain(untied[best], study.sequences.domains),
                }
                made["same_bytes_tax"] = dataclasses.asdict(_paired(untied[best], shared))
            entries.append({**made, "verdict": _verdict(made)})
    return entries


def _pairs(shared: Decision, candidates: Iterable[Decision]) -> list[tuple[str, str]]:
    """Schemes (lookup, logits) that together fit into the shared table's bytes, with no room for a larger one."""
    sizes = {found.scheme: table_bytes(found) for found in candidates}
    limit = table_bytes(shared)
    fitting = [(a, b) for a in sizes for b in sizes if sizes[a] + sizes[b] <= limit]
    return [
        (a, b)
        for a, b in fitting
        if not any((c == a and sizes[d] > sizes[b]) or (d == b and sizes[c] > sizes[a]) for c, d in fitting)
    ]


def _solved_by_role(
    study: Study, candidates: dict[str, Decision], wanted: set[tuple[str, str]], advance: Advance
) -> dict[tuple[str, str], Scores]:
    """Scores of every wanted (lookup, logits) pair of schemes, each table solved for its own role."""
    looked_up: dict[str, LookedUp] = {}
    for name in sorted({pair[0] for pair in wanted}):
        looked_up[name] = study.runs.look_up(study.quantized(candidates[name], "lookup"), advance)
    found: dict[tuple[str, str], Scores] = {}
    for name in sorted({pair[1] for pair in wanted}):
        head = study.quantized(candidates[name], "logits")
        firsts = sorted(pair[0] for pair in wanted if pair[1] == name)
        scores = study.runs.score({first: Case(looked_up[first], head) for first in firsts}, advance)
        found |= {(first, name): scores[first] for first in firsts}
    return found


def _shared_and_naive(study: Study, choice: Choice, advance: Advance) -> tuple[Scores, Scores | None]:
    table = study.quantized(choice.decision, "table")
    cases = {"shared": Case(study.runs.look_up(table, advance), table)}
    if _is_plain(choice):
        plain = study.quantized(choice.decision, "table", "nearest")
        cases["naive"] = Case(study.runs.look_up(plain, advance), plain)
    scores = study.runs.score(cases, advance)
    return scores["shared"], scores.get("naive")


def _is_plain(choice: Choice) -> bool:
    """Whether the scheme can be rounded to without importance weights."""
    return choice.scheme in SCHEMES or not ggml.requires_importance(choice.scheme)


def _compare_untied(study: Study, choices: list[Choice]) -> list[dict[str, Any]]:
    entries = []
    passes = sum(3 if _is_plain(choice) else 2 for choice in choices)
    with counter("compare", passes * len(study.sequences.ids), "passes") as advance:
        for choice in choices:
            cases = {"untied": _pair_case(study, choice, None, advance)}
            if _is_plain(choice):
                cases["naive"] = _pair_case(study, choice, "nearest", advance)
            scores = study.runs.score(cases, advance)
            made = _entry(study, choice, None, scores["untied"], scores.get("naive"))
            entries.append({**made, "verdict": _verdict(made)})
    return entries


def _pair_case(study: Study, choice: Choice, solver: str | None, advance: Advance) -> Case:
    looked_up = study.runs.look_up(study.quantized(choice.decision, "lookup", solver), advance)
    return Case(looked_up, study.quantized(choice.decision, "logits", solver))


def _float_ties(study: Study) -> dict[str, Any]:
    """What tying would do to an untied model without any quantization."""
    middle = ((study.lookup + study.logits) * np.float32(0.5)).astype(np.float32)
    with counter("tie in float", 3 * len(study.sequences.ids), "passes") as advance:
        cases = {
            "lookup_table_for_both": Case(None, study.lookup),
            "logits_table_for_both": Case(study.runs.look_up(study.logits, advance), None),
            "mean_of_both": Case(study.runs.look_up(middle, advance), middle),
        }
        scores = study.runs.score(cases, advance)
    return {name: scores_by_domain(found, study.sequences.domains) for name, found in scores.items()}


def _entry(study: Study, choice: Choice, shared: Scores | None, untied: Scores, naive: Scores | None) -> dict[str, Any]:
    """One width; what a model or scheme has not is None."""

    def described(scores: Scores | None, tables: int) -> dict[str, Any] | None:
        if scores is None:
            return None
        return {"bytes": tables * choice.nbytes(), **scores_by_domain(scores, study.sequences.domains)}

    return {
        **choice.to_json(),
        "shared": described(shared, 1),
        "untied": described(untied, 2),
        "naive": described(naive, 1 if study.tied else 2),
        "untied_same_bytes": None,
        "tie_tax": None if shared is None else dataclasses.asdict(_paired(shared, untied)),
        "same_bytes_tax": None,
        "bytes_saved": choice.nbytes() if study.tied else None,
    }


def _paired(first: Scores, second: Scores) -> Estimate:
    """KL of the first minus KL of the second, nats per token, paired over sequences."""
    return mean([a - b for a, b in zip(kl_by_sequence(first), kl_by_sequence(second), strict=True)])


def _kl(scores: Scores) -> float:
    return mean(kl_by_sequence(scores)).value


def _verdict(entry: dict[str, Any]) -> str:
    """One sentence on one width."""
    label = f"{entry['scheme']}, {entry['bits_per_weight']:.4g} bits/weight"
    if entry["shared"] is None:
        return f"{label}: the model is untied; its two tables lose {entry['untied']['kl']['value']:.4g} nats per token."
    tax, saved = entry["tie_tax"], f"{entry['bytes_saved'] / 1e6:.2f} MB"
    said = f"{label}: sharing the table {_against(tax, 'two tables of its size')} and saves {saved}"
    if entry["untied_same_bytes"] is None:
        return f"{said}; no two tables fit into its bytes."
    pair = entry["untied_same_bytes"]
    two = f"two tables in its bytes ({pair['lookup']} for the lookup, {pair['logits']} for the logits)"
    return f"{said}; {two} {_against(entry['same_bytes_tax'], 'it', several=True)}."


def _against(difference: dict[str, Any], other: str, *, several: bool = False) -> str:
    value, error = difference["value"], difference["standard_error"]
    size = f"{abs(value):.4g}" + ("" if error is None else f" +- {error:.2g}") + " nats per token"
    lose, gain = ("lose", "gain") if several else ("loses", "gains")
    if error is not None and abs(value) <= 2 * error:
        return f"{lose} nothing measurable against {other} ({value:+.4g} +- {error:.2g} nats per token)"
    return f"{lose if value > 0 else gain} {size} against {other}"
