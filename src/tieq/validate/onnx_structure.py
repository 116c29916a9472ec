"""The tie in an ONNX file: which initializers the lookup and the logits read, and over which bytes.

Works on any decoder graph: the lookup is the gather that ``input_ids`` indexes, the logits matrix is the nearest
product upstream of the ``logits`` output. A table payload is a distinct run of bytes that holds as many weights as
the lookup table, whoever reads it.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.codecs.schemes import unpack_codes
from tieq.errors import TieqError
from tieq.records import Payload
from tieq.validate.onnx_bytes import Place, place_of, read_array
from tieq.validate.structure import Structure

_GATHERS = {"Gather", "GatherBlockQuantized"}
_PRODUCTS = {"MatMul", "MatMulNBits", "Gemm", "FusedMatMul"}
# Operators that hand a table on unchanged, apart from its shape, orientation or float type.
_CARRIERS = {"Transpose", "Identity", "Cast", "Reshape", "DequantizeLinear"}


@dataclasses.dataclass(frozen=True)
class _Use:
    """One role's operator: the initializer it reads, its scales, and the block geometry (bits 0 for float)."""

    weights: str
    scales: str | None
    bits: int
    block: int
    transposed: bool
    zero_points: str | None = None


def onnx_structure(path: Path) -> Structure:
    """Find the tables of an ONNX file and of its external data.

    Raises:
        TieqError: if the file is damaged or the roles cannot be found in its graph.
    """
    import onnx

    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # protobuf's exceptions share no base class
        raise TieqError(f"cannot be read as ONNX ({error}).", where=str(path)) from error
    reader = _Reader(path, model)
    lookup, logits = reader.lookup(), reader.logits()
    rows, columns = reader.extent(lookup)
    return Structure(
        container="onnx",
        path=path,
        file_bytes=path.stat().st_size + reader.external_bytes(),
        rows=rows,
        columns=columns,
        payloads=reader.payloads(rows, columns, lookup, logits),
        read_lookup=lambda piece: reader.decode(lookup, rows, columns, piece),
        read_logits=lambda piece: reader.decode(logits, rows, columns, piece),
    )


