"""A folder of files in the user's cache that can be made again: written whole or not at all, oldest removed first."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PARTIAL = ".partial-"
_STALE_SECONDS = 3600.0


class KeptFiles:
    """Files by key, up to so many bytes together.

    Args:
        folder: where.
        suffix: how their names end.
        largest: beyond this many bytes, the files that were not used for longest go.
    """

    def __init__(self, folder: Path, suffix: str, largest: int) -> None:
        self.folder, self._suffix, self._largest = folder, suffix, largest

    def path(self, key: str) -> Path:
        """Where the file of a key is or would be."""
        return self.folder / (key + self._suffix)

    def touch(self, path: Path) -> None:
        """Remember that a file was used."""
        os.utime(path)

    def write(self, key: str, save: Callable[[Path], None]) -> None:
        """Let ``save`` write the file and put it in place.

        Raises:
            OSError: if the disk does not take it.
        """
        target = self.path(key)
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=self.folder) as work:
            written = Path(work) / target.name
            save(written)
            written.replace(target)
        self._remove_oldest()

    def _remove_oldest(self) -> None:
        for left in self.folder.glob(f"{_PARTIAL}*"):  # of commands that were killed
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
        states = sorted(
            ((path.stat(), path) for path in self.folder.glob(f"*{self._suffix}")), key=lambda found: found[0].st_mtime
        )
        total = sum(state.st_size for state, _ in states)
        for state, path in states[:-1]:  # the one just written stays
            if total <= self._largest:
                break
            path.unlink(missing_ok=True)
            total -= state.st_size


def content_digest(tensors: Mapping[str, NDArray[Any]]) -> str:
    """SHA-256 over names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {value.shape}\n".encode())
        digest.update(np.ascontiguousarray(value).data)
    return digest.hexdigest()
