"""Against an earlier manifest: which number became worse by more than its noise."""

from __future__ import annotations

import math
from typing import Any

from tieq.errors import TieqError
from tieq.records import Check

# Standard errors of a difference that noise alone exceeds once in about twenty runs.
_ERRORS = 2.0
# A tool's version in the metadata moves a file by a few bytes.
_GROWTH = 1.001
# Names of the scores, and whether more of them is worse.
_SCORES = (("kl", "KL", True), ("top1", "top-1", False), ("perplexity_ratio", "perplexity ratio", True))


def measured_entries(checks: dict[str, Any]) -> dict[str, Any]:
    """What a manifest keeps of the runtimes: each one's scores with their standard errors."""
    return {
        ", ".join(part for part in (item["runtime"], item["mode"]) if part): {
            key: item["scores"][key] for key, _, _ in _SCORES
        }
        for item in checks["runtimes"]
        if item["scores"] is not None
    }


def refuse_baseline(baseline: dict[str, Any], fingerprint: str | None) -> None:
    """Refuse a baseline that nothing can be compared with, before anything is run.

    Args:
        baseline: the document that was named.
        fingerprint: of the model that the validated artifact was made from; None where that is not known.

    Raises:
        TieqError: if it is no manifest of an export, holds no measurement, or belongs to another model.
    """
    source = baseline.get("source")
    parts = (source, baseline.get("containers"), baseline.get("evaluation"))
    if not all(isinstance(part, dict) for part in parts) or "fingerprint" not in (source or {}):
        raise TieqError("is no manifest of an export.", where="--baseline", todo="Name a manifest.json.")
    if not baseline.get("measured"):
        raise TieqError(
            "holds no measurement to compare with.", where="--baseline", todo="Export again with evaluation."
        )
    if fingerprint is not None and baseline["source"]["fingerprint"] != fingerprint:
        raise TieqError(
            f"belongs to other weights ({baseline['source']['label']}).",
            where="--baseline",
            todo="Name a manifest of the same model.",
        )


def regression_checks(checks: dict[str, Any], evaluation: dict[str, Any], baseline: dict[str, Any]) -> list[Check]:
    """One check for each number of the baseline: sizes, copies and scores of the same runtimes on the same text.

    Args:
        checks: the document of a validation.
        evaluation: what was run for it.
        baseline: an earlier manifest that :func:`refuse_baseline` lets pass.

    Raises:
        TieqError: if it was measured on other text.
    """
    for key in ("sha256", "sequences", "length"):
        if baseline["evaluation"].get(key) != evaluation.get(key):
            raise TieqError(
                f"was measured on other text ({key} {baseline['evaluation'].get(key)}, here {evaluation.get(key)}).",
                where="--baseline",
                todo="Run the same text, --sequences and --length.",
            )
    found = [check for name, entry in baseline["containers"].items() for check in _sizes(name, entry, checks)]
    now = measured_entries(checks)
    for subject, earlier in baseline["measured"].items():
        if subject not in now:
            found.append(Check("baseline", subject, "not measured", "measured, as in the baseline", False))
            continue
        found += [_score(subject, title, now[subject][key], earlier[key], up) for key, title, up in _SCORES]
    return found


def _sizes(name: str, earlier: dict[str, Any], checks: dict[str, Any]) -> list[Check]:
    container = next((item for item in checks["containers"] if item["container"] == name), None)
    if container is None:
        return [Check("baseline", name, "not there", "there, as in the baseline", False)]
    copies = next(c["value"] for c in checks["checks"] if c["name"] == "table copies" and c["subject"] == name)
    size, limit = container["file_bytes"], int(earlier["bytes"] * _GROWTH)
    before = earlier["table"]["copies_in_file"]
    return [
        Check("file size, baseline", name, size, f"at most {limit:,} bytes", size <= limit),
        Check("table copies, baseline", name, copies, f"at most {before}", copies <= before),
    ]


def _score(subject: str, title: str, now: dict[str, Any], earlier: dict[str, Any], more_is_worse: bool) -> Check:
    noise = _ERRORS * math.hypot(now["standard_error"] or 0.0, earlier["standard_error"] or 0.0)
    limit = earlier["value"] + (noise if more_is_worse else -noise)
    passed = now["value"] <= limit if more_is_worse else now["value"] >= limit
    bound = f"{'at most' if more_is_worse else 'at least'} {limit:.6g}"
    detail = f"{earlier['value']:.6g} in the baseline, {noise:.2g} of noise"
    return Check(f"{title}, baseline", subject, now["value"], bound, passed, detail)
