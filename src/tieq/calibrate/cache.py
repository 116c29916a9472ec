"""Whole calibrations kept in the user's cache, so that a second command on the same model and text measures nothing.

A file is named by the SHA-256 of everything that the measurement follows from; it is used only if it says the same and
its content has the digest that it was written with. ``TIEQ_CACHE`` moves the folder; ``TIEQ_NO_CACHE`` and the option
``--no-cache`` leave it alone.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from tieq.calibrate.statistics import FORMAT_VERSION, Statistics
from tieq.errors import TieqError
from tieq.kept import KeptFiles
from tieq.progress import say
from tieq.source.package import cache_folder

# A measurement with more bytes is made again instead.
LARGEST_FILE = 1_000_000_000
# Beyond this the files that were not used for longest go.
LARGEST_FOLDER = 4_000_000_000


class CalibrationCache:
    """The folder of kept calibrations.

    Args:
        folder: where, the user's cache by default.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cache_folder() / "calibration"

    @property
    def _files(self) -> KeptFiles:
        return KeptFiles(self.folder, ".safetensors", LARGEST_FOLDER)

    def load(self, identity: dict[str, Any]) -> tuple[Statistics, dict[str, Any]] | None:
        """The measurement of exactly this identity with what was saved beside it, or None."""
        path = self._files.path(_key(identity))
        if not path.is_file():
            return None
        try:
            statistics, about = Statistics.load(path)
        except TieqError as error:
            say(f"calibration: a kept file is not used: {error}")
            return None
        if about.get("identity") != identity:
            say(f"calibration: a kept file is not used: {path}: belongs to another model or text.")
            return None
        with contextlib.suppress(OSError):
            self._files.touch(path)
        say(f"calibration: reused from {about['made']} ({path.stem[:12]}); --no-cache measures again")
        return statistics, about["beside"]

    def save(self, statistics: Statistics, identity: dict[str, Any], beside: dict[str, Any]) -> None:
        """Keep a measurement; a disk that does not take it is said and does no other harm."""
        size = sum(value.nbytes for value in statistics.tensors(whole=True).values())
        if size > LARGEST_FILE:
            say(f"calibration: not kept for reuse, {size / 1e6:.0f} MB are more than {LARGEST_FILE / 1e6:.0f} MB")
            return
        made = dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        about = {"identity": identity, "beside": beside, "made": made}
        from safetensors import SafetensorError

        try:
            self._files.write(_key(identity), lambda path: statistics.save(path, about, whole=True))
        except (OSError, SafetensorError) as error:
            say(f"calibration: not kept for reuse ({error})")


def _key(identity: dict[str, Any]) -> str:
    text = json.dumps({**identity, "version": FORMAT_VERSION}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def usable_cache(wanted: bool = True) -> CalibrationCache | None:
    """The user's cache, or None where it is not wanted."""
    return CalibrationCache() if wanted and not os.environ.get("TIEQ_NO_CACHE") else None
