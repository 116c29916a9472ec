"""Fetch the pinned files of a part: wheels with pip, packages with npm, Debian packages with apt; nothing is run.

Wheels and npm packages are pinned to a version and checked against the digest in ``pins.json``. Debian replaces
packages within a release, so those are pinned to the release, checked by apt against the release's signature, and
their versions and SHA-256 go on record.
"""

from __future__ import annotations

import base64
import hashlib
import os
import platform
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

from tieq.errors import MissingRuntimeError, TieqError
from tieq.source.package import file_sha256

_SECONDS = 1800
# Python 3.13 is what the emulated root holds.
_EMULATED = ("--python-version", "3.13", "--implementation", "cp", "--abi", "cp313", "--abi", "abi3", "--abi", "none")


def fetch_wheels(pins: list[list[str]], folder: Path, scratch: Path) -> list[dict[str, Any]]:
    """Download wheels (``[requirement, platform tag, sha256]``) and unpack them into ``folder``.

    Returns:
        What was fetched: file, SHA-256.

    Raises:
        TieqError: if pip cannot download one, or its SHA-256 is another.
    """
    found = []
    for requirement, tag, sha256 in pins:
        emulated = _EMULATED if tag.endswith("aarch64") and platform.machine() != "aarch64" else ()
        target = scratch / hashlib.sha256(requirement.encode()).hexdigest()
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--platform", tag, *emulated, "--dest", str(target), requirement]
        run(command, requirement)
        wheel = next(target.glob("*.whl"))
        _expect(file_sha256(wheel), sha256, wheel.name)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        found.append({"file": wheel.name, "sha256": sha256})
        wheel.unlink()
    return found


def fetch_npm(pins: list[list[str]], folder: Path, scratch: Path, npm: list[str]) -> list[dict[str, Any]]:
    """Download npm packages (``[name, version, integrity]``) and unpack them into ``folder/node_modules``.

    Args:
        pins: what to fetch; the integrity is the registry's ``sha512-`` digest.
        folder: where to.
        scratch: for the archives.
        npm: how npm is called. Its ``pack`` downloads an archive and runs no script of the package.

    Returns:
        What was fetched: file, integrity.

    Raises:
        TieqError: if npm cannot download one, or its digest is another.
    """
    found = []
    for name, version, integrity in pins:
        run([*npm, "pack", "--silent", f"{name}@{version}"], f"{name} {version}", cwd=scratch)
        archive = next(scratch.glob("*.tgz"))
        digest = hashlib.sha512(archive.read_bytes()).digest()
        _expect(f"sha512-{base64.b64encode(digest).decode()}", integrity, f"{name} {version}")
        target = folder / "node_modules" / name
        target.mkdir(parents=True)
        with tarfile.open(archive) as packed:
            _extract(packed, target)
        archive.unlink()
        found.append({"file": f"{name}@{version}", "integrity": integrity})
    return found


def fetch_debian(pins: dict[str, Any], folder: Path, scratch: Path) -> list[dict[str, Any]]:
    """Download Debian packages of a release with an apt configuration of our own, and unpack them.

    Nothing is installed: the tools' files go to ``folder/tools``, the ARM64 ones to ``folder/root``.

    Returns:
        What was fetched: file (with its version) and SHA-256.

    Raises:
        TieqError: if apt cannot download one of them.
    """
    environment = {**os.environ, "APT_CONFIG": str(_apt_configuration(scratch, pins["release"]))}
    run(["apt-get", "update", "-q"], f"Debian {pins['release']}", env=environment)
    found = []
    for target, names in (("tools", pins["tools"]), ("root", [f"{name}:arm64" for name in pins["root"]])):
        packages = scratch / target
        packages.mkdir()
        run(["apt-get", "download", "-q", *names], "Debian packages", cwd=packages, env=environment)
        for package in sorted(packages.glob("*.deb")):
            run(["dpkg", "-x", str(package), str(folder / target)], package.name)
            found.append({"file": package.name, "sha256": file_sha256(package)})
    # Debian's base-files makes this link; its other files are not wanted.
    (folder / "root" / "lib").symlink_to("usr/lib")
    return found


def _apt_configuration(scratch: Path, release: str) -> Path:
    """The system's own mirrors and keys, for another release and both architectures, with its state in ``scratch``."""
    own = platform.freedesktop_os_release().get("VERSION_CODENAME", release)
    for name in ("state/lists/partial", "cache/archives/partial", "parts"):
        (scratch / name).mkdir(parents=True)
    (scratch / "status").touch()
    etc = Path("/etc/apt")
    for source in (etc / "sources.list", *sorted((etc / "sources.list.d").glob("*"))):
        if source.suffix in (".list", ".sources") and source.is_file():
            text = source.read_text(encoding="utf-8")
            if own in text:
                (scratch / "parts" / source.name).write_text(text.replace(own, release), encoding="utf-8")
    configuration = scratch / "apt.conf"
    configuration.write_text(
        "\n".join(
            (
                'APT::Architecture "amd64";',
                'APT::Architectures {"amd64";"arm64";};',
                'APT::Sandbox::User "root";',
                f'Dir::State "{scratch / "state"}";',
                f'Dir::State::status "{scratch / "status"}";',
                f'Dir::Cache "{scratch / "cache"}";',
                'Dir::Etc::sourcelist "/dev/null";',
                f'Dir::Etc::sourceparts "{scratch / "parts"}";',
            )
        ),
        encoding="utf-8",
    )
    return configuration


def run(command: list[str], subject: str, *, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    """Run a downloader to its end.

    Raises:
        MissingRuntimeError: if the program is not there.
        TieqError: if it fails, with its last line, or takes longer than half an hour.
    """
    tool = Path(command[0]).name if "-m" not in command else command[command.index("-m") + 1]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError as error:
        raise MissingRuntimeError(
            f"is needed for {subject} and is not there.", where=tool, todo="Install it."
        ) from error
    except subprocess.TimeoutExpired as error:
        raise TieqError(f"took longer than {_SECONDS} s.", where=f"{tool} for {subject}", todo="Try again.") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise TieqError(
            f"{tool} failed ({said}).", where=subject, todo="Check the connection and try again; nothing was kept."
        )


def _extract(packed: tarfile.TarFile, target: Path) -> None:
    """Unpack without the leading folder that npm puts around a package; entries that lead outside are refused."""
    for member in packed.getmembers():
        _, _, name = member.name.partition("/")
        if not name or not (member.isfile() or member.isdir()):
            continue
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise TieqError(f"holds a path that leads outside ({member.name}).", where=str(packed.name))
        member.name = name
        packed.extract(member, target)


def _expect(found: str, wanted: str, subject: str) -> None:
    if found != wanted:
        raise TieqError(
            f"has digest {found}, expected {wanted}; it is not used.",
            where=subject,
            todo="Try again, or check the registry that this machine asks.",
        )
