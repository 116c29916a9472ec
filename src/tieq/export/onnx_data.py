"""The external data file of an ONNX model: each payload is written once and may be named more than once."""

from __future__ import annotations

from collections.abc import Sequence
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


def joined(names: Sequence[str]) -> str:
    """One name for matrices that stand one after the other: ``layers.0.self_attn.q_proj+k_proj+v_proj.weight``."""
    if len(names) == 1:
        return names[0]
    parts = [name.split(".") for name in names]
    length = next(at for at, piece in enumerate(zip(*parts, strict=True)) if len(set(piece)) > 1)
    head = parts[0][:length]
    own = ["+".join(piece) for piece in zip(*(part[len(head) : -1] for part in parts), strict=True)]
    return ".".join([*head, *own, parts[0][-1]])


class DataFile:
    """Appends payloads to the data file and registers initializers that point into it.

    Args:
        file: the data file, open for writing.
        path: its path, beside the model.
        graph: the graph whose initializers are made.
        beside: the data file of another graph over the same file; payloads of the same name are not written again.
    """

    def __init__(self, file: BinaryIO, path: Path, graph: ir.Graph, beside: DataFile | None = None) -> None:
        self.file, self.path, self.graph = file, path, graph
        self._places: dict[str, tuple[int, int]] = {} if beside is None else beside._places
        self._kinds: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {} if beside is None else beside._kinds
        self._widened: dict[str, ir.Value] = {}

    def initializer(self, name: str, payload: str, values: NDArray[Any], shape: tuple[int, ...]) -> ir.Value:
        """An initializer over the bytes of ``payload``, which are written at their first use.

        ``shape`` may be any shape with as many elements as ``values``.
        """
        if name in self.graph.initializers:
            return self.graph.initializers[name]
        if payload not in self._places:
            self._places[payload] = self._append(values)
            self._kinds[payload] = values.dtype, values.shape
        return self._register(name, payload, _TYPES[values.dtype], shape)

    def _register(self, name: str, payload: str, dtype: ir.DataType, shape: tuple[int, ...]) -> ir.Value:
        offset, length = self._places[payload]
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

    def rows(self, name: str, payload: str, start: int, stop: int) -> ir.Value:
        """An initializer over some rows of a payload that has been written."""
        dtype, shape = self._kinds[payload]
        offset, length = self._places[payload]
        row = length // shape[0]
        part = f"{payload}[{start}:{stop}]"
        self._places[part] = offset + start * row, (stop - start) * row
        return self._register(name, part, _TYPES[dtype], (stop - start, *shape[1:]))

    def _append(self, values: NDArray[Any]) -> tuple[int, int]:
        content = np.ascontiguousarray(values)
        alignment = _PAGE if content.nbytes >= _LARGE else _LINE
        self.file.write(b"\0" * (-self.file.tell() % alignment))
        offset = self.file.tell()
        self.file.write(content.data)
        return offset, content.nbytes

    def product_view(self, names: Sequence[str], checkpoint: QuantizedCheckpoint) -> ir.Value:
        """Codes ``[rows, blocks, bytes]`` as MatMulNBits takes them; of several matrices one after the other."""
        name = joined(names)
        if name in self._kinds:  # the other graph has written it, or the other role
            dtype, shape = self._kinds[name]
            view = self.graph.initializers.get(f"{name}.codes")
            return self._register(f"{name}.codes", name, _TYPES[dtype], shape) if view is None else view
        packed = np.concatenate([checkpoint.packed(each)[0] for each in names])
        return self.initializer(f"{name}.codes", name, packed, packed.shape)

    def lookup_view(self, name: str, checkpoint: QuantizedCheckpoint) -> ir.Value:
        """The same bytes as ``[rows, blocks * bytes]``, for GatherBlockQuantized."""
        packed = checkpoint.packed(name)[0]
        return self.initializer(f"{name}.lookup_codes", name, packed, (packed.shape[0], packed[0].size))

    def scales(self, names: Sequence[str], checkpoint: QuantizedCheckpoint) -> tuple[list[ir.Node], ir.Value]:
        """Float scales ``[rows, blocks]``: see :meth:`widened`."""
        name = f"{joined(names)}.scales"
        return self.widened(name, np.concatenate([checkpoint.scales(each) for each in names]))

    def half_scales(self, name: str, checkpoint: QuantizedCheckpoint) -> ir.Value:
        """Scales ``[rows, blocks]`` as they are stored."""
        stored = f"{name}.scales"
        return self.initializer(stored, stored, checkpoint.scales(name), checkpoint.scales(name).shape)

    def constant(self, values: NDArray[np.int64]) -> ir.Value:
        """A small initializer in the graph itself; equal ones are one."""
        name = f"int64.{'.'.join(map(str, np.atleast_1d(values)))}" + ("" if values.ndim else ".scalar")
        if name not in self.graph.initializers:
            tensor = ir.tensor(values, name=name)
            value = ir.Value(
                name=name, shape=ir.Shape(values.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
            )
            self.graph.register_initializer(value)
        return self.graph.initializers[name]

    def widened(self, name: str, values: NDArray[np.float16]) -> tuple[list[ir.Node], ir.Value]:
        """An initializer as it is, in fp16, and float32 behind a Cast: the node at the first use, and its value."""
        if name in self._widened:
            return [], self._widened[name]
        stored = self.initializer(name, name, values, values.shape)
        cast = ir.node("Cast", [stored], attributes={"to": int(ir.DataType.FLOAT)})
        self._widened[name] = cast.outputs[0]
        return [cast], cast.outputs[0]

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
                if name not in self._places:
                    self._places[name] = self._append(values)
                offset, length = self._places[name]
                value.const_value = ir.ExternalTensor(
                    self.path.name,
                    offset,
                    length,
                    tensor.dtype,
                    shape=ir.Shape(values.shape),
                    name=name,
                    base_dir=str(self.path.parent),
                )
