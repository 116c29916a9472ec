"""The command that writes the reports of a folder again: ``report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tieq.cli.app import JsonOption, app, emit


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of an export.")],
    beside: Annotated[
        list[Path] | None,
        typer.Option(
            help="Draw this too: another manifest.json, what `tieq validate FILE --json` printed on the same text, or "
            "a probe.json; repeatable."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write report.html and report.md again from the JSON of an export's folder."""
    from tieq.report.folder import rewrite_report

    found = rewrite_report(folder, beside or ())
    if as_json:
        emit(found)
    else:
        for file in found["files"]:
            typer.echo(f"report: {file}")
