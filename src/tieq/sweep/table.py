"""One table of a whole sweep: a row for each container, runtime and mode of each cell."""

from __future__ import annotations

from typing import Any

from tieq.report.markdown import markdown_table
from tieq.report.tables import Row, estimate

HEADER: Row = (
    "model", "recipe", "container", "MB", "bits/weight", "copies", "runtime", "KL (nats/token)", "top-1",
    "perplexity ratio", "gates", "seconds",
)  # fmt: skip


def rows(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The table as records, from the records of the cells; a cell without a result has one row that says so."""
    return [row for cell in cells for row in _rows_of(cell)]


def _rows_of(cell: dict[str, Any]) -> list[dict[str, Any]]:
    first = {"model": cell["label"], "recipe": cell["recipe"], "state": cell["state"]}
    if cell["state"] != "done":
        return [first]
    checks = cell["checks"]
    copies = {check["subject"]: check["value"] for check in checks["checks"] if check["name"] == "table copies"}
    found = []
    for container in checks["containers"]:
        name = container["container"]
        payloads = container["payloads"]
        about = {
            **first,
            "container": name,
            "megabytes": container["file_bytes"] / 1e6,
            "bits_per_weight": [p["bits_per_weight"] for p in payloads if p["band_rows"] is None],
            "bits_per_weight_of_bands": [p["bits_per_weight"] for p in payloads if p["band_rows"] is not None],
            "copies": copies.get(name),
            "passed": cell["passed"],
            "seconds": cell["seconds"],
        }
        ran = [item for item in checks["runtimes"] if item["container"] == name]
        found += [
            {**about, "runtime": item["runtime"], "mode": item["mode"], "tokens": _tokens(item, cell), **_scores(item)}
            for item in ran
        ]
        found += [] if ran else [about]
    return found


def _tokens(item: dict[str, Any], cell: dict[str, Any]) -> int:
    """What was run: a bound that noise left undecided has run more text, a slow runtime less."""
    used = cell["evaluation"]
    return int(item["tokens"] or used["sequences"] * used["length"])


def _scores(item: dict[str, Any]) -> dict[str, Any]:
    scores = item["scores"]
    return {} if scores is None else {name: scores[name] for name in ("kl", "top1", "perplexity_ratio")}


def text_rows(records: list[dict[str, Any]]) -> list[Row]:
    """The table's cells as text."""
    return [_text_row(record) for record in records]


def _text_row(row: dict[str, Any]) -> Row:
    if row["state"] != "done":
        return (row["model"], row["recipe"], *["-"] * 8, row["state"], "-")
    bits = " / ".join(f"{value:.2f}" for value in row["bits_per_weight"])
    bits += "".join(f" + {value:.2f}" for value in row["bits_per_weight_of_bands"])
    runtime = ", ".join(part for part in (row.get("runtime"), row.get("mode")) if part)
    return (
        row["model"],
        row["recipe"],
        row["container"],
        f"{row['megabytes']:.2f}",
        bits,
        str(row["copies"]),
        runtime or "nothing run",
        *(
            estimate(row[name], digits) if name in row else "-"
            for name, digits in (("kl", 4), ("top1", 3), ("perplexity_ratio", 3))
        ),
        "yes" if row["passed"] else "NO",
        f"{row['seconds']:.0f}",
    )


def problems(cells: list[dict[str, Any]]) -> list[str]:
    """A line for each cell that failed and each gate that does not hold."""
    lines = []
    for cell in cells:
        again = f" ({cell['attempts']} attempts)" if cell.get("attempts", 1) > 1 else ""
        if cell["state"] == "failed":
            lines.append(f"FAILED {cell['name']}{again}: {cell['error']}")
        elif cell["state"] == "done":
            lines += [
                f"GATE {cell['name']}, {check['name']} ({check['subject']}): "
                + (check["detail"] or f"{check['value']}, wanted {check['bound']}")
                for check in cell["checks"]["checks"]
                if not check["passed"]
            ]
    return lines


def verdict(document: dict[str, Any]) -> str:
    """The sweep in one sentence."""
    states = [cell["state"] for cell in document["cells"]]
    parts = [f"{states.count('done')} of {len(states)} cells done"]
    parts += [f"{states.count(state)} {state}" for state in ("failed", "pending") if state in states]
    if "done" in states:
        bad = sum(cell["state"] == "done" and not cell["passed"] for cell in document["cells"])
        parts.append(f"gates do not hold in {bad}" if bad else "all gates hold")
    return ", ".join(parts)


def markdown(document: dict[str, Any]) -> str:
    """``sweep.md``."""
    lines = [f"# Sweep: {verdict(document)}", markdown_table(HEADER, text_rows(document["rows"]))]
    lines += ["\n".join(f"- {line}" for line in problems(document["cells"]))] if problems(document["cells"]) else []
    used = {
        cell["name"]: cell["evaluation"]
        for cell in document["cells"]
        if cell["state"] == "done" and "sequences" in cell["evaluation"]
    }
    if used:
        first = next(iter(used.values()))
        lines.append(
            f"Measured against the float models on {_text_words(first)}: {first['description']}. Standard errors over "
            "sequences; seconds are the whole cell's."
        )
        others = {name: text for name, text in used.items() if _text_words(text) != _text_words(first)}
        lines += [f"{name} ran {_text_words(text)}." for name, text in others.items()]
    return "\n\n".join(lines) + "\n"


def _text_words(used: dict[str, Any]) -> str:
    return f"{used['sequences']} sequences of {used['length']} tokens"
