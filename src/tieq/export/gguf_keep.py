"""Write a GGUF file again with other vocabulary tables; every other tensor and all metadata keep their bytes.

The bytes are put together here because gguf-py's writer encodes every metadata value anew; these are copied as they
stand. Layout: the GGUF specification (ggml ``docs/gguf.md``).
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from tieq.codecs import ggml
from tieq.export.gguf import MODEL, MODELFILE, tensor_rows
from tieq.progress import stage
from tieq.quantize import QuantizedCheckpoint
from tieq.source.base import GgufLayout
from tieq.source.gguf_file import GgufFile
from tieq.source.gguf_source import LOGITS, LOOKUP


def write_kept_gguf(checkpoint: QuantizedCheckpoint, layout: GgufLayout, source: GgufFile, folder: Path) -> Path:
    """Write ``model.gguf`` into ``folder``: ``source`` with the checkpoint's tables in the place of its own.

    Order, alignment and format version stay. A table of the source that the checkpoint lacks is left out: the two
    roles then share the other one. Kept tensors go from the source's memory map to the file and are never held.

    Args:
        checkpoint: the new tables.
        layout: the placement of each of them.
        source: the file whose body is kept.
        folder: an existing folder.

    Returns:
        The path of the file.
    """
    path = folder / MODEL
    with stage("GGUF: copy the body, write the table"):
        tables = {layout.placements[name].name: tensor_rows(checkpoint, layout, name) for name in checkpoint.matrices}
        tensors: dict[str, tuple[NDArray[Any], str]] = {}
        for name, tensor in source.tensors.items():
            if name in tables:
                tensors[name] = tables[name]
            elif name not in (LOOKUP, LOGITS):
                tensors[name] = source.raw(name), tensor.kind
        with path.open("wb") as file:
            file.write(_header(source, tensors))
            _pad(file, source.alignment)
            for data, _ in tensors.values():
                file.write(np.ascontiguousarray(data).data)
                _pad(file, source.alignment)
    (folder / MODELFILE[0]).write_text(MODELFILE[1], encoding="utf-8")
    return path


def _header(source: GgufFile, tensors: dict[str, tuple[NDArray[Any], str]]) -> bytes:
    """Counts, the source's metadata as it stands, and the tensor directory."""
    parts = [struct.pack("<4sIQQ", b"GGUF", source.version, len(tensors), len(source.metadata))]
    parts += [source.raw_metadata(key) for key in source.metadata]
    offset = 0
    for name, (data, kind) in tensors.items():
        label, shape = name.encode(), source.tensors[name].info.shape
        parts.append(struct.pack("<Q", len(label)) + label)
        parts.append(struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape)))
        parts.append(struct.pack("<IQ", ggml.GGML_TYPES[kind], offset))
        offset += data.nbytes + -data.nbytes % source.alignment
    return b"".join(parts)


def _pad(file: BinaryIO, alignment: int) -> None:
    file.write(bytes(-file.tell() % alignment))
