"""Write the GGUF container: the layout's metadata, quantized rows in GGUF's order, no ``output.weight`` when tied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.ahead import ahead
from tieq.codecs import ggml
from tieq.codecs.schemes import ggml_kind
from tieq.progress import stage
from tieq.quantize import QuantizedCheckpoint
from tieq.source.base import GgufLayout

MODEL = "model.gguf"
# For `ollama create NAME -f Modelfile`; Ollama takes template and parameters from the file's metadata.
MODELFILE = ("Modelfile", f"FROM ./{MODEL}\n")
_ARCHITECTURE, _FILE_TYPE = "general.architecture", "general.file_type"
# llama.cpp's LlamaFileType of a file whose body is of the scheme; 1024 marks a guess for mixtures.
_FILE_TYPES = {
    "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10, "q3_k": 12, "q4_k": 15, "q5_k": 17,
    "q6_k": 18, "iq4_nl": 25, "iq4_xs": 30, "q2_0": 41,
}  # fmt: skip
_GUESSED = 1024


def write_gguf(checkpoint: QuantizedCheckpoint, layout: GgufLayout, folder: Path, body: str) -> Path:
    """Write ``model.gguf`` and Ollama's ``Modelfile`` into ``folder``.

    Args:
        checkpoint: quantized matrices and float tensors.
        layout: metadata, and the placement of each of them.
        folder: an existing folder.
        body: the body's scheme, for the file type that llama.cpp shows.

    Returns:
        The path of the file.
    """
    import gguf

    path = folder / MODEL
    with stage("GGUF: pack and write"):
        writer = gguf.GGUFWriter(path, str(layout.metadata[_ARCHITECTURE].value))
        for key, entry in layout.metadata.items():
            if key in (_ARCHITECTURE, _FILE_TYPE):
                continue
            element = None if entry.element_kind is None else gguf.GGUFValueType(entry.element_kind)
            writer.add_key_value(key, entry.value, gguf.GGUFValueType(entry.kind), sub_type=element)
        writer.add_file_type(_FILE_TYPES.get(ggml_kind(body), _GUESSED))
        for name in [*checkpoint.matrices, *checkpoint.floats]:
            shape, stored_type, kind = tensor_info(checkpoint, layout, name)
            dtype = gguf.GGMLQuantizationType(ggml.GGML_TYPES[kind])
            size = int(np.prod(shape)) * stored_type.itemsize
            writer.add_tensor_info(layout.placements[name].name, shape, stored_type, size, raw_dtype=dtype)
        extras = {name: np.ascontiguousarray(values, np.float32) for name, values in sorted(layout.extras.items())}
        for name, values in extras.items():
            writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        # A few tensors in memory at a time.
        names = [*checkpoint.matrices, *checkpoint.floats]
        for rows in ahead(lambda name: tensor_rows(checkpoint, layout, name)[0], names):
            writer.write_tensor_data(rows)
        for values in extras.values():
            writer.write_tensor_data(values)
        writer.close()
    (folder / MODELFILE[0]).write_text(MODELFILE[1], encoding="utf-8")
    return path


def tensor_rows(checkpoint: QuantizedCheckpoint, layout: GgufLayout, name: str) -> tuple[NDArray[Any], str]:
    """A tensor's rows in GGUF's order and its ggml type."""
    place = layout.placements[name]
    if name in checkpoint.matrices:
        # Quantized matrices already stand as [outputs, inputs], the order that GGUF transposes to.
        rows = checkpoint.ggml_rows(name)
        return (rows if place.rows is None else rows[place.rows]), ggml_kind(checkpoint.scheme(name))
    values = place.to_gguf(checkpoint.tensor(name))
    return np.ascontiguousarray(values, dtype=np.float32), "f32"


def tensor_info(
    checkpoint: QuantizedCheckpoint, layout: GgufLayout, name: str
) -> tuple[tuple[int, ...], np.dtype[Any], str]:
    """Shape and type of :func:`tensor_rows`' array, and its ggml type, without packing a matrix."""
    if name not in checkpoint.matrices:
        values, kind = tensor_rows(checkpoint, layout, name)
        return values.shape, values.dtype, kind
    kind, (rows, columns) = ggml_kind(checkpoint.scheme(name)), checkpoint.extent(name)
    return (rows, ggml.row_bytes(kind, columns)), np.dtype(np.uint8), kind
