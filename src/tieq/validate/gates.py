"""Gates: each compares one measured number with one bound, unrounded, and says what it saw."""

from __future__ import annotations

import math

from tieq.artifact import GENERATION_GRAPH
from tieq.metrics import Estimate
from tieq.recipe import Gates
from tieq.records import Check, Payload
from tieq.validate.measure import Measurement
from tieq.validate.structure import Structure, first_difference, prove

# Half the width of the interval, in standard errors: 95 % with many sequences, 91 % with 8.
_ERRORS = 2.0


def structure_checks(structure: Structure, expect_tied: bool | None) -> list[Check]:
    """How many copies of one table a file holds, and whether any table is read by nobody.

    Two tables are right when each plays one role and their values differ, or when two were meant
    (``expect_tied`` False); two equal ones are otherwise a lost tie.
    """
    payloads = structure.tables
    idle = [payload for payload in payloads if not payload.readers]
    role_payloads = [payload for payload in payloads if payload.readers]
    equal = structure.shared or (expect_tied is not False and _roles_equal(structure))
    copies = len(payloads) if equal else 1 + len(idle)
    detail = "one payload, read by lookup and logits" if structure.shared else ""
    if not structure.shared:
        detail = "; ".join(f"{_describe(payload)}" for payload in role_payloads)
        if not equal:
            detail = f"untied, a table for each role: {detail}"
    if copies > 1:
        first = next((p for p in payloads if "lookup" in p.readers), payloads[0])
        others = [payload for payload in payloads if payload is not first]
        detail = f"first copy: {_describe(first)}; further copy: " + "; ".join(map(_describe, others))
    checks = [Check("table copies", structure.container, copies, "exactly 1", copies == 1, detail)]
    if expect_tied and not structure.shared and not equal:
        checks.append(Check("tie kept", structure.container, "two different tables", "one shared table", False, detail))
    checks += [
        Check("table scales", structure.container, payload.flaw, "one set", False)
        for payload in payloads
        if payload.flaw
    ]
    return checks + _band_checks(structure)


def generation_checks(structure: Structure) -> list[Check]:
    """Whether the graph for generation beside an ONNX file reads the same bytes in the same roles."""
    beside = structure.path.with_name(GENERATION_GRAPH)
    if structure.container != "onnx" or beside == structure.path or not beside.exists():
        return []
    other = prove(beside)
    seen, expected = ({(p.location, p.scales, p.flaw, p.readers) for p in each.payloads} for each in (other, structure))
    value = "the same bytes" if seen == expected else "other bytes: " + "; ".join(map(_describe, other.payloads))
    return [Check("graph for generation", structure.container, value, "the same bytes", seen == expected)]


def size_checks(structure: Structure, gates: Gates) -> list[Check]:
    """Whether a file is as small as it was wished."""
    if gates.max_bytes is None:
        return []
    passed = structure.file_bytes <= gates.max_bytes
    bound = f"at most {gates.max_bytes:,} bytes"
    return [Check("file size", structure.container, structure.file_bytes, bound, passed)]


def _band_checks(structure: Structure) -> list[Check]:
    """Whether both roles of a shared table read each row band, alike, and decode to the same refined table."""
    checks = []
    for band in structure.bands:
        readers = " and ".join(band.readers)
        value = f"read by {readers}" + (f", {band.flaw}" if band.flaw else "")
        passed = not band.flaw and (not structure.shared or band.readers == ("lookup", "logits"))
        bound = "read by lookup and logits, same rows" if structure.shared else "read alike"
        checks.append(Check("row band", structure.container, value, bound, passed, _describe(band)))
    if structure.shared and structure.bands:
        row = first_difference(structure.read_lookup, structure.read_logits, structure.rows)
        value = "bit-identical" if row is None else f"row {row} differs"
        checks.append(Check("refined table", structure.container, value, "bit-identical in both roles", row is None))
    return checks


def _roles_equal(structure: Structure) -> bool:
    return first_difference(structure.read_lookup, structure.read_logits, structure.rows) is None


def _describe(payload: Payload) -> str:
    readers = " and ".join(payload.readers) or "nobody"
    rows = "" if payload.band_rows is None else f", {payload.band_rows} rows"
    scales = f", scales in {payload.scales}" if payload.scales else ""
    flaw = f", {payload.flaw}" if payload.flaw else ""
    names = ", ".join(payload.names)
    return f"{names} ({payload.scheme}{rows}) in {payload.location}{scales}, read by {readers}{flaw}"


def equality_checks(structures: list[Structure]) -> list[Check]:
    """Whether the containers decode to the same table, bit for bit, in both roles.

    GGUF has no row bands, so that with it the base table is compared.
    """
    checks = []
    first = structures[0]
    for other in structures[1:]:
        subject = f"{first.container} = {other.container}"
        if (first.rows, first.columns) != (other.rows, other.columns):
            sizes = f"{first.rows} x {first.columns} and {other.rows} x {other.columns}"
            checks.append(Check("decoded table", subject, sizes, "same size", False))
            continue
        base = "gguf" in (first.container, other.container)
        detail = "the base table, without row bands" if base and (first.bands or other.bands) else ""
        for role in ("lookup", "logits"):
            row = first_difference(first.reader(role, base=base), other.reader(role, base=base), first.rows)
            value = "bit-identical" if row is None else f"row {row} differs"
            checks.append(Check(f"decoded table, {role}", subject, value, "bit-identical", row is None, detail))
    return checks


def measurement_checks(measured: Measurement, gates: Gates) -> list[Check]:
    """The recipe's bounds on one runtime's scores, each against the interval of what was measured.

    A bound that lies within the interval is undecided, and holds or not as ``gates.undecided`` says. A bound on KL
    without a reference fails: it was not measured.
    """
    # A slow runtime runs other, harder text than the bounds are meant for: with a first runtime, that is its measure.
    scored = measured.tokens is None or measured.kl_to_first is None
    scores = measured.scores
    found: list[tuple[str, float | None, Estimate | None, str]] = [
        ("KL", gates.max_kl, scores.kl if scores else None, "at most"),
        ("top-1", gates.min_top1, scores.top1 if scores else None, "at least"),
        ("perplexity ratio", gates.max_perplexity_ratio, scores.perplexity_ratio if scores else None, "at most"),
    ]
    if measured.kl_to_first is not None:
        bound = gates.max_runtime_kl if measured.bound_to_first is None else measured.bound_to_first
        found.append((f"KL to {measured.first}", bound, measured.kl_to_first, "at most"))
    checks = []
    for name, bound, value, sense in found:
        if bound is None or not (scored or name.startswith("KL to")):
            continue
        if value is None:
            text = f"{sense} {bound}"
            checks.append(Check(name, measured.subject, "not measured", text, False, "no reference was named"))
        else:
            checks.append(_bounded(name, measured.subject, value, bound, sense, gates.undecided))
    return checks


def _bounded(name: str, subject: str, found: Estimate, bound: float, sense: str, undecided: str) -> Check:
    value, noise = found.value, _ERRORS * (found.standard_error or 0.0)
    holds = value <= bound if sense == "at most" else value >= bound
    text = f"{sense} {bound}"
    if abs(value - bound) > noise or noise == 0.0 or not math.isfinite(value):
        return Check(name, subject, value, text, holds)
    detail = f"{value:.6g} +- {noise:.2g} cannot be told from {bound}: run more --sequences or move the bound"
    passed = holds if undecided == "value" else undecided == "pass"
    return Check(name, subject, value, text, passed, detail, undecided=True)
