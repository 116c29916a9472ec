"""Read a GGUF file: metadata and tensor directory eagerly, tensor bytes lazily through a memory map.

Written here rather than taken from gguf-py because that reader makes several numpy views a string (20 s for
Gemma's vocabulary; this one takes under 2 s) and trusts every count it reads. Source: the GGUF specification,
version 2 and 3 (ggml ``docs/gguf.md``).
"""

from __future__ import annotations

import dataclasses
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.codecs import ggml
from tieq.errors import TieqError
from tieq.records import TensorInfo

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT_KEY = "general.alignment"


@dataclasses.dataclass(frozen=True)
class GgufValue:
    """A metadata value with its GGUF type number, and the element type for arrays."""

    value: Any
    kind: int
    element_kind: int | None = None


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """A directory entry: ``shape`` is row-major (ggml's extents reversed), ``kind`` a ggml type name."""

    info: TensorInfo
    kind: str
    offset: int

    @property
    def rows(self) -> int:
        """Product of all extents but the last."""
        return self.info.parameters // self.info.shape[-1] if self.info.parameters else 0


class _Cursor:
    """A position in the map that refuses to read past the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.position = path, data, 0

    def take(self, count: int) -> int:
        """Advance by ``count`` bytes and return where they begin."""
        start = self.position
        if count < 0 or start + count > len(self.data):
            raise TieqError(
                f"the header asks for {count} bytes at offset {start}, but the file has {len(self.data)}.",
                where=str(self.path),
                todo="The file is truncated or not a GGUF file; download it again.",
            )
        self.position = start + count
        return start

    def scalar(self, kind: int) -> Any:
        code = "<" + _SCALARS[kind]
        return struct.unpack_from(code, self.data, self.take(struct.calcsize(code)))[0]

    def text(self) -> str:
        length = self.scalar(10)
        start = self.take(length)
        return self.data[start : start + length].decode("utf-8", errors="replace")

    def value(self, kind: int) -> GgufValue:
        if kind == _STRING:
            return GgufValue(self.text(), kind)
        if kind in _SCALARS:
            return GgufValue(self.scalar(kind), kind)
        if kind != _ARRAY:
            raise TieqError(
                f"metadata has the unknown value type {kind}.",
                where=str(self.path),
                todo="The file is damaged or newer than tieq.",
            )
        element, count = self.scalar(4), self.scalar(10)
        if element in _SCALARS:
            dtype = np.dtype("<" + _SCALARS[element]) if element != 7 else np.dtype(bool)
            start = self.take(count * dtype.itemsize)
            values = np.frombuffer(self.data, dtype, count, start).tolist()
            return GgufValue(values, kind, element)
        if element != _STRING or count > len(self.data) // 8:
            raise TieqError(
                f"metadata has an array of {count} elements of type {element}.",
                where=str(self.path),
                todo="The file is damaged; download it again.",
            )
        return GgufValue([self.text() for _ in range(count)], kind, element)


class GgufFile:
    """An open GGUF file.

    Attributes:
        metadata: key to :class:`GgufValue`, in file order.
        tensors: name to :class:`GgufTensor`, in file order.
        version: of the format, 2 or 3.
        alignment: bytes that every tensor's offset is a multiple of.

    Raises:
        TieqError: if the file is not a whole GGUF file; memory stays bounded by the file's own size.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise TieqError("the file is too short for a GGUF header.", where=str(path))
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(path, self._map)
        magic, self.version = self._map[:4], struct.unpack_from("<I", self._map, 4)[0]
        if magic != b"GGUF" or self.version not in (2, 3):
            raise TieqError(
                f"not a little-endian GGUF file of version 2 or 3 (magic {magic!r}, version {self.version}).",
                where=str(path),
                todo="Convert it with a current llama.cpp first.",
            )
        cursor.take(8)
        tensor_count, value_count = cursor.scalar(10), cursor.scalar(10)
        self.metadata: dict[str, GgufValue] = {}
        self._spans: dict[str, slice] = {}
        for _ in range(value_count):
            start = cursor.position
            key = cursor.text()
            if key in self.metadata:
                raise TieqError(f"the metadata key '{key}' appears twice.", where=str(path))
            self.metadata[key] = cursor.value(cursor.scalar(4))
            self._spans[key] = slice(start, cursor.position)
        directory = [self._entry(cursor) for _ in range(tensor_count)]
        alignment = self.get(_ALIGNMENT_KEY, 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise TieqError(f"the alignment {alignment} is not a power of two.", where=str(path))
        self.alignment = alignment
        base = (cursor.position + alignment - 1) // alignment * alignment
        self.tensors: dict[str, GgufTensor] = {}
        for name, shape, kind_number, offset in directory:
            if offset % alignment:
                raise TieqError(f"tensor '{name}' begins off the alignment of {alignment}.", where=str(path))
            if name in self.tensors:
                raise TieqError(f"the tensor '{name}' appears twice.", where=str(path))
            self.tensors[name] = self._tensor(name, shape, kind_number, base + offset)

    def _entry(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name = cursor.text()
        dimensions = cursor.scalar(4)
        if dimensions > 4:
            raise TieqError(f"tensor '{name}' claims {dimensions} dimensions.", where=str(self.path))
        extents = [cursor.scalar(10) for _ in range(dimensions)]
        return name, tuple(reversed(extents)), cursor.scalar(4), cursor.scalar(10)

    def _tensor(self, name: str, shape: tuple[int, ...], number: int, offset: int) -> GgufTensor:
        kind = ggml.TYPE_NAMES.get(number)
        if kind is None:
            raise TieqError(f"tensor '{name}' has the unknown ggml type {number}.", where=str(self.path))
        info = TensorInfo(name, shape, kind.upper(), 0)
        if not shape or info.parameters == 0:
            raise TieqError(
                f"tensor '{name}' is empty (shape {list(shape)}).",
                where=str(self.path),
                todo="The file is damaged; convert the model again.",
            )
        if shape[-1] % ggml.block_size(kind):
            raise TieqError(
                f"tensor '{name}' has rows of {shape[-1]}, which blocks of {ggml.block_size(kind)} do not divide.",
                where=str(self.path),
            )
        nbytes = int(info.parameters * ggml.bits_per_weight(kind) / 8)
        if offset + nbytes > len(self._map):
            raise TieqError(
                f"tensor '{name}' needs bytes {offset} to {offset + nbytes}, but the file has {len(self._map)}.",
                where=str(self.path),
                todo="The file is truncated; download it again.",
            )
        return GgufTensor(dataclasses.replace(info, nbytes=nbytes), kind, offset)

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata value under ``key``, or ``default``."""
        found = self.metadata.get(key)
        return default if found is None else found.value

    @property
    def architecture(self) -> str:
        """``general.architecture``."""
        return str(self.get("general.architecture", ""))

    def raw_metadata(self, key: str) -> bytes:
        """Stored bytes of a metadata entry: its key, type and value."""
        return self._map[self._spans[key]]

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Stored bytes of a tensor as rows ``[rows, row_bytes]``, without a copy."""
        tensor = self.tensors[name]
        flat = np.frombuffer(self._map, np.uint8, tensor.info.nbytes, tensor.offset)
        return flat.reshape(tensor.rows, -1)

    def read(self, name: str, rows: slice = slice(None)) -> NDArray[np.float32]:
        """Decode a tensor, or a slice along its first axis, to float32 in its row-major shape."""
        tensor = self.tensors[name]
        if len(tensor.info.shape) == 1:
            return ggml.decode(self.raw(name), tensor.kind).reshape(-1)[rows]
        decoded = ggml.decode(self.raw(name)[rows], tensor.kind)
        return decoded.reshape(-1, *tensor.info.shape[1:])
