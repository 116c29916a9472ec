"""Files to compare an export with: those of peers that ship as data, and documents that a user puts beside it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from tieq.artifact import read_json
from tieq.errors import RefusedError, TieqError

# What makes two evaluation texts the same.
_TEXT = ("sha256", "sequences", "length")
_WANTED = "Name a manifest.json, a probe.json, or a file with what `tieq validate --json` printed."
# Two runs of one float model on one text differ by less than this share in perplexity, two models by more.
_SAME_REFERENCE = 1e-3


@dataclasses.dataclass(frozen=True)
class FilePoint:
    """One file in one runtime: what it is, its bytes, what it costs.

    ``kind`` is ``ours`` (the export's own containers), ``peer`` (from the data that ships) or ``beside``.
    """

    name: str
    kind: str
    container: str
    scheme: str
    size: int
    runtime: str
    kl: dict[str, Any]
    top1: dict[str, Any] | None
    command: str = ""


def own_points(checks: dict[str, Any], kind: str = "ours", name: str = "") -> list[FilePoint]:
    """A point for each container, in the first runtime and mode that measured it."""
    points = []
    for container in checks["containers"]:
        measured = next(
            (
                item
                for item in checks["runtimes"]
                if item["container"] == container["container"] and item["scores"] is not None
            ),
            None,
        )
        if measured is None or not _is_number(measured["scores"]["kl"]["value"]):
            continue
        scheme = " + ".join(dict.fromkeys(payload["scheme"] for payload in container["payloads"]))
        shown = container["container"].upper()
        points.append(
            FilePoint(
                name=f"{name}, {shown}" if name else f"this export, {shown}",
                kind=kind,
                container=container["container"],
                scheme=scheme,
                size=int(container["file_bytes"]),
                runtime=_subject(measured),
                kl=measured["scores"]["kl"],
                top1=measured["scores"]["top1"],
            )
        )
    return points


def peer_points(manifest: dict[str, Any], data: dict[str, Any] | None = None) -> list[FilePoint]:
    """Peers' files of the same model that were measured on the same text, each in its first runtime and mode.

    Args:
        manifest: of the export.
        data: a document of the form of ``peers.json``; None for the one that ships.
    """
    known = json.loads(resources.files("tieq.report").joinpath("peers.json").read_text(encoding="utf-8"))
    points: dict[tuple[str, str, str], FilePoint] = {}
    for group in (known if data is None else data)["groups"]:
        if group["source"]["fingerprint"] != manifest["source"]["fingerprint"]:
            continue
        if not same_text(group["evaluation"], manifest["evaluation"]):
            continue
        for item in group["points"]:
            key = (item["tool"], item["format"], item["scheme"])
            name = f"{item['tool']} {item['scheme']}"
            point = FilePoint(name, "peer", item["format"], item["scheme"], int(item["bytes"]), _subject(item),
                              item["kl"], item["top1"], item["command"])  # fmt: skip
            points.setdefault(key, point)
    return list(points.values())


def beside_points(manifest: dict[str, Any], checks: dict[str, Any], files: Iterable[Path]) -> list[FilePoint]:
    """Points of further documents: an export's ``manifest.json``, or what ``tieq validate FILE --json`` printed.

    Args:
        manifest: of the export that the report is about.
        checks: of the same.
        files: the documents.

    Raises:
        TieqError: if a document is neither, or was measured on another text or against another model.
    """
    points: list[FilePoint] = []
    for file in files:
        document = read_beside(file)
        evaluation = document.get("evaluation")
        is_manifest = isinstance(document.get("source"), dict) and isinstance(document.get("measured"), dict)
        if not isinstance(evaluation, dict) or not (is_manifest or isinstance(document.get("runtimes"), list)):
            raise TieqError(
                "is neither a manifest nor a validation.",
                where=f"--beside {file}",
                todo=_WANTED,
            )
        if not same_text(evaluation, manifest["evaluation"]):
            raise TieqError(
                f"was measured on other text ({_text_words(evaluation)}; here {_text_words(manifest['evaluation'])}).",
                where=f"--beside {file}",
                todo="Measure it on the same text, --sequences and --length.",
            )
        try:
            found = _of_manifest(document, manifest, file) if is_manifest else _of_checks(document, checks, file)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TieqError(
                f"lacks what a point needs ({type(error).__name__}: {error}).",
                where=f"--beside {file}",
                todo="Write it again with this version of tieq.",
            ) from error
        if not found:
            raise TieqError(
                "holds no KL.", where=f"--beside {file}", todo="Validate with --reference, or export with evaluation."
            )
        points += found
    return points


def read_beside(file: Path) -> dict[str, Any]:
    """A document that the user puts beside an export.

    Raises:
        TieqError: if it is missing or no JSON object.
    """
    try:
        return read_json(file)
    except RefusedError as error:
        raise TieqError(error.what, where=f"--beside {file}", todo=_WANTED) from error


def same_text(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two evaluations ran the same sequences of the same text, so that their KL can be compared."""
    return one.get("sha256") is not None and all(one.get(key) == other.get(key) for key in _TEXT)


def _of_manifest(document: dict[str, Any], manifest: dict[str, Any], file: Path) -> list[FilePoint]:
    if document["source"]["fingerprint"] != manifest["source"]["fingerprint"]:
        raise TieqError(
            f"belongs to other weights ({document['source']['label']}).",
            where=f"--beside {file}",
            todo="Name an export of the same model.",
        )
    name = f"{document['recipe']['name']} {document['effort']}"
    points = []
    for container, entry in document["containers"].items():
        measured = _measured_in(container, document["measured"])
        if measured is None or not _is_number(measured[1]["kl"]["value"]):
            continue
        scheme = " + ".join(dict.fromkeys(entry["table"]["scheme"]))
        points.append(
            FilePoint(f"{name}, {container.upper()}", "beside", container, scheme, int(entry["bytes"]), measured[0],
                      measured[1]["kl"], measured[1]["top1"])
        )  # fmt: skip
    return points


def _measured_in(container: str, measured: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The first runtime of a container: a manifest names runtimes alone, and llama.cpp is the one that runs GGUF."""
    found = ((name, entry) for name, entry in measured.items() if (container == "gguf") == name.startswith("llama.cpp"))
    return next(found, None)


def _of_checks(document: dict[str, Any], checks: dict[str, Any], file: Path) -> list[FilePoint]:
    # The document does not name its reference, but the reference's perplexity on this text tells models apart.
    here, there = _reference_perplexity(checks), _reference_perplexity(document)
    if here is not None and there is not None and abs(math.log(there / here)) > _SAME_REFERENCE:
        raise TieqError(
            f"was measured against another model (its perplexity is {there:.4g} on this text, here {here:.4g}).",
            where=f"--beside {file}",
            todo="Validate it with --reference and the model that this export was made from.",
        )
    return own_points(document, "beside", file.stem)


def _reference_perplexity(checks: dict[str, Any]) -> float | None:
    found = (item["scores"]["reference_perplexity"] for item in checks["runtimes"] if item["scores"] is not None)
    return next((float(value) for value in found if _is_number(value) and value > 0), None)


def _subject(item: dict[str, Any]) -> str:
    return ", ".join(part for part in (item["runtime"], item["mode"]) if part)


def _text_words(evaluation: dict[str, Any]) -> str:
    digest = str(evaluation.get("sha256") or "no text")[:12]
    return f"{evaluation.get('sequences', 0)} x {evaluation.get('length', 0)} tokens of {digest}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
