"""The tables of ``tieq plan``: what was chosen, what it was chosen from, and what a size can buy."""

from __future__ import annotations

from typing import Any

from tieq.cli.tables import print_line, print_table
from tieq.report.tables import Row, megabytes

_SHOWN_SPLITS = 3


def show_plan(found: dict[str, Any]) -> None:
    """Print a plan."""
    predicted = found["predicted"]
    print_line(f"{found['model']['label']}, {' and '.join(found['formats'])}, effort {found['effort']}")
    for name, candidates in found["tables"].items():
        print_line(f"{name}: {next(row['label'] for row in candidates if row['chosen'])}")
        print_table(("", "table", "size", "KL, lookup", "KL, logits"), [_candidate(row) for row in candidates])
    print_line(f"body: {_mix(found['body'])}")
    by_role = ", ".join(f"{role} {value:.3g}" for role, value in predicted["by_role"].items())
    print_line(f"predicted: {megabytes(predicted['file_bytes'])}, KL {predicted['kl']:.3g} ({by_role})")
    if found["measured"]:
        shown = ", ".join(f"{role} {value:.3g}" for role, value in found["measured"].items())
        factors = ", ".join(f"{role} {value:.2f}" for role, value in found["factors"].items())
        print_line(f"measured before the correction: {shown}; prices were multiplied by {factors}")
    _show_splits(found)
    rows: list[Row] = [
        (
            megabytes(p["file_bytes"]),
            f"{p['kl']:.3g}",
            p["table"],
            ", ".join(f"{n} x {s}" for s, n in p["body"].items()),
        )
        for p in found["front"]
    ]
    print_table(("file", "predicted KL", "table", "body"), rows)


def _mix(body: dict[str, int]) -> str:
    return ", ".join(f"{count} x {scheme}" for scheme, count in body.items())


def _candidate(row: dict[str, Any]) -> Row:
    costs = (f"{row['costs'][role]:.3g}" if role in row["costs"] else "-" for role in ("lookup", "logits"))
    return ("chosen" if row["chosen"] else "", row["label"], megabytes(row["bytes"]), *costs)


def _show_splits(found: dict[str, Any]) -> None:
    if not found["split"]:
        return
    best = sorted(found["split"], key=lambda pair: (pair["cost"], pair["bytes"]))[:_SHOWN_SPLITS]
    shown = "; ".join(
        f"{pair['lookup']} + {pair['logits']} {megabytes(pair['bytes'])} KL {pair['cost']:.3g}" for pair in best
    )
    print_line(f"not taken, two tables instead of one: {shown}")
