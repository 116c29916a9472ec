"""Against an earlier manifest: which number became worse by more than its noise.

The same sequences were run both times, so that scores are compared sequence by sequence: what the text adds to both
cancels, and the noise of the difference is far smaller than that of either.
"""

from __future__ import annotations

import math
from typing import Any

from tieq.errors import TieqError
from tieq.metrics import Estimate, mean
from tieq.records import Check

# Standard errors of a difference that noise alone exceeds once in about twenty runs.
_ERRORS = 2.0
# An allowance, chosen and not derived, for what kernels of another processor or release add to the same weights: a
# share of the KL, and as it is for the other scores.
_KERNELS = {"kl": 0.02, "top1": 0.005, "perplexity_ratio": 0.005}
# A tool's version in the metadata moves a file by a few bytes.
_GROWTH = 1.001
# Names of the scores, and whether more of them is worse.
_SCORES = (("kl", "KL", True), ("top1", "top-1", False), ("perplexity_ratio", "perplexity ratio", True))


def measured_entries(checks: dict[str, Any]) -> dict[str, Any]:
    """What a manifest keeps of the runtimes: each one's scores with their standard errors."""
    return {
        ", ".join(part for part in (item["runtime"], item["mode"]) if part): {
            **{key: item["scores"][key] for key, _, _ in _SCORES},
            "by_sequence": item["scores"]["by_sequence"],
            **({} if item["decode_rate"] is None else {"decode_rate": item["decode_rate"]}),
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
    scores = [entry.get(key) for entry in baseline["measured"].values() for key, _, _ in _SCORES]
    counts = [baseline["evaluation"].get(key) for key in ("sequences", "length")]
    if not all(isinstance(score, dict) and isinstance(score.get("value"), (int, float)) for score in scores) or not all(
        isinstance(count, int) for count in counts
    ):
        raise TieqError("lacks what an export writes.", where="--baseline", todo="Export again.")
    if fingerprint is not None and baseline["source"]["fingerprint"] != fingerprint:
        raise TieqError(
            f"belongs to other weights ({baseline['source']['label']}).",
            where="--baseline",
            todo="Name a manifest of the same model.",
        )


def regression_checks(
    checks: dict[str, Any], evaluation: dict[str, Any], baseline: dict[str, Any], least_rate: float | None = None
) -> list[Check]:
    """One check for each number of the baseline: sizes, copies and scores of the same runtimes on the same text.

    Args:
        checks: the document of a validation.
        evaluation: what was run for it.
        baseline: an earlier manifest that :func:`refuse_baseline` lets pass.
        least_rate: share of the baseline's decode rate that has to be reached; None to compare none.

    Raises:
        TieqError: if it was measured on other text, or its decode rate on another machine or not at all.
    """
    if least_rate is not None:
        refuse_rate(baseline, checks.get("machine"))
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
        found += [_score(subject, key, title, now[subject], earlier, up) for key, title, up in _SCORES]
        if least_rate is not None and ("decode_rate" in earlier or "decode_rate" in now[subject]):
            found.append(_rate(subject, now[subject], earlier, least_rate))
    return found


def refuse_rate(baseline: dict[str, Any], here: str | None) -> None:
    """Refuse a baseline whose decode rate cannot be compared with one of this machine.

    Raises:
        TieqError: if it has none, or one of another machine.
    """
    if not any("decode_rate" in entry for entry in baseline["measured"].values()):
        raise TieqError("holds no decode rate.", where="--baseline", todo="Export it with --decode-rate.")
    there = baseline.get("machine")
    if here != there:
        raise TieqError(
            f"its decode rate was measured on another machine ({there}; here {here}).",
            where="--baseline",
            todo="Measure a baseline here, or leave --min-decode-ratio out.",
        )


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


def _score(
    subject: str, key: str, title: str, now: dict[str, Any], earlier: dict[str, Any], more_is_worse: bool
) -> Check:
    paired = _paired(key, now, earlier)
    if paired is None:
        worse = (now[key]["value"] - earlier[key]["value"]) * (1 if more_is_worse else -1)
        noise = _ERRORS * math.hypot(now[key]["standard_error"] or 0.0, earlier[key]["standard_error"] or 0.0)
    else:
        worse, noise = paired.value * (1 if more_is_worse else -1), _ERRORS * (paired.standard_error or 0.0)
    allowed = _KERNELS[key] * (earlier[key]["value"] if key == "kl" else 1.0)
    detail = f"{earlier[key]['value']:.6g} in the baseline, worse by {worse:.2g} with {noise:.2g} of noise"
    bound = f"worse by at most {allowed:.2g} beyond noise"
    return Check(f"{title}, baseline", subject, now[key]["value"], bound, worse - noise <= allowed, detail)


def _paired(key: str, now: dict[str, Any], earlier: dict[str, Any]) -> Estimate | None:
    """The mean difference over sequences; None where an older manifest has no scores by sequence."""
    values = [entry.get("by_sequence", {}).get(key) for entry in (now, earlier)]
    if None in values or len(values[0]) != len(values[1]):
        return None
    return mean([new - old for new, old in zip(*values, strict=True)])


def _rate(subject: str, now: dict[str, Any], earlier: dict[str, Any], least: float) -> Check:
    """Whether decoding is as fast as in the baseline, by a share of it, and not by noise alone."""
    title = "decode rate, baseline"
    if "decode_rate" not in now or "decode_rate" not in earlier:
        missing = "here" if "decode_rate" not in now else "in the baseline"
        return Check(title, subject, f"not measured {missing}", f"at least {least:g} of the baseline's", False)
    rate, before = now["decode_rate"], earlier["decode_rate"]
    limit = least * before["value"]
    noise = _ERRORS * math.hypot(rate["standard_error"] or 0.0, least * (before["standard_error"] or 0.0))
    detail = f"{before['value']:.4g} tokens/s in the baseline, {noise:.2g} of noise"
    undecided = abs(rate["value"] - limit) <= noise
    if undecided:
        detail += ": cannot be told from the bound, measure on an idle machine"
    passed = rate["value"] >= limit and not undecided
    return Check(title, subject, rate["value"], f"at least {limit:.4g} tokens/s", passed, detail, undecided)
