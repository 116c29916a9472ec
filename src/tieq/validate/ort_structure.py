"""The tie in an ``.ort`` file: the runtime writes the loaded graph out as ONNX, unoptimized, and that is read."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from tieq.runtimes.onnxruntime import save_as_onnx
from tieq.validate.onnx_structure import onnx_structure
from tieq.validate.structure import Structure


def ort_structure(path: Path) -> Structure:
    """Find the tables of an ``.ort`` file.

    Raises:
        TieqError: if onnxruntime cannot load the file or the roles cannot be found.
    """
    folder = tempfile.TemporaryDirectory(prefix="tieq-ort-")
    copy = Path(folder.name) / "model.onnx"
    save_as_onnx(path, copy)
    found = onnx_structure(copy)
    payloads = tuple(
        dataclasses.replace(payload, location=payload.location.replace(copy.name, path.name))
        for payload in found.payloads
    )
    return dataclasses.replace(
        found, container="ort", path=path, file_bytes=path.stat().st_size, payloads=payloads, scratch=folder
    )
