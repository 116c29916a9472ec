"""Where cells run: an engine takes cells and gives their outcomes, in whatever order they come."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Generator
from typing import Protocol

from tieq.errors import MissingRuntimeError, TieqError
from tieq.progress import say
from tieq.sweep import child
from tieq.sweep.child import Outcome
from tieq.sweep.matrix import Cell
from tieq.sweep.store import Store

Outcomes = Generator[tuple[Cell, Outcome], None, None]
ENGINES = ("local", "ray")


class Engine(Protocol):
    """Runs cells. A cell whose process or machine died is run again, at most ``retries`` times."""

    @property
    def name(self) -> str:
        """What ``--engine`` takes."""
        ...

    def run(self, cells: list[Cell], store: Store, needed: list[str]) -> Outcomes:
        """Run cells, each into its folder of the store, and yield outcomes as they come.

        Closing the iterator ends what still runs.

        Args:
            cells: what to run.
            store: the folder of the sweep.
            needed: runtimes that must be ready where cells run.

        Raises:
            MissingRuntimeError: if one is not, before anything is run.
        """
        ...


@dataclasses.dataclass(frozen=True)
class LocalEngine:
    """One cell after another, each in a process of its own."""

    timeout: float | None = None
    retries: int = 1
    command: tuple[str, ...] | None = None
    name: str = "local"

    def run(self, cells: list[Cell], store: Store, needed: list[str]) -> Outcomes:
        """See :meth:`Engine.run`."""
        from tieq.runtimes import check_ready

        check_ready(needed)
        for cell in cells:
            folder = store.begin(cell)
            say(f"{cell.name} ... (log: {folder / child.LOG})")
            outcome = child.run_child(cell.to_json(), folder, self.timeout, self.command)
            attempts = 1
            while outcome.state == "crashed" and attempts <= self.retries:
                say(f"{cell.name}: {outcome.error} It is run again.")
                outcome = child.run_child(cell.to_json(), folder, self.timeout, self.command)
                attempts += 1
            yield cell, dataclasses.replace(outcome, attempts=attempts)


def make_engine(
    name: str = "local",
    *,
    address: str | None = None,
    workers: int | None = None,
    retries: int = 1,
    timeout: float | None = None,
    collect: bool = False,
) -> Engine:
    """The engine of that name.

    Args:
        name: ``local`` or ``ray``.
        address: Ray cluster to use; None starts Ray on this machine for the time of the sweep.
        workers: cells that run at once on Ray.
        retries: how often a cell whose process or worker died is run again.
        timeout: seconds that an attempt may take.
        collect: Ray workers send artifacts back as bytes instead of writing them into a shared folder.

    Raises:
        MissingRuntimeError: if Ray is asked for and not installed.
        TieqError: for another name, or an option of Ray's without Ray.
    """
    if name not in ENGINES:
        raise TieqError(f"--engine '{name}' is not known.", todo=f"Use {' or '.join(ENGINES)}.")
    if name == "local":
        given = {"--address": address is not None, "--workers": workers is not None, "--collect": collect}
        if used := [option for option, is_given in given.items() if is_given]:
            raise TieqError(
                f"{used[0]} is for a cluster; the local engine runs one cell at a time.", todo="Add --engine ray."
            )
        return LocalEngine(timeout, retries)
    if importlib.util.find_spec("ray") is None:
        raise MissingRuntimeError("is not installed.", where="--engine ray", todo="Get it: pip install 'tieq[ray]'.")
    from tieq.sweep.ray_engine import RayEngine

    return RayEngine(address, workers, timeout, retries, collect)
