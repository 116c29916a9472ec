"""Results as tables on stdout, for people; ``--json`` is for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tieq.cli.tables import print_line as _print
from tieq.cli.tables import print_table as _table
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

if TYPE_CHECKING:
    from tieq.pipeline import ExportResult


def show_inspection(found: dict[str, Any]) -> None:
    """Print the tie of a model, or the tables of containers."""
    _print(f"{found['model']}: {found.get('origin', found['kind'])}")
    if "containers" in found:
        _show_containers(found["containers"])
        return
    state = "" if found["kind"] == "configuration" else ", exported tied" if found["tied"] else ", exported untied"
    flag = "absent" if found["flag"] is None else str(found["flag"]).lower()
    _print(f"verdict: {found['verdict']}{state} (tie_word_embeddings {flag})")
    ids = "" if found["tokenizer_ids"] is None else f", tokenizer {found['tokenizer_ids']:,} ids"
    _print(f"table: {found['rows']:,} rows x {found['columns']:,} columns{ids}")
    rows: list[Row] = []
    for role in ("lookup", "logits"):
        use = found[role]
        around = [] if use["multiplier"] == 1.0 else [f"times {use['multiplier']:.6g}"]
        around += [f"softcap {use['softcap']}"] if use["softcap"] else []
        around += ["bias"] if use["bias"] else []
        stored = use["tensor"] or "(the lookup table)" if role == "logits" else use["tensor"] or "(the head)"
        rows.append((role, stored, ", ".join(around) or "-"))
    _table(("role", "tensor", "around it"), rows)
    for info in found.get("stored", []):
        _print(f"stored: {info['name']}, {info['dtype']}, {megabytes(info['bytes'])}")
    _show_arithmetic(found["arithmetic"], found["tied"])
    for note in found["notes"]:
        _print(f"note: {note}")


def _show_arithmetic(sums: dict[str, Any], tied: bool) -> None:
    share = f"{sums['saved_share']:.1%}"
    rows: list[Row] = [
        ("table", f"{sums['table']:,}", ""),
        ("body", f"{sums['body']:,}", ""),
        ("total, tied", f"{sums['tied_total']:,}", f"{share} saved by tying" if tied else f"{share} less if tied"),
        ("total, untied", f"{sums['untied_total']:,}", "" if tied else "this model"),
    ]
    _table(("parameters", "count", ""), rows)


def _show_containers(containers: list[dict[str, Any]]) -> None:
    rows: list[Row] = []
    for container in containers:
        rows.extend(
            (
                container["container"],
                ", ".join(payload["names"]),
                payload["scheme"] + ("" if payload["band_rows"] is None else f", {payload['band_rows']:,} rows"),
                f"{payload['bits_per_weight']:.2f}",
                megabytes(payload["nbytes"]),
                " + ".join(payload["readers"]) or "nobody",
                payload["location"],
            )
            for payload in container["payloads"]
        )
    _table(("container", "table", "scheme", "bits/weight", "size", "read by", "where"), rows)


def show_checks(found: dict[str, Any]) -> None:
    """Print files, runtimes and gates."""
    _table(FILE_HEADER, file_rows(found))
    if found["runtimes"]:
        used = found["evaluation"]
        _print(f"{used['sequences']} sequences of {used['length']} tokens: {used['description']}")
        _table(RUNTIME_HEADER, runtime_rows(found))
    _table(CHECK_HEADER, check_rows(found))
    for check in found["checks"]:
        if not check["passed"]:
            said = check["detail"] or f"{check['value']}, wanted {check['bound']}"
            _print(f"FAILED {check['name']} ({check['subject']}): {said}")
    _print("all gates hold" if found["passed"] else "a gate failed")


def show_export(result: ExportResult) -> None:
    """Print what an export made and what it cost."""
    _print(f"{result.manifest['source']['label']}, {result.manifest['recipe']['name']} -> {result.folder}")
    show_checks({**result.checks, "evaluation": result.manifest["evaluation"]})
    _print(f"report: {result.folder / 'report.html'}")


def show_runtimes(rows: list[dict[str, Any]]) -> None:
    """Print the runtimes and their state."""
    cells: list[Row] = [
        (
            row["name"],
            row["purpose"],
            row["files"],
            row["state"],
            row["version"] or row["how"],
        )
        for row in rows
    ]
    _table(("runtime", "what for", "files", "state", "version, or how to get it"), cells)


def show_recipes(rows: list[dict[str, Any]]) -> None:
    """Print the shipped recipes."""
    _table(("recipe", "what it is"), [(row["name"], row["description"]) for row in rows])
