"""The command line. Heavy modules are imported inside the commands, so that ``tieq --help`` is instant."""

from __future__ import annotations

from tieq.cli.app import main
from tieq.cli.studies import compare, probe

__all__ = ["compare", "main", "probe"]
