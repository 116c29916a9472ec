"""The tables of ``tieq probe`` and ``tieq compare``."""

from __future__ import annotations

from typing import Any

from tieq.cli.tables import print_line, print_table
from tieq.report.tables import Row, estimate, megabytes

_ROLES = ("lookup", "logits", "both")


def show_probe(found: dict[str, Any]) -> None:
    """Print what each scheme costs by role, where it costs, and how it travels."""
    _show_head(found)
    rows: list[Row] = []
    for entry in found["schemes"]:
        rows += _probe_rows(entry)
    header = (
        "scheme",
        "bits/weight",
        "table",
        *(f"KL, {role}" for role in _ROLES),
        "both - sum",
        "top-1",
        "perplexity ratio",
    )
    print_table(header, rows)
    shown = _middle(found["schemes"])
    bands: list[Row] = []
    for number, band in enumerate(found["bands"]):
        costs = (f"{shown['bands'][role][number]:.3g}" for role in ("lookup", "logits"))
        bands.append((band["label"], f"{band['rows']:,}", f"{band['token_share']:.1%}", *costs))
    columns = ("rows by frequency", "rows", "tokens", f"lookup, {shown['scheme']}", f"logits, {shown['scheme']}")
    print_table(columns, bands)
    blocks = len(shown["residual_error"]) - 1
    marks = sorted({0, 1, blocks // 4, blocks // 2, 3 * blocks // 4, blocks})
    travel: list[Row] = [
        (entry["scheme"], *(f"{entry['residual_error'][mark]:.2%}" for mark in marks)) for entry in found["schemes"]
    ]
    print_table(
        ("residual stream's error", *(f"after block {mark}" if mark else "before blocks" for mark in marks)), travel
    )
    print_line(found["norm"]["sentence"])
    share = shown["logits_cost_in_top_columns"]
    print_line(
        f"With {shown['scheme']}, the dearest 1 % of the columns ({found['norm']['top_columns']}) hold "
        f"{share['after_norm']:.1%} of the logits role's cost; without the gain they would hold "
        f"{share['before_norm']:.1%}."
    )


def _probe_rows(entry: dict[str, Any]) -> list[Row]:
    measured, predicted = entry["measured"], entry["predicted"]
    both = measured["both"]
    rows: list[Row] = [
        (
            entry["scheme"],
            f"{entry['bits_per_weight']:.4g}",
            megabytes(entry["table_bytes"]),
            *(estimate(measured[role]["kl"], 5) for role in _ROLES),
            estimate(entry["interaction"], 5),
            estimate(both["top1"], 3),
            estimate(both["perplexity_ratio"], 3),
        )
    ]
    if len(both["by_domain"]) > 1:
        for domain, scores in both["by_domain"].items():
            kls = (estimate(measured[role]["by_domain"][domain]["kl"], 5) for role in _ROLES)
            rows.append(
                (f"  {domain}", "", "", *kls, "", estimate(scores["top1"], 3), estimate(scores["perplexity_ratio"], 3))
            )
    ratios = (_predicted(predicted[role], entry["predicted_over_measured"][role]) for role in _ROLES)
    return [*rows, ("  predicted", "", "", *ratios, "", "", "")]


def _predicted(value: float, ratio: float | None) -> str:
    return f"{value:.5f}" + ("" if ratio is None else f" ({ratio:.2f} x)")


def _middle(schemes: list[dict[str, Any]]) -> dict[str, Any]:
    """The scheme nearest to four and a half bits."""
    return min(schemes, key=lambda entry: abs(entry["bits_per_weight"] - 4.5))


def show_compare(found: dict[str, Any]) -> None:
    """Print tied against untied at each width, and one sentence on each."""
    _show_head(found)
    if found["float"] is not None:
        print_table(
            ("tied in float, no quantization", "KL", "top-1", "perplexity ratio"),
            [(name.replace("_", " "), *_cells(scores)) for name, scores in found["float"].items()],
        )
    rows: list[Row] = []
    for entry in found["schemes"]:
        pair = entry["untied_same_bytes"]
        two = "" if pair is None else f"two tables in its bytes ({pair['lookup']} + {pair['logits']})"
        kinds = {
            "shared": "one shared table",
            "untied": "two tables, each solved for its role",
            "untied_same_bytes": two,
            "naive": "plain rounding",
        }
        for kind, said in kinds.items():
            if entry[kind] is not None:
                rows.append((entry["scheme"], said, megabytes(entry[kind]["bytes"]), *_cells(entry[kind])))
    print_table(("scheme", "", "table bytes", "KL (nats/token)", "top-1", "perplexity ratio"), rows)
    for entry in found["schemes"]:
        print_line(entry["verdict"])


def _cells(scores: dict[str, Any]) -> Row:
    return estimate(scores["kl"], 5), estimate(scores["top1"], 3), estimate(scores["perplexity_ratio"], 3)


def _show_head(found: dict[str, Any]) -> None:
    tied = "one table for both roles" if found["tied"] else "two tables"
    print_line(f"{found['model']['label']}: {tied}, {found['rows']:,} x {found['columns']:,}, effort {found['effort']}")
    for name in ("calibration", "evaluation"):
        used = found[name]
        print_line(f"{name}: {used['sequences']} sequences of {used['length']} tokens: {used['description']}")
    for entry in found["schemes"]:
        for note in entry["notes"]:
            print_line(f"note: {note}")