class _Reader:
    """Answers questions about one loaded graph."""

    def __init__(self, path: Path, model: Any) -> None:
        self.path, self.graph = path, model.graph
        self.initializers = {tensor.name: tensor for tensor in self.graph.initializer}
        self.producers = {out: node for node in self.graph.node for out in node.output}
        for node in self.graph.node:
            if node.op_type == "Constant":
                for attribute in node.attribute:
                    if attribute.name == "value":
                        self.initializers[node.output[0]] = attribute.t

    def external_bytes(self) -> int:
        """Bytes of the external files that the initializers name."""
        places = [place_of(tensor, self.path) for tensor in self.initializers.values()]
        return sum(file.stat().st_size for file in sorted({p.file for p in places if p.file != self.path}))

    def lookup(self) -> _Use:
        """The gather that ``input_ids`` indexes."""
        for node in self.graph.node:
            if node.op_type in _GATHERS and self._upstream(node.input[1]) == "input_ids":
                found = self._use(node, node.input[0])
                if found is not None:
                    return found
        raise TieqError("no lookup by 'input_ids' was found in the graph.", where=str(self.path))

    def logits(self) -> _Use:
        """The nearest product upstream of the ``logits`` output, past scaling, softcap and bias."""
        name, seen = "logits", 0
        while name in self.producers and seen < 32:
            node = self.producers[name]
            if node.op_type in _PRODUCTS:
                found = self._use(node, node.input[1])
                if found is not None:
                    return found
                break
            live = [i for i in node.input if i and i not in self.initializers and not self._constant(i)]
            if not live:
                break
            name, seen = live[0], seen + 1
        raise TieqError("no product with a stored matrix was found before 'logits'.", where=str(self.path))

    def _constant(self, name: str) -> bool:
        node = self.producers.get(name)
        return node is not None and node.op_type == "Constant"

    def _upstream(self, name: str) -> str:
        """Where a value comes from, past operators that only reshape or cast it."""
        while name in self.producers and self.producers[name].op_type in ("Cast", "Identity", "Reshape"):
            name = self.producers[name].input[0]
        return name

    def _use(self, node: Any, name: str) -> _Use | None:
        attributes = {a.name: a.i for a in node.attribute}
        transposed = bool(attributes.get("transB", 0)) if node.op_type in ("Gemm", "FusedMatMul") else False
        while name not in self.initializers:
            carrier = self.producers.get(name)
            if carrier is None or carrier.op_type not in _CARRIERS:
                return None
            transposed ^= carrier.op_type == "Transpose"
            name = carrier.input[0]
        if node.op_type in ("MatMulNBits", "GatherBlockQuantized"):
            zero = node.input[3] if len(node.input) > 3 and node.input[3] else None
            bits, block = attributes.get("bits", 4), attributes.get("block_size", 128)
            return _Use(name, self._upstream(node.input[2]), bits, block, True, zero and self._upstream(zero))
        return _Use(name, None, 0, 0, transposed or node.op_type == "Gather")

    def extent(self, use: _Use) -> tuple[int, int]:
        """Rows and columns of the table behind a use."""
        shape = list(self.initializers[use.weights].dims)
        if not use.bits:
            rows, columns = shape if use.transposed else reversed(shape)
            return rows, columns
        return shape[0], int(np.prod(shape[1:])) * 8 // use.bits

    def payloads(self, rows: int, columns: int, lookup: _Use, logits: _Use) -> tuple[Payload, ...]:
        """Distinct runs of bytes that hold ``rows * columns`` weights, with the roles that read them."""
        by_place: dict[Place, list[str]] = defaultdict(list)
        for name, tensor in self.initializers.items():
            if self._weights_held(tensor, rows) == rows * columns:
                by_place[place_of(tensor, self.path)].append(name)
        found = []
        for place, names in by_place.items():
            uses = {"lookup": lookup, "logits": logits}
            readers = [role for role, use in uses.items() if use.weights in names]
            readers += self._other_readers(names)
            used = next((use for use in uses.values() if use.weights in names), None)
            scales = self._scales_bytes(used)
            bits = 8 * (place.length + scales) / (rows * columns)
            found.append(
                Payload(
                    names=tuple(sorted(names)),
                    location=str(place),
                    nbytes=place.length + scales,
                    scheme=self._scheme(names[0], used),
                    bits_per_weight=bits,
                    readers=tuple(readers),
                )
            )
        return tuple(found)

    def _weights_held(self, tensor: Any, rows: int) -> int:
        """Weights in an initializer, if it has a table's rows: elements for floats, codes for packed bytes."""
        from onnx import TensorProto, helper

        dims = list(tensor.dims)
        if not dims or rows not in dims:
            return 0
        count = int(np.prod(dims))
        if tensor.data_type in (TensorProto.UINT8, TensorProto.INT8):
            bits = self._bits_of(tensor.name)
            return count * 8 // bits if bits else count
        dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
        return count if np.issubdtype(dtype, np.floating) or dtype.itemsize <= 2 else 0

    def _bits_of(self, name: str) -> int:
        """Bits a code in a byte tensor, from the operator that reads it; unread ones count as the roles' bits."""
        bits = {}
        for node in self.graph.node:
            if node.op_type in ("MatMulNBits", "GatherBlockQuantized"):
                value = next((a.i for a in node.attribute if a.name == "bits"), 4)
                at = 1 if node.op_type == "MatMulNBits" else 0
                bits[node.input[at]] = value
        return bits.get(name) or next(iter(bits.values()), 0)

    def _other_readers(self, names: list[str]) -> list[str]:
        """Operators beyond the two roles' chains that read one of these names."""
        chain_ends = {"GatherBlockQuantized", "MatMulNBits", *_GATHERS, *_PRODUCTS, *_CARRIERS}
        return [
            f"{node.op_type} {node.name}"
            for node in self.graph.node
            if node.op_type not in chain_ends and set(names) & set(node.input)
        ]

    def _scales_bytes(self, use: _Use | None) -> int:
        if use is None or use.scales is None or use.scales not in self.initializers:
            return 0
        return place_of(self.initializers[use.scales], self.path).length

    def _scheme(self, name: str, use: _Use | None) -> str:
        from onnx import TensorProto

        if use is not None and use.bits:
            return f"int{use.bits} in blocks of {use.block}"
        return str(TensorProto.DataType.Name(self.initializers[name].data_type)).lower()

    def decode(self, use: _Use, rows: int, columns: int, piece: slice) -> NDArray[np.float32]:
        """Decoded rows of the table behind a use, as the operator computes them."""
        stored = read_array(self.initializers[use.weights], self.path)
        if not use.bits:
            table = stored if use.transposed else stored.T
            return np.ascontiguousarray(table[piece], dtype=np.float32)
        packed = np.ascontiguousarray(stored.reshape(rows, -1)[piece])
        codes = unpack_codes(packed, use.bits).reshape(len(packed), -1, use.block)
        scales = read_array(self.initializers[use.scales or ""], self.path).reshape(rows, -1)[piece]
        zero = np.float32(1 << (use.bits - 1))
        if use.zero_points is not None:
            zero = self._zero_points(use, rows, codes.shape[1], piece)
        values = (codes.astype(np.float32) - zero) * scales.astype(np.float32)[..., None]
        decoded: NDArray[np.float32] = values.reshape(len(packed), -1)[:, :columns]
        return decoded

    def _zero_points(self, use: _Use, rows: int, blocks: int, piece: slice) -> Any:
        stored = read_array(self.initializers[use.zero_points or ""], self.path).reshape(rows, -1)[piece]
        if stored.dtype != np.uint8:
            return stored.astype(np.float32)[..., None]
        return unpack_codes(np.ascontiguousarray(stored), use.bits)[:, :blocks].astype(np.float32)[..., None]
