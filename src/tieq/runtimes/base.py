"""What a runtime adapter offers: is it here, how to get it, and logits for tokens from a file."""

from __future__ import annotations

import abc
import dataclasses
import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tieq.errors import TieqError


@dataclasses.dataclass(frozen=True)
class Availability:
    """State of a runtime on this machine: version when ready, else how to get it or why it cannot be had."""

    ready: bool
    version: str
    how: str
    possible: bool = True

    @property
    def state(self) -> str:
        """``ready``, ``can be set up`` or ``not on this platform``."""
        return "ready" if self.ready else "can be set up" if self.possible else "not on this platform"


class Session(Protocol):
    """A loaded model file."""

    def logits(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Logits ``[length, vocab]`` of one sequence ``[length]``, from an empty cache."""
        ...


@runtime_checkable
class Decoder(Protocol):
    """A session that can also decode token by token."""

    def decode(self, prompt: NDArray[np.int64], steps: int) -> float:
        """Seconds of ``steps`` greedy single-token steps after ``prompt`` ``[length]``, the prompt's time left out."""
        ...


class Runtime(abc.ABC):
    """One runtime.

    Attributes:
        name: what ``--runtime`` takes.
        suffixes: the files that it runs.
        purpose: what it stands for, in a few words.
        default: whether a validation that names no runtime uses it.
        tokens: tokens that one validation runs through it at most, where it is slow (an emulator); the head of every
            sequence is taken. None for all.
        platform: where it computes.
    """

    name: str
    suffixes: tuple[str, ...]
    purpose: str
    default: bool = True
    tokens: int | None = None
    platform: str = f"{platform.system()} {platform.machine()}"

    @abc.abstractmethod
    def availability(self) -> Availability:
        """Whether the runtime can be used here."""

    def bound(self, mode: str, first: str) -> float | None:
        """Bound on KL to the first runtime of the same weights, nats per token, where it is another than the gates'.

        Args:
            mode: one of :meth:`modes`.
            first: name and mode of the first runtime.
        """
        return None

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
