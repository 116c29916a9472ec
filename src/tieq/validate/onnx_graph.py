"""A loaded ONNX graph under questions: which operator plays which role, what it reads, what that decodes to."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.codecs.schemes import unpack_codes
from tieq.errors import TieqError
from tieq.validate.onnx_bytes import joined, place_of, read_array

Rows = slice | NDArray[np.int64]
GATHERS = {"Gather", "GatherBlockQuantized"}
PRODUCTS = {"MatMul", "MatMulNBits", "Gemm", "FusedMatMul"}
# Operators that hand a table on unchanged, apart from its shape, orientation or float type.
CARRIERS = {"Transpose", "Identity", "Cast", "Reshape", "DequantizeLinear"}
# Operators that hand values on unchanged, apart from their shape or type.
_PASSING = ("Cast", "Identity", "Reshape")
_SHAPING = (*_PASSING, "Unsqueeze")
_LONGEST_TAIL = 64


@dataclasses.dataclass(frozen=True)
class Use:
    """One role's operator: the initializer it reads, its scales, and the block geometry (bits 0 for float)."""

    weights: str
    scales: str | None
    bits: int
    block: int
    transposed: bool
    zero_points: str | None = None


@dataclasses.dataclass(frozen=True)
class LogitsTail:
    """The product that makes the logits, and the scatters that add to them afterwards, first one first."""

    use: Use
    hidden: str
    scatters: tuple[Any, ...]


