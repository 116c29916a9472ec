"""``report.md``, a model card: verdict, how to run it, files, the tie, runtimes, gates, and what was used."""

from __future__ import annotations

from typing import Any

from tieq.report.card import front_matter, run_text
from tieq.report.documents import recipe_words
from tieq.report.tables import (
    CHECK_HEADER,
    FILE_HEADER,
    RUNTIME_HEADER,
    Row,
    check_rows,
    file_rows,
    megabytes,
    runtime_rows,
)


def markdown_table(header: Row, rows: list[Row]) -> str:
    """A GitHub-flavoured table."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def report_markdown(manifest: dict[str, Any], checks: dict[str, Any], graph: dict[str, Any]) -> str:
    """The report of one artifact folder from its JSON documents."""
    verdict = "all gates hold" if checks["passed"] else "a gate FAILED"
    failed = [check for check in checks["checks"] if not check["passed"]]
    parts = [
        front_matter(manifest),
        f"# {manifest['source']['label']}, {manifest['recipe']['name']}: {verdict}",
        "\n".join(
            f"- **{check['name']}** ({check['subject']}): {check['detail'] or check['value']}" for check in failed
        ),
        "## Run it",
        run_text(manifest),
        "## Files",
        markdown_table(FILE_HEADER, file_rows(checks)),
        "## The tie",
        _tie_text(graph),
        "## Runtimes",
        _runtime_text(manifest, checks),
        "## Gates",
        markdown_table(CHECK_HEADER, check_rows(checks)),
        "## What was used",
        _used_text(manifest),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _tie_text(graph: dict[str, Any]) -> str:
    arithmetic = graph["arithmetic"]
    kept = "one table in each container" if graph["tied"] else "a table for each role"
    verdict = f"{graph['verdict']}: {graph['rows']:,} rows x {graph['columns']:,} columns; {kept}."
    sums = (
        f"Table {arithmetic['table']:,} parameters, body {arithmetic['body']:,}; "
        f"tied total {arithmetic['tied_total']:,}, untied {arithmetic['untied_total']:,} "
        f"({arithmetic['saved_share']:.1%} saved by tying)."
    )
    return "\n".join([verdict, sums, *(f"- {note}" for note in graph["notes"])])


def _runtime_text(manifest: dict[str, Any], checks: dict[str, Any]) -> str:
    if not checks["runtimes"]:
        return "Nothing was run."
    text = manifest["evaluation"]
    bos = ", each beginning with BOS" if text["has_bos"] else ""
    intro = (
        f"Against the float model, {text['sequences']} sequences of {text['length']} tokens{bos}: "
        f"{text['description']}. Standard errors over sequences."
    )
    if "input" in checks:
        intro += (
            " The float model is the input file, decoded; 'against the input file' compares with that file itself in "
            "the same runtime."
        )
    return intro + "\n\n" + markdown_table(RUNTIME_HEADER, runtime_rows(checks))


def _used_text(manifest: dict[str, Any]) -> str:
    source = manifest["source"]
    lines = [
        f"- source: {source['origin']}, SHA-256 `{source['fingerprint']}`",
        f"- recipe: {recipe_words(manifest['recipe'])}; effort {manifest['effort']}",
        f"- calibration: {manifest['calibration']['description']}",
    ]
    lines += [f"- note: {note}" for note in manifest["notes"]]
    lines += [f"- {name} {version}" for name, version in manifest["versions"].items()]
    files: list[Row] = [(f["path"], megabytes(f["bytes"]), f"`{f['sha256']}`") for f in manifest["files"]]
    return "\n".join(lines) + "\n\n" + markdown_table(("file", "size", "sha256"), files)
