"""The JSON documents that a report is made of."""

from __future__ import annotations

import dataclasses
from typing import Any

from tieq.report.points import FilePoint


@dataclasses.dataclass(frozen=True)
class Documents:
    """What a report is made of; ``beside`` are points of other documents than the folder's."""

    manifest: dict[str, Any]
    checks: dict[str, Any]
    graph: dict[str, Any]
    plan: dict[str, Any] | None = None
    probe: dict[str, Any] | None = None
    beside: tuple[FilePoint, ...] = ()


def recipe_words(recipe: dict[str, Any]) -> str:
    """A manifest's recipe: its name, and its description if it has one."""
    return ": ".join(str(part) for part in (recipe["name"], recipe["description"]) if part)


def text_words(text: dict[str, Any]) -> str:
    """An evaluation or calibration text of a manifest in words."""
    if "sequences" not in text:
        return str(text["description"])
    bos = ", each beginning with BOS" if text.get("has_bos") else ""
    return f"{text['sequences']} sequences of {text['length']} tokens{bos}: {text['description']}"
