"""The result as rows of text: one row a file, one a runtime. The terminal and the Markdown report share them."""

from __future__ import annotations

from typing import Any

Row = tuple[str, ...]
FILE_HEADER = ("container", "size", "table", "bits/weight", "copies", "read by")
RUNTIME_HEADER = ("runtime", "KL (nats/token)", "top-1", "perplexity ratio", "perplexity")
INPUT_FILE = "the input file"
# JSON has no infinity: a null stands for it.
NOT_FINITE = "not finite"
CHECK_HEADER = ("gate", "subject", "measured", "bound", "holds")


def megabytes(count: int) -> str:
    """Bytes as MB (10^6)."""
    return f"{count / 1e6:.2f} MB"


def estimate(found: dict[str, Any], digits: int) -> str:
    """A value with its standard error."""
    value, error = found["value"], found["standard_error"]
    if value is None:
        return NOT_FINITE
    return f"{value:.{digits}f}" + ("" if error is None else f" +- {error:.{digits}f}")


def file_rows(checks: dict[str, Any]) -> list[Row]:
    """One row a container: size, table bytes, bits per weight (of a table + of its row bands), copies, readers.

    An input file comes first.
    """
    copies = {c["subject"]: c["value"] for c in checks["checks"] if c["name"] == "table copies"}
    shown = [(c["container"], c, copies[c["container"]]) for c in checks["containers"]]
    if "input" in checks:
        original = checks["input"]["container"]
        shown.insert(0, (f"{original['container']}, {INPUT_FILE}", original, len(original["payloads"])))
    rows: list[Row] = []
    for name, container, count in shown:
        tables = [payload for payload in container["payloads"] if payload["band_rows"] is None]
        bands = [payload for payload in container["payloads"] if payload["band_rows"] is not None]
        bits = " / ".join(f"{payload['bits_per_weight']:.2f}" for payload in tables)
        bits += "".join(f" + {payload['bits_per_weight']:.2f}" for payload in bands)
        readers = "; ".join(" + ".join(payload["readers"]) or "nobody" for payload in tables)
        rows.append(
            (
                name,
                megabytes(container["file_bytes"]),
                megabytes(container["table_bytes"]),
                bits,
                str(count),
                readers,
            )
        )
    return rows


def runtime_rows(checks: dict[str, Any]) -> list[Row]:
    """One row a runtime and mode, and one more for each domain where there are several, the input file's first."""
    rows: list[Row] = []
    of_input = [(item, INPUT_FILE) for item in checks.get("input", {}).get("runtimes", [])]
    for item, of in [*of_input, *((item, "") for item in checks["runtimes"])]:
        name = ", ".join(part for part in (item["runtime"], item["mode"], of) if part)
        perplexity = NOT_FINITE if item["perplexity"] is None else f"{item['perplexity']:.2f}"
        if item["scores"] is None:
            rows.append((name, "no reference", "", "", perplexity))
            continue
        rows.append((name, *_score_cells(item["scores"]), perplexity))
        if item["against_input"] is not None:
            rows.append((f"  against {INPUT_FILE}", *_score_cells(item["against_input"]), ""))
        if len(item["by_domain"]) > 1:
            for domain, scores in item["by_domain"].items():
                rows.append((f"  {domain}", *_score_cells(scores), ""))
    return rows


def _score_cells(scores: dict[str, Any]) -> tuple[str, str, str]:
    return (
        estimate(scores["kl"], 4),
        estimate(scores["top1"], 3),
        estimate(scores["perplexity_ratio"], 3),
    )


def _holds(check: dict[str, Any]) -> str:
    return ("yes" if check["passed"] else "NO") + (", undecided" if check.get("undecided") else "")


def check_rows(checks: dict[str, Any]) -> list[Row]:
    """One row a gate."""
    rows: list[Row] = []
    for check in checks["checks"]:
        value = check["value"]
        shown = NOT_FINITE if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
        rows.append((check["name"], check["subject"], shown, check["bound"], _holds(check)))
    return rows