class Graph:
    """Answers questions about one loaded graph."""

    def __init__(self, path: Path, model: Any) -> None:
        self.path, self.nodes = path, model.graph.node
        self.initializers = {tensor.name: tensor for tensor in model.graph.initializer}
        self.producers = {out: node for node in self.nodes for out in node.output}
        self.consumers: dict[str, list[Any]] = defaultdict(list)
        for node in self.nodes:
            for name in dict.fromkeys(node.input):
                self.consumers[name].append(node)
            if node.op_type == "Constant":
                for attribute in node.attribute:
                    if attribute.name == "value":
                        self.initializers[node.output[0]] = attribute.t

    def external_bytes(self) -> int:
        """Bytes of the external files that the initializers name."""
        places = [place_of(tensor, self.path) for tensor in self.initializers.values()]
        return sum(file.stat().st_size for file in sorted({p.file for p in places if p.file != self.path}))

    def lookup(self) -> tuple[Use, str]:
        """The gather of rows that ``input_ids`` indexes, and the name of its output.

        Codes and scales may be gathered before they are decoded.

        Raises:
            TieqError: if there is none.
        """
        for node in self.nodes:
            found = self._rows_first(node)
            if found is not None:
                return found, node.output[0]
            if self._gathers_rows(node) and not self._feeds_decoder(node):
                found = self.use(node, node.input[0])
                if found is not None and len(self.initializers[found.weights].dims) > 1:
                    return found, node.output[0]
        raise TieqError("no lookup by 'input_ids' was found in the graph.", where=str(self.path))

    def _gathers_rows(self, node: Any) -> bool:
        return node is not None and node.op_type in GATHERS and self.upstream(node.input[1], _SHAPING) == "input_ids"

    def _feeds_decoder(self, node: Any) -> bool:
        """Whether what a gather gives is decoded by a second one."""
        readers = self.consumers.get(node.output[0], [])
        return any(
            reader.op_type == "GatherBlockQuantized" or (reader.op_type in _PASSING and self._feeds_decoder(reader))
            for reader in readers
        )

    def _rows_first(self, node: Any) -> Use | None:
        """The use of a table by an operator that decodes gathered rows: the one entry of an axis before theirs."""
        if node.op_type != "GatherBlockQuantized":
            return None
        gathers = [self.producers.get(self.upstream(node.input[at], ("Cast", "Identity"))) for at in (0, 2)]
        if not all(map(self._gathers_rows, gathers)):
            return None
        if not all(self._leads_with_one(each.input[1]) for each in gathers if each is not None):
            return None
        picked = node.input[1]
        if picked not in self.initializers or self.array(picked).tolist() != 0:
            return None
        codes, scales = (self.upstream(each.input[0]) for each in gathers if each is not None)
        found = self.use(node, codes)
        return None if found is None else dataclasses.replace(found, scales=scales)

    def _leads_with_one(self, name: str) -> bool:
        """Whether a value's first axis is one that an Unsqueeze has put there."""
        node = self.producers.get(name)
        if node is None or node.op_type != "Unsqueeze" or node.input[1] not in self.initializers:
            return False
        return bool(self.array(node.input[1]).tolist() == [0])

    def logits(self) -> LogitsTail:
        """The nearest product upstream of the ``logits`` output, past scaling, softcap, bias and scatters.

        Products by pieces of a matrix, side by side, are one product by the pieces joined.

        Raises:
            TieqError: if there is none.
        """
        name, seen = "logits", 0
        scatters: list[Any] = []
        while name in self.producers and seen < _LONGEST_TAIL:
            node = self.producers[name]
            if node.op_type in PRODUCTS:
                found = self.use(node, node.input[1])
                if found is not None:
                    return LogitsTail(found, node.input[0], tuple(reversed(scatters)))
                break
            if node.op_type == "Concat":
                pieces = self._pieces(node)
                if pieces is not None:
                    return LogitsTail(*pieces, tuple(reversed(scatters)))
                break
            if node.op_type == "ScatterElements":
                scatters.append(node)
            live = [i for i in node.input if i and i not in self.initializers and not self._constant(i)]
            if not live:
                break
            name, seen = live[0], seen + 1
        raise TieqError("no product with a stored matrix was found before 'logits'.", where=str(self.path))

    def _pieces(self, concat: Any) -> tuple[Use, str] | None:
        """The one product that products of the same values, side by side, amount to; None if they amount to none."""
        axis = next(attribute.i for attribute in concat.attribute if attribute.name == "axis")
        products = [self.producers.get(name) for name in concat.input]
        if axis not in (-1, 2) or any(node is None or node.op_type != "MatMulNBits" for node in products):
            return None
        uses = [self.use(node, node.input[1]) for node in products if node is not None]
        found = [use for use in uses if use is not None and use.scales is not None and use.zero_points is None]
        hidden = {node.input[0] for node in products if node is not None}
        kinds = {(use.bits, use.block) for use in found}
        if len(found) < len(products) or len(hidden) > 1 or len(kinds) > 1:
            return None
        weights = self._joined([use.weights for use in found])
        scales = self._joined([use.scales or "" for use in found])
        return dataclasses.replace(found[0], weights=weights, scales=scales), hidden.pop()

    def _joined(self, names: list[str]) -> str:
        whole = joined([self.initializers[name] for name in names], self.path)
        self.initializers[whole.name] = whole
        return str(whole.name)

    def _constant(self, name: str) -> bool:
        node = self.producers.get(name)
        return node is not None and node.op_type == "Constant"

    def upstream(self, name: str, passing: tuple[str, ...] = _PASSING) -> str:
        """Where a value comes from, past operators that only reshape or cast it."""
        while name in self.producers and self.producers[name].op_type in passing:
            name = self.producers[name].input[0]
        return name

    def use(self, node: Any, name: str) -> Use | None:
        """How a gather or a product reads the stored matrix behind its input ``name``, None if it reads none."""
        attributes = {a.name: a.i for a in node.attribute}
        transposed = bool(attributes.get("transB", 0)) if node.op_type in ("Gemm", "FusedMatMul") else False
        while name not in self.initializers:
            carrier = self.producers.get(name)
            if carrier is None or carrier.op_type not in CARRIERS:
                return None
            transposed ^= carrier.op_type == "Transpose"
            name = carrier.input[0]
        if node.op_type in ("MatMulNBits", "GatherBlockQuantized"):
            zero = node.input[3] if len(node.input) > 3 and node.input[3] else None
            bits, block = attributes.get("bits", 4), attributes.get("block_size", 128)
            return Use(name, self.upstream(node.input[2]), bits, block, True, zero and self.upstream(zero))
        return Use(name, None, 0, 0, transposed or node.op_type == "Gather")

    def extent(self, use: Use) -> tuple[int, int]:
        """Rows and columns of the table behind a use."""
        shape = list(self.initializers[use.weights].dims)
        if not use.bits:
            rows, columns = shape if use.transposed else reversed(shape)
            return rows, columns
        return shape[0], int(np.prod(shape[1:])) * 8 // use.bits

    def array(self, name: str) -> NDArray[Any]:
        """Values of an initializer."""
        return read_array(self.initializers[name], self.path)

    def scales_bytes(self, use: Use | None) -> int:
        """Bytes of the scales behind a use."""
        if use is None or use.scales is None or use.scales not in self.initializers:
            return 0
        return place_of(self.initializers[use.scales], self.path).length

    def scales_place(self, use: Use) -> str:
        """Where the scales behind a use are, in words; empty if there are none."""
        if use.scales is None or use.scales not in self.initializers:
            return ""
        return str(place_of(self.initializers[use.scales], self.path))

    def scheme(self, name: str, use: Use | None) -> str:
        """The storage of an initializer in words."""
        from onnx import TensorProto

        if use is not None and use.bits:
            return f"int{use.bits} in blocks of {use.block}"
        return str(TensorProto.DataType.Name(self.initializers[name].data_type)).lower()

    def decode(self, use: Use, rows: int, columns: int, piece: Rows) -> NDArray[np.float32]:
        """Decoded rows of the table behind a use, as the operator computes them."""
        stored = self.array(use.weights)
        if not use.bits:
            table = stored if use.transposed else stored.T
            return np.ascontiguousarray(table[piece], dtype=np.float32)
        packed = np.ascontiguousarray(stored.reshape(rows, -1)[piece])
        codes = unpack_codes(packed, use.bits).reshape(len(packed), -1, use.block)
        scales = self.array(use.scales or "").reshape(rows, -1)[piece]
        zero = np.float32(1 << (use.bits - 1))
        if use.zero_points is not None:
            zero = self._zero_points(use, rows, codes.shape[1], piece)
        values = (codes.astype(np.float32) - zero) * scales.astype(np.float32)[..., None]
        decoded: NDArray[np.float32] = values.reshape(len(packed), -1)[:, :columns]
        return decoded

    def _zero_points(self, use: Use, rows: int, blocks: int, piece: Rows) -> Any:
        stored = self.array(use.zero_points or "").reshape(rows, -1)[piece]
        if stored.dtype != np.uint8:
            return stored.astype(np.float32)[..., None]
        return unpack_codes(np.ascontiguousarray(stored), use.bits)[:, :blocks].astype(np.float32)[..., None]
