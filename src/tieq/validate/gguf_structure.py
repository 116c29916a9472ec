"""The tie in a GGUF file: llama.cpp reads ``output.weight`` for the logits if it is there, else the lookup table."""

from __future__ import annotations

from pathlib import Path

from tieq.codecs import ggml
from tieq.errors import TieqError
from tieq.records import Payload
from tieq.source.gguf_file import GgufFile
from tieq.validate.structure import Structure

_LOOKUP, _LOGITS = TABLES = "token_embd.weight", "output.weight"


def gguf_structure(path: Path) -> Structure:
    """Find the tables of a GGUF file.

    Raises:
        TieqError: if the file is damaged or has no lookup table.
    """
    file = GgufFile(path)
    if _LOOKUP not in file.tensors:
        raise TieqError(f"there is no '{_LOOKUP}', so this is no language model that llama.cpp loads.", where=str(path))
    shape = file.tensors[_LOOKUP].info.shape
    logits = _LOGITS if _LOGITS in file.tensors else _LOOKUP
    payloads = []
    for name, tensor in file.tensors.items():
        if tensor.info.shape != shape:
            continue
        readers = [role for role, used in (("lookup", _LOOKUP), ("logits", logits)) if used == name]
        payloads.append(
            Payload(
                names=(name,),
                location=f"{path.name} at byte {tensor.offset}",
                nbytes=tensor.info.nbytes,
                scheme=tensor.kind,
                bits_per_weight=ggml.bits_per_weight(tensor.kind),
                readers=tuple(readers),
            )
        )
    return Structure(
        container="gguf",
        path=path,
        file_bytes=path.stat().st_size,
        rows=shape[0],
        columns=shape[1],
        payloads=tuple(payloads),
        read_lookup=lambda rows: file.read(_LOOKUP, rows),
        read_logits=lambda rows: file.read(logits, rows),
    )
