"""One cell: export, validate in the runtimes that were asked for. ``python -m tieq.sweep.cell FILE`` is the child."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from tieq.artifact import check_target, read_json, write_json
from tieq.errors import TieqError
from tieq.sweep.matrix import Cell


def run_cell(cell: Cell, target: Path) -> dict[str, Any]:
    """Make the artifact of a cell and measure it.

    Args:
        cell: what to make.
        target: artifact folder; an earlier one is gone from the start, so that it never stands for a cell that failed.

    Returns:
        Whether every gate holds, ``checks`` with the runtimes that were asked for, and what was used.

    Raises:
        TieqError: on bad input.
    """
    from tieq.pipeline import export
    from tieq.revalidate import validate_path

    wishes = cell.wishes
    check_target(target)
    if target.exists():
        shutil.rmtree(target)
    texts = [Path(path) for path in wishes.texts] or None
    made = export(cell.model, cell.recipe, target, wishes.formats, calibration=wishes.calibration, evaluation=texts)
    checks, evaluation = made.checks, made.manifest["evaluation"]
    if set(wishes.runtimes) <= {item["runtime"] for item in checks["runtimes"]}:
        # The export ran them on this very text.
        wanted = [item for item in checks["runtimes"] if not wishes.runtimes or item["runtime"] in wishes.runtimes]
        checks = {**checks, "runtimes": wanted}
    else:
        checks = validate_path(target, runtimes=list(wishes.runtimes), texts=texts)
        evaluation = checks.pop("evaluation")
    return {
        "passed": bool(made.passed and checks["passed"]),
        "checks": checks,
        "evaluation": evaluation,
        "source": made.manifest["source"],
        "versions": made.manifest["versions"],
    }


def attempt(cell: Cell, target: Path) -> dict[str, Any]:
    """Run a cell; an error is a result, with its sentence."""
    try:
        return {"state": "done", "result": run_cell(cell, target)}
    except TieqError as error:
        return {"state": "failed", "error": error.sentence()}
    except OSError as error:
        traceback.print_exc()
        return {"state": "failed", "error": f"{error}; check the disk and its permissions."}
    except Exception as error:  # whatever it is, the other cells go on
        traceback.print_exc()
        return {"state": "failed", "error": f"{type(error).__name__}: {error}; the log has the traceback."}


def end_with_parent() -> None:
    """End this process and its group as soon as stdin is closed, that is when the parent is gone, however it went."""

    def watch() -> None:
        # Not through sys.stdin, whose lock would be held when the interpreter shuts down.
        while os.read(0, 1):
            pass
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(order: Path) -> None:
    """Run the cell of an order file and write its outcome where the order says."""
    content = read_json(order)
    end_with_parent()
    outcome = attempt(Cell.from_json(content["cell"]), Path(content["target"]))
    target = Path(content["outcome"])
    write_json(target.with_suffix(".part"), outcome)
    target.with_suffix(".part").replace(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
