"""A cell in a process of its own, which may crash, hang or be killed without taking the sweep with it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

from tieq.artifact import read_json, write_json

COMMAND = (sys.executable, "-m", "tieq.sweep.cell")
ARTIFACT, LOG = "artifact", "log.txt"
State = Literal["done", "failed", "crashed"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a cell went. ``failed`` has a sentence; ``crashed`` ended without a word, and may go well another time."""

    state: State
    error: str = ""
    result: dict[str, Any] | None = None
    seconds: float = 0.0
    host: str = ""
    attempts: int = 1


def run_child(
    cell: dict[str, Any], folder: Path, timeout: float | None = None, command: tuple[str, ...] | None = None
) -> Outcome:
    """Run a cell in a child process and wait for it.

    The child leads a process group that is killed on a timeout, on an interrupt and behind a child that is gone; and it
    ends by itself when this process is killed, because its stdin is closed then.

    Args:
        cell: the cell as :meth:`tieq.sweep.matrix.Cell.to_json` gives it.
        folder: the cell's folder; takes the artifact and the log.
        timeout: seconds after which the child is killed.
        command: what to run instead of :data:`COMMAND`.
    """
    start = time.monotonic()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="tieq-cell-") as scratch, (folder / LOG).open("wb") as log:
            order, answer = Path(scratch) / "order.json", Path(scratch) / "outcome.json"
            write_json(order, {"cell": cell, "target": str(folder / ARTIFACT), "outcome": str(answer)})
            code = _wait([*(command or COMMAND), str(order)], log, timeout)
            # Written as a whole by the child's last act: a crash while it takes itself down does not matter.
            found = read_json(answer) if answer.exists() else _without_answer(code, timeout)
    except OSError as error:
        found = {"state": "failed", "error": f"{error}; check the disk and its permissions."}
    if found["state"] != "done":
        _remove_partial(folder)
    return Outcome(**found, seconds=round(time.monotonic() - start, 2), host=platform.node())


def _wait(command: list[str], log: Any, timeout: float | None) -> int | None:
    """Exit code of a command, None where it had to be killed after the timeout."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def _without_answer(code: int | None, timeout: float | None) -> dict[str, Any]:
    if code is None:
        return {"state": "failed", "error": f"took longer than {timeout:g} s and was stopped (--timeout)."}
    if code < 0:
        reason = " for want of memory, perhaps" if code == -signal.SIGKILL else ""
        name = signal.Signals(-code).name
        return {"state": "crashed", "error": f"its process was ended by signal {-code} ({name}){reason}; see {LOG}."}
    return {"state": "crashed", "error": f"its process ended with exit code {code} and no result; see {LOG}."}


def _remove_partial(folder: Path) -> None:
    """What a killed export leaves; only the next export to the same target would remove it."""
    for left in folder.glob(f".{ARTIFACT}.*"):
        shutil.rmtree(left, ignore_errors=True)
