"""``tieq sweep``: what is still to do, run by an engine, recorded cell by cell."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tieq import text
from tieq.artifact import json_text
from tieq.errors import TieqError
from tieq.prepare import DEFAULT_FORMATS
from tieq.progress import say
from tieq.recipe import Effort
from tieq.sweep import table
from tieq.sweep.engines import Engine, LocalEngine
from tieq.sweep.matrix import Cell, Wishes, make_cells
from tieq.sweep.store import FORMAT_VERSION, SUMMARY, TABLE, Store, head, write_whole

# Containers whose files are not called after them.
_SUFFIXES = {"litert": ".tflite"}


def sweep(
    models: Path,
    recipes: Iterable[str | Path],
    out: Path,
    *,
    formats: tuple[str, ...] | None = None,
    runtimes: Iterable[str] = (),
    texts: Iterable[str | Path] = (),
    calibration: Iterable[str | Path] = (),
    effort: Effort | None = None,
    engine: Engine | None = None,
) -> dict[str, Any]:
    """Run every model with every recipe, but for the cells that an earlier run has done from the same inputs.

    Args:
        models: models file.
        recipes: recipe files or names of shipped recipes.
        out: the sweep's folder; an earlier one is gone on with.
        formats: containers to write; None for ONNX and GGUF.
        runtimes: runtimes to validate in; none named stands for those that an export runs by itself.
        texts: text files to evaluate on instead of the default text.
        calibration: text to calibrate on, see :func:`tieq.text.calibration_corpus`.
        effort: effort over that of every recipe.
        engine: where cells run; on this machine, one after another, if not given.

    Returns:
        The document that ``sweep.json`` holds; ``interrupted`` tells whether the user ended the run.

    Raises:
        TieqError: on bad input, before anything is run. What goes wrong in a cell is recorded and raises nothing.
    """
    wishes = Wishes(
        formats,
        tuple(dict.fromkeys(runtimes)),
        tuple(str(Path(path).resolve()) for path in texts),
        tuple(str(path) if path == text.SAMPLES else str(Path(path).resolve()) for path in calibration),
    )
    engine = engine or LocalEngine()
    by_itself = export_runtimes(wishes)
    cells = make_cells(models, recipes, wishes, effort)
    measured = any(cell.recipe.evaluation is not None for cell in cells)
    needed = list(dict.fromkeys([*(by_itself if measured else []), *wishes.runtimes]))
    store = Store(out)
    with store.opened():
        todo = [cell for cell in cells if not store.is_done(cell)]
        say(f"{len(cells)} cells, {len(cells) - len(todo)} done before, {len(todo)} to run ({engine.name})")
        interrupted = False
        if todo:
            try:
                _run(engine, todo, needed, store, cells)
            except KeyboardInterrupt:
                interrupted = True
        return write_summary(store, cells, engine.name, interrupted)


def _run(engine: Engine, todo: list[Cell], needed: list[str], store: Store, cells: list[Cell]) -> None:
    start = time.monotonic()
    with contextlib.closing(engine.run(todo, store, needed)) as outcomes:
        for number, (cell, outcome) in enumerate(outcomes, 1):
            record = store.save(cell, outcome)
            how = "FAILED, " + outcome.error if record["state"] == "failed" else "gates hold"
            how = how if record["state"] == "failed" or record["passed"] else "a gate does not hold"
            left = (time.monotonic() - start) / number * (len(todo) - number)
            rest = f"; about {left / 60:.0f} min left" if left >= 60 else ""
            say(f"[{number}/{len(todo)}] {cell.name}: {how} ({outcome.seconds:.0f} s{rest})")
            write_summary(store, cells, engine.name, interrupted=False)


def write_summary(store: Store, cells: list[Cell], engine: str, interrupted: bool) -> dict[str, Any]:
    """Write ``sweep.json`` and ``sweep.md`` from the records as they are, and return the document."""
    records = []
    for cell in cells:
        found = store.record(cell)
        records.append(found if found is not None and found["key"] == cell.key else head(cell, "pending"))
    document = {
        "format": FORMAT_VERSION,
        "folder": str(store.out),
        "engine": engine,
        "interrupted": interrupted,
        "passed": all(record["state"] == "done" and record["passed"] for record in records),
        "rows": table.rows(records),
        "cells": records,
    }
    write_whole(store.out / SUMMARY, json_text(document) + "\n")
    write_whole(store.out / TABLE, table.markdown(document))
    return document


def export_runtimes(wishes: Wishes) -> list[str]:
    """The runtimes that an export runs by itself; those that were asked for are checked.

    Raises:
        TieqError: if one that was asked for is not known or takes none of the containers.
    """
    from tieq.runtimes import runtime, runtimes

    suffixes = {_SUFFIXES.get(name, f".{name}") for name in wishes.formats or DEFAULT_FORMATS}
    for name in wishes.runtimes:
        adapter = runtime(name)
        if not suffixes & set(adapter.suffixes):
            raise TieqError(
                f"runs {' and '.join(adapter.suffixes)} files, and the cells write {' and '.join(sorted(suffixes))}.",
                where=f"--runtime {name}",
                todo="Leave it out, or add its --format.",
            )
    return [name for name, adapter in runtimes().items() if adapter.default and suffixes & set(adapter.suffixes)]


def exit_code(document: dict[str, Any]) -> int:
    """0 all cells done and all gates hold, 1 a gate does not, 2 a cell failed, 130 interrupted."""
    if document["interrupted"]:
        return 130
    if any(cell["state"] != "done" for cell in document["cells"]):
        return 2
    return 0 if document["passed"] else 1
