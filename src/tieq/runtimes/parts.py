"""What can be set up: runtimes made of parts, each pinned in ``pins.json`` and kept in the user's cache."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import platform
from pathlib import Path
from typing import Any

from tieq.runtimes.base import Availability, Runtime
from tieq.source.package import cache_folder

RECORD = "setup.json"


@dataclasses.dataclass(frozen=True)
class Part:
    """One downloadable part of a runtime.

    Attributes:
        name: its name in ``pins.json``.
        about: what it is, with its version.
        megabytes: disk space when set up.
        pins: exactly what is fetched, and its digests.
    """

    name: str
    about: str
    megabytes: int
    pins: dict[str, Any]

    @property
    def folder(self) -> Path:
        """Where it is kept; other pins are kept elsewhere."""
        digest = hashlib.sha256(json.dumps(self.pins, sort_keys=True).encode()).hexdigest()
        return runtimes_folder() / f"{self.name}-{digest[:12]}"

    @property
    def ready(self) -> bool:
        """Whether it is set up."""
        return (self.folder / RECORD).exists()

    @property
    def possible(self) -> bool:
        """Whether this platform can use it."""
        here = this_platform()
        if here not in self.pins.get("platforms", [here]):
            return False
        if "debian" in self.pins and not _is_debian():
            return False
        wheels = self.pins.get("wheels", {"": []})
        return here in wheels or "" in wheels


def this_platform() -> str:
    """``linux x86_64``, ``darwin arm64``, ..."""
    return f"{platform.system().lower()} {platform.machine()}"


def runtimes_folder() -> Path:
    """The part of the user's cache that holds the runtimes."""
    return cache_folder() / "runtimes"


def settable() -> dict[str, tuple[Part, ...]]:
    """The parts of every runtime that can be set up."""
    pins = _pins()
    return {name: tuple(_part(each) for each in parts) for name, parts in pins["runtimes"].items()}


def part(name: str) -> Part:
    """The part of that name."""
    return _part(name)


def availability(name: str) -> Availability:
    """State of a runtime that is made of parts."""
    parts = settable()[name]
    version = ", ".join(each.about for each in parts)
    if all(each.ready for each in parts):
        return Availability(True, version, "")
    missing = [each for each in parts if not each.ready]
    cannot = [each.about for each in missing if not each.possible]
    if cannot:
        return Availability(False, "", f"not for {this_platform()}: {', '.join(cannot)}", possible=False)
    size = sum(each.megabytes for each in missing)
    return Availability(False, "", f"tieq runtimes setup {name} ({size} MB in {runtimes_folder()})")


class FetchedRuntime(Runtime):
    """A runtime that ``tieq runtimes setup`` fetches; it runs where it is named."""

    default = False

    def availability(self) -> Availability:
        """Whether its parts are in the cache."""
        return availability(self.name)


@functools.cache
def _pins() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(__file__).with_name("pins.json").read_text(encoding="utf-8"))
    return content


def _part(name: str) -> Part:
    pins = _pins()["parts"][name]
    rest = {key: value for key, value in pins.items() if key not in ("about", "megabytes")}
    return Part(name, pins["about"], pins["megabytes"], rest)


def _is_debian() -> bool:
    try:
        return platform.freedesktop_os_release().get("ID") == "debian"
    except OSError:
        return False
