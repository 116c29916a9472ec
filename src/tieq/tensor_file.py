"""A safetensors file that is written a tensor at a time, so that a model never stands in memory as a whole.

The header comes first in the file and is known last: room for it is left and filled at the end.
Source: safetensors, "Format".
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

_TYPES = {
    np.dtype(np.uint8): "U8",
    np.dtype(np.int32): "I32",
    np.dtype(np.float16): "F16",
    np.dtype(np.float32): "F32",
}


class TensorFile:
    """Writes one file; use as a context manager, which removes the file where :meth:`close` was not reached.

    Args:
        path: file to write.
        room: bytes for the header.
    """

    def __init__(self, path: Path, room: int) -> None:
        self._room = -(-room // 8) * 8
        self._file = path.open("wb")
        self._file.seek(8 + self._room)
        self._entries: dict[str, Any] = {}
        self._end = 0
        self._path, self._is_whole = path, False

    def add(self, name: str, values: NDArray[Any]) -> None:
        """Append a tensor."""
        content = np.ascontiguousarray(values)
        begin, self._end = self._end, self._end + content.nbytes
        self._entries[name] = {
            "dtype": _TYPES[content.dtype],
            "shape": list(content.shape),
            "data_offsets": [begin, self._end],
        }
        self._file.write(content.data if content.size else b"")

    def close(self, metadata: dict[str, str]) -> None:
        """Write the header.

        Raises:
            ValueError: if it does not fit into the room that was left.
        """
        header = json.dumps({"__metadata__": metadata, **self._entries}, separators=(",", ":")).encode()
        if len(header) > self._room:
            raise ValueError(f"a header of {len(header)} bytes in room for {self._room}")
        self._file.seek(0)
        self._file.write(self._room.to_bytes(8, "little") + header.ljust(self._room))
        self._file.close()
        self._is_whole = True

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if not self._is_whole:
            self._path.unlink(missing_ok=True)
