"""The external data file of an ONNX model: each payload is written once and may be named more than once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from tieq.codecs.schemes import SCHEMES
from tieq.quantize import QuantizedCheckpoint

# Large payloads begin on a page, so that a runtime can map them; small ones only on a cache line.
_PAGE, _LINE, _LARGE = 4096, 64, 1 << 20
_TYPES = {
    np.dtype(np.uint8): ir.DataType.UINT8,
    np.dtype(np.uint16): ir.DataType.UINT16,
    np.dtype(np.int32): ir.DataType.INT32,
    np.dtype(np.float16): ir.DataType.FLOAT16,
    np.dtype(np.float32): ir.DataType.FLOAT,
}


class DataFile:
    """Appends payloads to the data file and registers initializers that point into it.

    Args:
        file: the data file, open for writing.
        path: its path, beside the model.
        graph: the graph whose initializers are made.
    """

    def __init__(self, file: BinaryIO, path: Path, graph: ir.Graph) -> None:
        self.file, self.path, self.graph = file, path, graph
        self._places: dict[str, tuple[int, int]] = {}

    def initializer(self, name: str, payload: str, values: NDArray[Any], shape: tuple[int, ...]) -> ir.Value:
        """An initializer over the bytes of ``payload``, which are written at their first use.

        ``shape`` may be any shape with as many elements as ``values``.
        """
        if name in self.graph.initializers:
            return self.graph.initializers[name]
        if payload not in self._places:
            self._places[payload] = self._append(values)
        offset, length = self._places[payload]
        dtype = _TYPES[values.dtype]
        tensor = ir.ExternalTensor(
            location=self.path.name,
            offset=offset,
            length=length,
            dtype=dtype,
            shape=ir.Shape(shape),
            name=name,
            base_dir=str(self.path.parent),
        )
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype), const_value=tensor)
        self.graph.register_initializer(value)
        return value

    def _append(self, values: NDArray[Any]) -> tuple[int, int]:
        content = np.ascontiguousarray(values)
        alignment = _PAGE if content.nbytes >= _LARGE else _LINE
        self.file.write(b"\0" * (-self.file.tell() % alignment))
        offset = self.file.tell()
        self.file.write(content.data)
        return offset, content.nbytes

    def product_view(self, name: str, checkpoint: QuantizedCheckpoint) -> tuple[ir.Value, ir.Value]:
        """Codes ``[rows, blocks, bytes]`` and float scales ``[rows, blocks]`` as MatMulNBits takes them."""
        packed, scales = checkpoint.packed(name)
        codes = self.initializer(f"{name}.codes", name, packed, packed.shape)
        return codes, self._scales(name, scales)

    def lookup_view(self, name: str, checkpoint: QuantizedCheckpoint) -> tuple[ir.Value, ir.Value]:
        """The same bytes as codes ``[rows, blocks * bytes]``, and the same scales, for GatherBlockQuantized."""
        packed, scales = checkpoint.packed(name)
        codes = self.initializer(f"{name}.lookup_codes", name, packed, (packed.shape[0], packed[0].size))
        return codes, self._scales(name, scales)

    def _scales(self, name: str, scales: NDArray[np.float16]) -> ir.Value:
        # The operators take the scales in the activations' type; widening fp16 changes no value.
        return self.initializer(f"{name}.scales", f"{name}.scales", scales.astype(np.float32), scales.shape)

    def matrix(self, name: str, checkpoint: QuantizedCheckpoint) -> ir.Value:
        """A matrix that was only cast: fp16 ``[rows, columns]``."""
        assert checkpoint.scheme(name) not in SCHEMES
        values = checkpoint.tensor(name)
        return self.initializer(f"{name}.f16", name, values, values.shape)

    def move_out(self, minimum_bytes: int) -> None:
        """Move the graph's remaining large initializers into the data file."""
        for name, value in sorted(self.graph.initializers.items()):
            tensor = value.const_value
            if tensor is None or (isinstance(tensor, ir.ExternalTensor) and tensor.location == self.path.name):
                continue
            values = tensor.numpy()
            if values.nbytes >= minimum_bytes and values.dtype in _TYPES:
                offset, length = self._append(values)
                value.const_value = ir.ExternalTensor(
                    self.path.name,
                    offset,
                    length,
                    tensor.dtype,
                    shape=ir.Shape(values.shape),
                    name=name,
                    base_dir=str(self.path.parent),
                )
