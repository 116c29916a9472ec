"""What a container's tables look like, however it was written: the record that both structure proofs fill."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.ahead import ahead
from tieq.errors import TieqError
from tieq.records import Payload

RowReader = Callable[[slice], NDArray[np.float32]]
CHUNK_ROWS = 8192


@dataclasses.dataclass(frozen=True)
class Structure:
    """The vocabulary tables of one file.

    Attributes:
        container: ``onnx``, ``ort``, ``gguf`` or ``tflite``.
        file_bytes: bytes of the file and of its external data.
        rows: rows of the table.
        columns: its columns.
        payloads: every stored run of bytes that holds a table of this size or a row band of it, each once.
        read_lookup: decodes rows of the table that the lookup role reads, row bands added.
        read_logits: the same for the logits role.
        base_lookup: the same without row bands, None where the container has none.
        base_logits: the same for the logits role.
        scratch: what must stay alive for the readers (a temporary folder), or None.
    """

    container: str
    path: Path
    file_bytes: int
    rows: int
    columns: int
    payloads: tuple[Payload, ...]
    read_lookup: RowReader
    read_logits: RowReader
    base_lookup: RowReader | None = None
    base_logits: RowReader | None = None
    scratch: object = None

    @property
    def tables(self) -> tuple[Payload, ...]:
        """Payloads that hold a whole table."""
        return tuple(payload for payload in self.payloads if payload.band_rows is None)

    @property
    def bands(self) -> tuple[Payload, ...]:
        """Payloads that hold a row band."""
        return tuple(payload for payload in self.payloads if payload.band_rows is not None)

    @property
    def shared(self) -> bool:
        """Whether one table is read by both roles."""
        return any({"lookup", "logits"} <= set(payload.readers) for payload in self.tables)

    @property
    def table_bytes(self) -> int:
        """Bytes of all table payloads and row bands, scales included."""
        return sum(payload.nbytes for payload in self.payloads)

    def reader(self, role: str, *, base: bool = False) -> RowReader:
        """The reader of ``lookup`` or ``logits``, with row bands or without."""
        refined, plain = {
            "lookup": (self.read_lookup, self.base_lookup),
            "logits": (self.read_logits, self.base_logits),
        }[role]
        return plain if base and plain is not None else refined

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary for ``checks.json`` and the manifest."""
        return {
            "container": self.container,
            "file_bytes": self.file_bytes,
            "rows": self.rows,
            "columns": self.columns,
            "shared": self.shared,
            "table_bytes": self.table_bytes,
            "payloads": [dataclasses.asdict(payload) for payload in self.payloads],
        }


def prove(path: Path) -> Structure:
    """Open a container file and find its tables.

    Raises:
        TieqError: if the file is no such container, or damaged.
    """
    if path.suffix == ".gguf":
        from tieq.validate.gguf_structure import gguf_structure

        return gguf_structure(path)
    if path.suffix == ".onnx":
        from tieq.validate.onnx_structure import onnx_structure

        return onnx_structure(path)
    if path.suffix == ".ort":
        from tieq.validate.ort_structure import ort_structure

        return ort_structure(path)
    if path.suffix == ".tflite":
        from tieq.validate.litert_structure import litert_structure

        return litert_structure(path)
    raise TieqError(
        f"a '{path.suffix}' file cannot be validated.",
        where=str(path),
        todo="Give an .onnx, .ort, .gguf or .tflite file.",
    )


def first_difference(left: RowReader, right: RowReader, rows: int) -> int | None:
    """First row whose decoded values differ in any bit between two readers, or None.

    The sign of zero does not count: Q2_0's mirrored codes give ``-0.0`` where ONNX gives ``0.0``.
    """
    zero = np.float32(0)

    def first_in(start: int) -> int | None:
        chunk = slice(start, min(start + CHUNK_ROWS, rows))
        unequal = ((left(chunk) + zero).view(np.uint32) != (right(chunk) + zero).view(np.uint32)).any(axis=1)
        return start + int(unequal.argmax()) if unequal.any() else None

    for found in ahead(first_in, range(0, rows, CHUNK_ROWS)):
        if found is not None:
            return found
    return None
