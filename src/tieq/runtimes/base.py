"""What a runtime adapter offers: is it here, how to get it, and logits for tokens from a file."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tieq.errors import TieqError


@dataclasses.dataclass(frozen=True)
class Availability:
    """State of a runtime on this machine: version when ready, else how to get it."""

    ready: bool
    version: str
    how: str


class Session(Protocol):
    """A loaded model file."""

    def logits(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Logits ``[length, vocab]`` of one sequence ``[length]``, from an empty cache."""
        ...


class Runtime(abc.ABC):
    """One runtime. ``name`` is what ``--runtime`` takes, ``suffixes`` the files that it runs."""

    name: str
    suffixes: tuple[str, ...]
    purpose: str

    @abc.abstractmethod
    def availability(self) -> Availability:
        """Whether the runtime can be used here."""

    @abc.abstractmethod
    def modes(self, path: Path) -> Iterator[tuple[str, AbstractContextManager[Session]]]:
        """The ways in which the runtime can run the file, each with its session (``""`` for the only way)."""


def check_ids(ids: NDArray[np.int64], rows: int) -> None:
    """Refuse ids that are no rows: ONNX's Gather would wrap negative ones silently.

    Raises:
        TieqError: naming the first bad id.
    """
    bad = ids[(ids < 0) | (ids >= rows)]
    if bad.size:
        raise TieqError(f"token id {int(bad[0])} is not a row of the table (0 to {rows - 1}).", where="token ids")
