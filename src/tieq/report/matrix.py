"""The matrix of runtimes: one row a container, runtime and mode, with columns only for what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tieq.report.tables import INPUT_FILE, NOT_FINITE

Cells = list[str]


def plus_minus(found: dict[str, Any] | None, digits: int) -> str:
    """A value with its standard error."""
    if found is None:
        return ""
    value, error = found["value"], found["standard_error"]
    if value is None or not math.isfinite(value):
        return NOT_FINITE
    return f"{value:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def plain(value: Any) -> str:
    """A gate's value as text."""
    if value is None:
        return NOT_FINITE
    return f"{value:,.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def table_copies(checks: dict[str, Any]) -> dict[str, int]:
    """Copies of one table by container, as the gates counted them."""
    return {check["subject"]: check["value"] for check in checks["checks"] if check["name"] == "table copies"}


def matrix(checks: dict[str, Any]) -> dict[str, Any]:
    """Header and rows; a row is its cells, what kind it is (``main``, ``part`` or ``input``) and whether it passed."""
    everything = [*checks["runtimes"], *checks.get("input", {}).get("runtimes", [])]
    copies = table_copies(checks)
    optional: list[tuple[str, str, Callable[[Any], str]]] = [
        ("platform", "platform", str),
        ("tokens", "tokens", lambda value: f"{value:,}"),
        ("decode_rate", "decode, tokens/s", lambda value: plus_minus(value, 1)),
    ]
    shown = [column for column in optional if any(item.get(column[0]) is not None for item in everything)]
    header = ["container", "runtime", "mode", "version", *(title for _, title, _ in shown), "copies", "KL (nats/token)",
              "top-1", "perplexity ratio", "KL to the first", "verdict"]  # fmt: skip
    rows: list[dict[str, Any]] = []
    for item in checks["runtimes"]:
        more = [_cell(item.get(key), said) for key, _, said in shown]
        count = item.get("table_copies", copies.get(item["container"]))
        verdict, passed = _verdict(item, checks)
        cells = [
            item["container"],
            item["runtime"],
            item["mode"] or "–",
            item["version"],
            *more,
            "" if count is None else str(count),
            *_scores(item),
            _to_first(item),
            verdict,
        ]
        rows.append({"cells": cells, "kind": "main", "passed": passed})
        rows += _parts(item, len(shown))
    for item in checks.get("input", {}).get("runtimes", []):
        more = [_cell(item.get(key), said) for key, _, said in shown]
        cells = [f"{item['container']}, {INPUT_FILE}", item["runtime"], item["mode"] or "–", item["version"], *more, "",
                 *_scores(item), "", ""]  # fmt: skip
        rows.append({"cells": cells, "kind": "input", "passed": None})
    return {"header": header, "rows": rows}


def _parts(item: dict[str, Any], width: int) -> list[dict[str, Any]]:
    """Rows below a runtime's: against the input file, and by domain where there are several."""
    parts: dict[str, dict[str, Any]] = {}
    if item.get("against_input") is not None:
        parts[f"against {INPUT_FILE}"] = item["against_input"]
    if len(item["by_domain"]) > 1:
        parts.update(item["by_domain"])
    empty = [""] * (width + 4)
    return [
        {"cells": [name, *empty, *_score_cells(scores), "", ""], "kind": "part", "passed": None}
        for name, scores in parts.items()
    ]


def _scores(item: dict[str, Any]) -> Cells:
    if item["scores"] is None:
        perplexity = item["perplexity"]
        shown = NOT_FINITE if perplexity is None else f"{perplexity:.2f}"
        return ["no reference", "", f"perplexity {shown}"]
    return _score_cells(item["scores"])


def _score_cells(scores: dict[str, Any]) -> Cells:
    return [plus_minus(scores["kl"], 4), plus_minus(scores["top1"], 3), plus_minus(scores["perplexity_ratio"], 3)]


def _to_first(item: dict[str, Any]) -> str:
    if item["first"] is None:
        return "first"
    return plus_minus(item["kl_to_first"], 4)


def _cell(value: Any, said: Callable[[Any], str]) -> str:
    return "" if value is None else said(value)


def _verdict(item: dict[str, Any], checks: dict[str, Any]) -> tuple[str, bool | None]:
    """The gates of a runtime and of its container in words."""
    subject = ", ".join(part for part in (item["runtime"], item["mode"]) if part)
    mine = [check for check in checks["checks"] if check["subject"] in (subject, item["container"])]
    failed = list(dict.fromkeys(check["name"] for check in mine if not check["passed"]))
    if failed:
        return f"fails: {', '.join(failed)}", False
    return ("holds", True) if mine else ("no gate", None)
