"""Sweeps: models x recipes x runtimes, one cell after another or on a cluster, resumable, with one table at the end."""

from __future__ import annotations

from tieq.sweep.run import exit_code, sweep

__all__ = ["exit_code", "sweep"]
