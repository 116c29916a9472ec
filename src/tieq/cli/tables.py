"""Lines and tables on stdout."""

from __future__ import annotations

import sys

from tieq.report.tables import Row


def print_line(text: str = "") -> None:
    """Print one line."""
    print(text)


def print_table(header: Row, rows: list[Row]) -> None:
    """Print a table with a rule below its header."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    # Wide enough for pipes and CI logs, where rich would otherwise fold cells at 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, emoji=False)
    table = Table(*header, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)
