"""Lines and tables on stdout."""

from __future__ import annotations

import sys

from tieq.report.tables import Row


def print_line(text: str = "") -> None:
    """Print one line."""
    print(text)


def print_table(header: Row, rows: list[Row], width: int = 160) -> None:
    """Print a table with a rule below its header; ``width`` is that of pipes and CI logs."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    # Where there is no terminal, rich would fold cells at 80 columns.
    console = Console(width=None if sys.stdout.isatty() else width, highlight=False, emoji=False)
    table = Table(*header, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)
