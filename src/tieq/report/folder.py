"""``report.html`` and ``report.md`` of an artifact folder, from the JSON documents in it and nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tieq.artifact import VALIDATION, export_manifest, read_json, write_json
from tieq.errors import TieqError
from tieq.report.documents import Documents
from tieq.report.markdown import report_markdown
from tieq.report.page import report_html
from tieq.report.points import beside_points, read_beside

CHECKS, GRAPH, PLAN, PROBE = "checks.json", "tie_graph.json", "plan.json", "probe.json"


def write_report(folder: Path, beside: Iterable[Path] = ()) -> dict[str, Any]:
    """Write both reports of an export's folder, of its last validation where that was kept, replacing earlier ones.

    Args:
        folder: an export's folder, its manifest included.
        beside: documents whose points are drawn too, see :func:`tieq.report.points.beside_points`; one that
            ``tieq probe`` wrote gives the costs by role instead.

    Returns:
        The files that were written, whether the export passed, and how many points were added.

    Raises:
        TieqError: if the folder holds no export or other documents than its manifest lists, or a document does not
            belong beside it.
    """
    manifest = _manifest(folder)
    checks, graph = read_json(folder / CHECKS), read_json(folder / GRAPH)
    if (folder / VALIDATION).exists():
        checks = read_json(folder / VALIDATION)
        manifest = {**manifest, "evaluation": checks["evaluation"]}
    files, probe, probe_file = list(beside), None, folder / PROBE
    for file in list(files):
        if read_beside(file).get("kind") == "probe":
            files.remove(file)
            probe_file = file
    if probe_file.exists():
        probe = _probe(probe_file, manifest)
    points = beside_points(manifest, checks, files)
    plan = read_json(folder / PLAN) if (folder / PLAN).exists() else None
    documents = Documents(manifest, checks, graph, plan, probe, tuple(points))
    page, text = folder / "report.html", folder / "report.md"
    page.write_text(report_html(documents), encoding="utf-8")
    text.write_text(report_markdown(manifest, checks, graph), encoding="utf-8")
    return {"files": [str(page), str(text)], "passed": checks["passed"], "points_beside": len(points)}


def keep_validation(folder: Path, found: dict[str, Any]) -> None:
    """Keep a validation of an export's folder in it, and show it in its reports.

    Raises:
        TieqError: as :func:`write_report`.
    """
    _manifest(folder)
    write_json(folder / VALIDATION, found)
    rewrite_report(folder)


def rewrite_report(folder: Path, beside: Iterable[Path] = ()) -> dict[str, Any]:
    """:func:`write_report` for a folder that any version of tieq may have written.

    Raises:
        TieqError: as there, and if the documents lack what this version reads.
    """
    try:
        return write_report(folder, beside)
    except (KeyError, TypeError, AttributeError) as error:
        raise TieqError(
            f"the documents lack what this version of tieq reads ({type(error).__name__}: {error}).",
            where=str(folder),
            todo="Export again.",
        ) from error


def _manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an export whose other documents are the ones that it lists."""
    manifest = export_manifest(folder)
    listed = {item["path"]: item["sha256"] for item in manifest["files"]}
    for name in (CHECKS, GRAPH, PLAN):
        path = folder / name
        if name in listed and path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() != listed[name]:
            raise TieqError(
                "is another document than manifest.json lists, so a report of both would be wrong.",
                where=str(path),
                todo="Export again.",
            )
    return manifest


def _probe(path: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    probe = read_json(path)
    if probe.get("kind") != "probe":
        raise TieqError("is no document of `tieq probe`.", where=str(path), todo="Move it away.")
    if probe["model"]["fingerprint"] != manifest["source"]["fingerprint"]:
        raise TieqError(
            f"belongs to other weights ({probe['model']['label']}).",
            where=str(path),
            todo="Name a probe of the same model.",
        )
    return probe
