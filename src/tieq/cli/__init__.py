"""The command line. Heavy modules are imported inside the commands, so that ``tieq --help`` is instant."""

from __future__ import annotations

from tieq.cli.app import main
from tieq.cli.reports import report
from tieq.cli.runtimes import runtimes
from tieq.cli.studies import compare, probe
from tieq.cli.sweeps import sweep

__all__ = ["compare", "main", "probe", "report", "runtimes", "sweep"]
