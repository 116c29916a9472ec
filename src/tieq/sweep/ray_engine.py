"""Cells as tasks of a Ray cluster. A worker only watches over the cell's process, as the local engine does."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tieq import __version__
from tieq.errors import MissingRuntimeError, TieqError
from tieq.progress import say
from tieq.sweep.child import Outcome
from tieq.sweep.engines import Outcomes
from tieq.sweep.matrix import Cell
from tieq.sweep.ray_worker import TOKEN, Order, look_around, not_shared, unpack, work
from tieq.sweep.store import Store

_OBJECT_STORE_BYTES = 100_000_000
_PROBE_SECONDS = 5.0


@dataclasses.dataclass
class _Attempt:
    cell: Cell
    attempts: int = 1


@dataclasses.dataclass(frozen=True)
class RayEngine:
    """Runs up to ``workers`` cells at once; by default one on each machine of the cluster.

    Workers write into the sweep's folder, which must be storage that all machines share; with ``collect`` each sends
    its artifact back as bytes. Models and texts that are named by path must be readable on the workers either way.
    """

    address: str | None = None
    workers: int | None = None
    timeout: float | None = None
    retries: int = 1
    collect: bool = False
    command: tuple[str, ...] | None = None
    name: str = "ray"

    def run(self, cells: list[Cell], store: Store, needed: list[str]) -> Outcomes:
        """See :meth:`tieq.sweep.engines.Engine.run`."""
        own = self._connect()
        import ray

        token = store.out / TOKEN
        try:
            content = secrets.token_hex(16)
            token.write_text(content, encoding="utf-8")
            proof = (str(token), content)
            share = self._check_cluster(needed, proof)

            def order(cell: Cell) -> Order:
                where = str(store.begin(cell))
                return Order(cell.to_json(), where, proof, self.timeout, self.command, self.collect)

            yield from self._drive(cells, order, *share)
        finally:
            token.unlink(missing_ok=True)
            if own:
                ray.shutdown()

    def _connect(self) -> bool:
        """Whether Ray was started or joined here, and is to be left at the end."""
        # Read when Ray is imported; a sweep reports to nobody.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        if ray.is_initialized():
            return False
        options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        if self.address is None:
            options["address"], options["include_dashboard"] = "local", False
            options["num_cpus"] = max(self.workers or 1, os.cpu_count() or 1)
            if not self.collect:
                # A cell's own process does the work, and its results are small.
                options["object_store_memory"] = _OBJECT_STORE_BYTES
        else:
            options["address"] = self.address
        try:
            _probe(options["address"])
            ray.init(**options)
        except (OSError, ValueError, RuntimeError) as error:
            ray.shutdown()
            advice = "Start one with `ray start --head`, and set RAY_AUTH_MODE as it is set there."
            raise TieqError(
                f"no Ray cluster can be {'joined' if self.address else 'started'} ({_first_line(error)}).",
                where=f"--address {self.address}" if self.address else "--engine ray",
                todo=advice if self.address else "Use --engine local, or join a cluster with --address.",
            ) from error
        return True

    def _check_cluster(self, needed: list[str], proof: tuple[str, str]) -> tuple[int, int]:
        """Ask a worker whether cells can run there; returns cells at once and processors for each."""
        import ray

        nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        workers = self.workers or max(1, sum(count > 0 for count in nodes))
        each = processors_each(nodes, workers)
        say(f"ray: {len(nodes)} machine(s), {workers} cell(s) at once, {each} of {sum(nodes)} processors for each")
        try:
            found = ray.get(ray.remote(num_cpus=1, max_retries=2)(look_around).remote(needed, proof))
        except ray.exceptions.RayError as error:
            raise TieqError(
                f"a worker cannot run tieq ({_last_line(error)}).",
                where="--engine ray",
                todo=f"Install tieq {__version__} on every machine of the cluster.",
            ) from error
        if found["version"] != __version__:
            raise TieqError(
                f"the workers have tieq {found['version']}, here it is {__version__}.",
                where="--engine ray",
                todo="Install the same version on every machine of the cluster.",
            )
        if found["missing"]:
            raise MissingRuntimeError(found["missing"], where=f"workers ({found['host']})")
        if not found["shared"] and not self.collect:
            raise not_shared(proof, found["host"])
        return workers, each

    def _drive(self, cells: Sequence[Cell], order: Callable[[Cell], Order], workers: int, each: int) -> Outcomes:
        import ray

        # Ray's own retries are off: here the attempts are counted, and a crashed process counts like a lost worker.
        task = ray.remote(num_cpus=each, max_retries=0)(work)
        waiting = [_Attempt(cell) for cell in reversed(cells)]
        running: dict[Any, tuple[_Attempt, Order]] = {}
        try:
            while waiting or running:
                while waiting and len(running) < workers:
                    item = waiting.pop()
                    say(f"{item.cell.name} ...")
                    made = order(item.cell)
                    running[task.remote(made)] = item, made
                (ready, *_), _ = ray.wait(list(running), num_returns=1)
                item, made = running.pop(ready)
                outcome, files = _fetch(ready)
                if outcome.state == "crashed" and item.attempts <= self.retries:
                    say(f"{item.cell.name}: {outcome.error} It is run again.")
                    waiting.append(dataclasses.replace(item, attempts=item.attempts + 1))
                    continue
                if files is not None:
                    unpack(files, Path(made.folder))
                yield item.cell, dataclasses.replace(outcome, attempts=item.attempts)
        finally:
            for left in running:
                ray.cancel(left, force=True)


def _probe(address: str) -> None:
    """Fail at once where nobody listens; Ray itself tries for minutes."""
    found = re.fullmatch(r"(?:ray://)?\[?([^\]]+)\]?:(\d+)", address)
    if found is not None:
        socket.create_connection((found[1], int(found[2])), timeout=_PROBE_SECONDS).close()


def processors_each(nodes: Sequence[int], workers: int) -> int:
    """The most processors that a cell can have where ``workers`` of them are to fit on machines of these sizes."""
    for each in range(max(nodes, default=1), 1, -1):
        if sum(count // each for count in nodes) >= workers:
            return each
    return 1


def _fetch(ready: Any) -> tuple[Outcome, dict[str, bytes] | None]:
    import ray

    try:
        found: tuple[Outcome, dict[str, bytes] | None] = ray.get(ready)
        return found
    except ray.exceptions.RayTaskError as error:
        return Outcome("failed", f"the worker's task failed ({_last_line(error)})."), None
    except ray.exceptions.RayError as error:
        return Outcome("crashed", f"its worker died ({type(error).__name__})."), None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].strip()


def _last_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
