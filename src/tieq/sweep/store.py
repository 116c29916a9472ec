"""The folder of a sweep: one folder a cell with its artifact, its log and, once it is over, ``cell.json``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tieq.artifact import MANIFEST, json_text, read_json
from tieq.errors import TieqError
from tieq.sweep.child import ARTIFACT, Outcome
from tieq.sweep.matrix import Cell

FORMAT_VERSION = 1
CELLS, RECORD, SUMMARY, TABLE = "cells", "cell.json", "sweep.json", "sweep.md"
_LOCK = ".lock"


class Store:
    """What is kept of a sweep, and what of it still stands."""

    def __init__(self, out: Path) -> None:
        self.out = out.resolve()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the folder; it is made where there is none.

        Raises:
            TieqError: if it holds something else, cannot be written, or another sweep is at it.
        """
        try:
            if self.out.is_dir() and any(self.out.iterdir()) and not (self.out / CELLS).is_dir():
                raise TieqError("is not empty and holds no sweep.", where=str(self.out), todo="Choose another --out.")
            (self.out / CELLS).mkdir(parents=True, exist_ok=True)
            lock = (self.out / _LOCK).open("w", encoding="utf-8")
        except OSError as error:
            raise TieqError(f"cannot be written ({error}).", where=str(self.out)) from error
        with lock:
            _hold(lock.fileno(), self.out)
            yield

    def folder(self, cell: Cell) -> Path:
        """The cell's folder."""
        return self.out / CELLS / cell.name

    def record(self, cell: Cell) -> dict[str, Any] | None:
        """What is known of a cell from an earlier run, whatever its key; None where nothing is."""
        path = self.folder(cell) / RECORD
        if not path.exists():
            return None
        try:
            found = read_json(path)
        except TieqError:
            return None
        return found if found.get("format") == FORMAT_VERSION else None

    def is_done(self, cell: Cell) -> bool:
        """Whether the cell was done from the same inputs and its artifact is still there."""
        found = self.record(cell)
        return (
            found is not None
            and found["state"] == "done"
            and found["key"] == cell.key
            and (self.folder(cell) / ARTIFACT / MANIFEST).exists()
        )

    def begin(self, cell: Cell) -> Path:
        """The folder of a cell that is run now; until it is over there is no record of it."""
        (self.folder(cell) / RECORD).unlink(missing_ok=True)
        return self.folder(cell)

    def save(self, cell: Cell, outcome: Outcome) -> dict[str, Any]:
        """Record how a cell went, and return the record."""
        done = outcome.state == "done"
        record = {
            "format": FORMAT_VERSION,
            **head(cell, "done" if done else "failed"),
            "error": outcome.error or None,
            "attempts": outcome.attempts,
            "seconds": outcome.seconds,
            "host": outcome.host,
            **(outcome.result or {}),
        }
        self.folder(cell).mkdir(parents=True, exist_ok=True)
        write_whole(self.folder(cell) / RECORD, json_text(record) + "\n")
        return record


def head(cell: Cell, state: str) -> dict[str, Any]:
    """What a record says of the cell itself."""
    return {
        "name": cell.name,
        "key": cell.key,
        "model": cell.model,
        "label": cell.label,
        "recipe": cell.recipe_name,
        "state": state,
    }


def write_whole(path: Path, text: str) -> None:
    """Write a file so that nobody ever reads half of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _hold(file: int, out: Path) -> None:
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise TieqError(
            "another sweep is at work here.", where=str(out), todo="Wait for it, or choose another --out."
        ) from error
    except OSError:  # some network storage has no locks
        return
