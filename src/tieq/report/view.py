"""An export's JSON documents as what the page shows: words, rows of cells, drawings. The template only lays it out."""

from __future__ import annotations

import collections
from typing import Any

from tieq.report.documents import Documents, recipe_words, text_words
from tieq.report.figures import cost_view, size_view, tie_view
from tieq.report.matrix import matrix, plain, plus_minus, table_copies
from tieq.report.tables import CHECK_HEADER, FILE_HEADER, check_rows, file_rows, megabytes


def page_view(documents: Documents) -> dict[str, Any]:
    """The values of the template."""
    manifest, checks = documents.manifest, documents.checks
    return {
        "label": manifest["source"]["label"],
        "recipe": manifest["recipe"]["name"],
        "verdict": _verdict(documents),
        "tiles": _tiles(checks),
        "files": {"header": FILE_HEADER, "rows": file_rows(checks), "words": _file_words(documents)},
        "tie": tie_view(documents),
        "costs": cost_view(documents),
        "sizes": size_view(documents),
        "runtimes": _runtimes(documents),
        "gates": {"header": CHECK_HEADER, "rows": _gates(checks)},
        "used": _used(documents),
    }


def _verdict(documents: Documents) -> dict[str, Any]:
    checks = documents.checks
    failed = [check for check in checks["checks"] if not check["passed"]]
    count = len(checks["checks"])
    if failed:
        words = f"{len(failed)} of {count} gates failed"
    else:
        words = f"All {count} gates hold" if checks["passed"] else "A gate failed"
    copies = table_copies(checks)
    if documents.graph["tied"] and copies and all(value == 1 for value in copies.values()):
        words_below = "The vocabulary table is stored once in each file, and both roles read it."
    elif documents.graph["tied"]:
        words_below = "The vocabulary table is not stored once in every file."
    else:
        words_below = "This model has a table for each role, and each is stored once."
        words_below = words_below if all(value == 1 for value in copies.values()) else ""
    if not checks["runtimes"]:
        words_below += " Nothing was run, so what quantization cost is not known."
    if undecided := sum(bool(check.get("undecided")) for check in checks["checks"]):
        words_below += f" Noise leaves {undecided} of the {count} gates undecided."
    failures = [
        {
            "name": check["name"],
            "subject": check["subject"],
            "measured": plain(check["value"]),
            "bound": check["bound"],
            "detail": check["detail"],
        }
        for check in failed
    ]
    return {"passed": checks["passed"], "words": words, "below": words_below.strip(), "failures": failures}


def _gates(checks: dict[str, Any]) -> list[dict[str, Any]]:
    """A row a gate; one whose bound lies within the noise of what was measured says so."""
    return [
        {
            "cells": row[:-1],
            "passed": check["passed"],
            "word": row[-1],
            "detail": check["detail"] if check.get("undecided") else "",
        }
        for row, check in zip(check_rows(checks), checks["checks"], strict=True)
    ]


def _tiles(checks: dict[str, Any]) -> list[dict[str, str]]:
    """The few numbers that most readers came for."""
    tiles = [
        {"what": f"{item['container'].upper()} file", "value": megabytes(item["file_bytes"]),
         "note": f"table {megabytes(item['table_bytes'])}"}
        for item in checks["containers"]
    ]  # fmt: skip
    first = next((item for item in checks["runtimes"] if item["scores"] is not None), None)
    if first is not None:
        scores, where = first["scores"], f"in {first['runtime']}"
        tiles.append({"what": "KL, nats per token", "value": plus_minus(scores["kl"], 3), "note": where})
        tiles.append({"what": "same best token", "value": plus_minus(scores["top1"], 3), "note": where})
    return tiles


def _file_words(documents: Documents) -> str:
    sums = documents.graph["arithmetic"]
    return (
        f"The model has {sums['tied_total' if documents.graph['tied'] else 'untied_total']:,} parameters, "
        f"{sums['table']:,} of them in {'the table' if documents.graph['tied'] else 'each table'}. Sizes are in MB of "
        "10⁶ bytes, bits per weight include scales."
    )


def _runtimes(documents: Documents) -> dict[str, Any]:
    checks = documents.checks
    if not checks["runtimes"]:
        return {"words": "Nothing was run."}
    words = f"Against the float model, {text_words(documents.manifest['evaluation'])}. Standard errors over sequences."
    if "input" in checks:
        words += (
            " The float model is the input file, decoded; 'against the input file' compares with that file itself in "
            "the same runtime."
        )
    if any(item["kl_to_first"] is not None for item in checks["runtimes"]):
        words += " KL to the first runtime holds no quantization error, only what a runtime adds."
    return {"words": words, **matrix(checks)}


def _used(documents: Documents) -> dict[str, Any]:
    manifest = documents.manifest
    source = manifest["source"]
    facts = [
        ("source", source["origin"]),
        ("SHA-256 of the source", source["fingerprint"]),
        ("license", source.get("license") or ""),
        ("recipe", recipe_words(manifest["recipe"])),
        ("effort", manifest["effort"]),
        ("calibration text", text_words(manifest["calibration"])),
        ("its SHA-256", manifest["calibration"].get("sha256") or ""),
        ("evaluation text", text_words(manifest["evaluation"])),
        ("its SHA-256", manifest["evaluation"].get("sha256") or ""),
        ("ONNX graph", manifest.get("onnx_graph") or ""),
        *(("note", note) for note in manifest["notes"]),
    ]
    return {
        "facts": [(term, said) for term, said in facts if said],
        "precision": _precision_rows(documents.plan),
        "precision_header": ("what", "scheme", "bits/weight", "matrices", "weights"),
        "versions": list(manifest["versions"].items()),
        "files": [(item["path"], _size(item["bytes"]), item["sha256"]) for item in manifest["files"]],
        "files_header": ("file", "size", "SHA-256"),
    }


def _size(count: int) -> str:
    """Bytes as MB, kB below a tenth of one."""
    return megabytes(count) if count >= 100_000 else f"{count / 1e3:.2f} kB"


def _precision_rows(plan: dict[str, Any] | None) -> list[tuple[str, ...]]:
    """One row for each role and scheme of an export's plan."""
    counts: dict[tuple[str, str, float], list[int]] = collections.defaultdict(lambda: [0, 0])
    for item in (plan or {}).get("decisions", []):
        found = counts[item["role"], item["scheme"], item.get("total_bits_per_weight", item["bits_per_weight"])]
        found[0] += 1
        found[1] += item["rows"] * item["columns"]
    return [
        (role, scheme, f"{bits:.2f}", f"{count:,}", f"{weights:,}")
        for (role, scheme, bits), (count, weights) in counts.items()
    ]
