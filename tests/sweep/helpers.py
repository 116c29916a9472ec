"""A matrix of models and recipes whose cells are played by ``cell_stub.py``, and processes to wait for."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path

STUB = (sys.executable, "-S", str(Path(__file__).with_name("cell_stub.py")))
# One that ends when its parent is killed, by the means of a real cell.
WATCHING_STUB = (sys.executable, str(Path(__file__).with_name("cell_stub.py")), "watching")


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A models file, recipe files and the folder of the sweep."""

    folder: Path
    out: Path

    @property
    def models(self) -> Path:
        return self.folder / "models.yaml"

    def recipe(self, name: str, says: str = "", more: str = "") -> Path:
        """Write a recipe whose description tells the stub what to do."""
        path = self.folder / f"{name}.yaml"
        path.write_text(f"description: {says!r}\n{more}")
        return path

    def runs(self, cell: str) -> int:
        """How often the process of a cell was started."""
        path = self.out / "cells" / cell / "ran.txt"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def pids(self, cell: str) -> list[int]:
        """A hanging cell's process and its child, as soon as there are any."""
        path = self.out / "cells" / cell / "pids.txt"
        wait_for(path.exists)
        return [int(pid) for pid in path.read_text().split()]


def wait_for(happened: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    """Whether a process is over; one that nobody has asked after yet is."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
