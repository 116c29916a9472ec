"""The artifact folder on disk: built beside its target and put in place as a whole, so that none is half written."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tieq.errors import RefusedError, TieqError

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
# Beside model.onnx and over its data: the graph for generation, with logits for the last token alone.
GENERATION_GRAPH = "model_generate.onnx"
# A later validation's document, which the reports show instead of the export's own. All of these are written after the
# list of files is made.
VALIDATION = "validation.json"
UNLISTED = frozenset({MANIFEST, VALIDATION, "report.html", "report.md"})


def export_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an export's folder.

    Raises:
        TieqError: if the folder holds none, or that of another command.
    """
    if not (folder / MANIFEST).exists():
        raise TieqError(
            "the folder holds no manifest.json of tieq's.",
            where=str(folder),
            todo="Give the folder of an export, or name the container file itself.",
        )
    manifest = read_json(folder / MANIFEST)
    if not manifest.get("formats"):
        raise TieqError(
            "the folder holds a probe, a comparison or a plan, and no container.",
            where=str(folder),
            todo="Give the folder of an export.",
        )
    source = manifest.get("source")
    if not isinstance(source, dict) or not {"model", "fingerprint"} <= set(source) or "tied" not in manifest:
        raise TieqError("lacks what an export writes.", where=str(folder / MANIFEST), todo="Export again.")
    return manifest


def check_target(out: Path) -> None:
    """Refuse a target that holds something else than an artifact of tieq's.

    Raises:
        RefusedError: naming what is there.
    """
    if out.is_symlink() or out.is_file():
        raise RefusedError("is a file or a link, not a folder.", where=str(out), todo="Choose another --out.")
    if Path.cwd().is_relative_to(out.resolve()):
        raise RefusedError(
            "is the working folder or above it, which cannot be replaced from within.",
            where=str(out),
            todo="Choose another --out.",
        )
    foreign = _foreign_files(out) if _is_artifact(out) else []
    if foreign:
        raise RefusedError(
            f"holds {len(foreign)} files that are not the earlier artifact's, first '{foreign[0]}'.",
            where=str(out),
            todo="An artifact is replaced whole: move them away or choose another --out.",
        )
    if out.is_dir() and any(out.iterdir()) and not _is_artifact(out):
        raise RefusedError(
            "the folder is not empty and holds no tieq artifact, so it is not replaced.",
            where=str(out),
            todo="Choose another --out or empty it.",
        )


def check_source(out: Path, source: Path) -> None:
    """Refuse a target that holds the model itself: replacing it would delete the model.

    Raises:
        RefusedError: naming the model.
    """
    if source.resolve().is_relative_to(out.resolve()):
        raise RefusedError(
            "holds the model that is exported, and would be replaced.", where=str(out), todo="Choose another --out."
        )


def _foreign_files(folder: Path) -> list[str]:
    """Files in an artifact folder that its manifest does not list."""
    listed = {entry["path"] for entry in read_json(folder / MANIFEST).get("files", [])} | UNLISTED
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return sorted(set(found) - listed)


def _remove_stale(out: Path) -> None:
    """Remove what killed exports to the same target left behind: their process is gone."""
    for folder in out.parent.glob(f".{out.name}.partial-*"):
        owner = folder.name.removeprefix(f".{out.name}.partial-").partition("-")[0]
        if owner.isdecimal() and not _is_alive(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is somebody else's
        return True
    return True


def _is_artifact(folder: Path) -> bool:
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT_VERSION and "source" in content


@contextlib.contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Yield a new folder beside ``out`` that takes its place at the end; on any error ``out`` stays as it was."""
    made = [parent for parent in out.parents if not parent.exists()]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(out)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-{os.getpid()}-", dir=out.parent))
    except OSError as error:
        raise RefusedError(f"cannot be written ({error}).", where=str(out.parent)) from error
    try:
        folder.chmod(0o755)
        yield folder
        _swap(folder, out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


def _swap(folder: Path, out: Path) -> None:
    if not out.exists():
        folder.rename(out)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{out.name}.old-", dir=out.parent))
    out.rename(old / out.name)
    try:
        folder.rename(out)
    except BaseException:
        (old / out.name).rename(out)
        old.rmdir()
        raise
    shutil.rmtree(old, ignore_errors=True)


def json_text(content: Any) -> str:
    """JSON with a fixed layout; JSON has no infinity, so numbers that are not finite become null."""
    return json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False)


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def write_json(path: Path, content: Any) -> None:
    """Write a JSON document with a fixed layout."""
    path.write_text(json_text(content) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON document, an artifact's or a checkpoint's.

    Raises:
        RefusedError: if it is missing or no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RefusedError(f"cannot be read as JSON ({error}).", where=str(path)) from error
    if not isinstance(content, dict):
        raise RefusedError("is no JSON object.", where=str(path))
    return content


def copy_files(source: Path, target: Path, names: tuple[str, ...]) -> None:
    """Copy those of the named files that exist and are not there yet."""
    for name in names:
        if (source / name).exists() and not (target / name).exists():
            shutil.copyfile(source / name, target / name)
