"""A sweep as one table on stdout."""

from __future__ import annotations

from typing import Any

from tieq.cli.tables import print_line, print_table
from tieq.sweep.table import HEADER, problems, text_rows, verdict

# Twelve columns, of which none needs folding.
_WIDTH = 200


def show_sweep(found: dict[str, Any]) -> None:
    """Print the table, what went wrong, and the verdict."""
    print_table(HEADER, text_rows(found["rows"]), _WIDTH)
    for line in problems(found["cells"]):
        print_line(line)
    print_line(verdict(found))
    if found["interrupted"]:
        print_line("interrupted; the same command goes on with the rest")
    print_line(f"table: {found['folder']}/sweep.md")
