"""What a cluster's worker does: look around, watch over a cell's process, send its files. Knows nothing of Ray."""

from __future__ import annotations

import dataclasses
import platform
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tieq import __version__
from tieq.artifact import staged
from tieq.errors import MissingRuntimeError, TieqError
from tieq.runtimes import check_ready
from tieq.sweep import child
from tieq.sweep.child import Outcome

# What a worker must be able to read in the sweep's folder, to prove that it is the same folder.
TOKEN = ".shared"


@dataclasses.dataclass(frozen=True)
class Order:
    """What a worker gets: a cell, where it goes, and what shows that this is the folder of the sweep."""

    cell: dict[str, Any]
    folder: str
    token: tuple[str, str]
    timeout: float | None
    command: tuple[str, ...] | None
    collect: bool


def look_around(needed: list[str], proof: tuple[str, str]) -> dict[str, Any]:
    """What a worker has: its version of tieq, the runtimes it lacks, and whether it sees the sweep's folder."""
    missing = ""
    try:
        check_ready(needed)
    except MissingRuntimeError as error:
        missing = error.sentence()
    return {"version": __version__, "missing": missing, "shared": _is_shared(proof), "host": platform.node()}


def work(order: Order) -> tuple[Outcome, dict[str, bytes] | None]:
    """A worker's task: run one cell in a child process; with ``collect`` its files come along."""
    if not order.collect:
        if not _is_shared(order.token):
            return Outcome("failed", not_shared(order.token, platform.node()).sentence()), None
        return child.run_child(order.cell, Path(order.folder), order.timeout, order.command), None
    with tempfile.TemporaryDirectory(prefix="tieq-worker-") as scratch:
        folder = Path(scratch) / "cell"
        outcome = child.run_child(order.cell, folder, order.timeout, order.command)
        return outcome, pack(folder)


def pack(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def unpack(files: dict[str, bytes], folder: Path) -> None:
    """Put a worker's log and artifact in place, the artifact as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    head = f"{child.ARTIFACT}/"
    artifact = {name.removeprefix(head): content for name, content in files.items() if name.startswith(head)}
    (folder / child.LOG).write_bytes(files.get(child.LOG, b""))
    if not artifact:
        shutil.rmtree(folder / child.ARTIFACT, ignore_errors=True)
        return
    with staged(folder / child.ARTIFACT) as made:
        for name, content in artifact.items():
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            (made / name).write_bytes(content)


def _is_shared(proof: tuple[str, str]) -> bool:
    try:
        return Path(proof[0]).read_text(encoding="utf-8") == proof[1]
    except OSError:
        return False


def not_shared(proof: tuple[str, str], host: str) -> TieqError:
    """The error that says what to do about a folder that is not shared."""
    return TieqError(
        f"is not the same folder on the worker {host}.",
        where=str(Path(proof[0]).parent),
        todo="Give an --out on storage that all machines share, or --collect to send artifacts back as bytes.",
    )
