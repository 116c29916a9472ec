"""What the operators of a TFLite graph make of its constants.

What a kernel makes of a quantized tensor is decoded here a second time, and not taken from whoever wrote the file.
Source: TensorFlow Lite's kernels ``embedding_lookup``, ``gather`` and ``fully_connected``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.errors import TieqError
from tieq.validate.litert_file import Operator, Tensor, TfliteFile

# Bits of one element in the types that a table may have.
BITS = {"FLOAT32": 32, "FLOAT16": 16, "INT8": 8, "UINT8": 8, "INT4": 4, "INT2": 2}
# Operators that give on what they get, in another shape or type.
CARRIERS = ("RESHAPE", "CAST", "DEQUANTIZE", "SQUEEZE", "EXPAND_DIMS")
GATHERS = ("EMBEDDING_LOOKUP", "GATHER")
_PLAIN = {"FLOAT32": "<f4", "FLOAT16": "<f2", "INT8": "<i1", "UINT8": "<u1", "INT32": "<i4", "INT64": "<i8"}


class Graph(TfliteFile):
    """A file with what leads to what.

    Raises:
        TieqError: if the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.producers = {output: operator for operator in self.operators for output in operator.outputs}

    def consumers(self, index: int) -> Iterator[Operator]:
        """Operators that read a tensor."""
        return (operator for operator in self.operators if index in operator.inputs)

    def is_given(self, index: int) -> bool:
        """Whether a tensor is an input of the graph, in another shape or type at most."""
        while index not in self.inputs:
            producer = self.producers.get(index)
            if producer is None or producer.kind not in CARRIERS:
                return False
            index = producer.inputs[0]
        return True

    def values(self, index: int) -> NDArray[Any]:
        """A constant as it is stored, in its shape."""
        tensor = self.tensors[index]
        if tensor.place is None or tensor.kind not in _PLAIN:
            raise self.unknown(f"'{tensor.name}' is no plain constant")
        return self.bytes_at(tensor.place).view(_PLAIN[tensor.kind]).reshape(tensor.shape)

    def rows(self, index: int, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Decoded rows ``[ids, columns]`` of a constant matrix ``[rows, columns]``."""
        tensor = self.tensors[index]
        if tensor.place is None or len(tensor.shape) != 2 or tensor.kind not in BITS:
            raise self.unknown(f"'{tensor.name}' ({tensor.kind} {list(tensor.shape)}) is no constant matrix of weights")
        columns, bits = tensor.shape[1], BITS[tensor.kind]
        if bits < 8:
            if columns * bits % 8:
                raise self.unknown(f"rows of '{tensor.name}' do not fill bytes")
            packed = self.bytes_at(tensor.place).reshape(tensor.shape[0], -1)[ids]
            values = _signed(packed, bits).reshape(len(ids), columns)
        else:
            values = self.values(index)[ids]
        return self._weights(tensor, values.astype(np.float32), ids)

    def _weights(self, tensor: Tensor, codes: NDArray[np.float32], ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Codes of the rows ``ids`` as what they stand for."""
        found = tensor.quantization
        if found is None:
            return codes
        if found.blocks is not None:
            scales = self.values(found.blocks).reshape(tensor.shape[0], -1)[ids].astype(np.float32)
            scaled = codes.reshape(len(ids), -1, found.block) * scales[..., None]
            return np.asarray(scaled.reshape(codes.shape), np.float32)
        if found.axis and len(found.scale) > 1:
            raise self.unknown(f"'{tensor.name}' has a scale a column")
        zero, scale = (values[ids][:, None] if len(values) > 1 else values for values in (found.zero, found.scale))
        return np.asarray((codes - zero.astype(np.float32)) * scale, np.float32)

    def evaluate(self, index: int, ids: NDArray[np.int64] | None, piece: slice, seen: set[int]) -> NDArray[np.float32]:
        """What a tensor holds that lookups in constants lead to, as float32.

        Args:
            index: the tensor.
            ids: what stands for the graph's input.
            piece: which of a lookup's constant ids count.
            seen: filled with the constants that were looked up in.

        Raises:
            TieqError: if another operator is on the way.
        """
        operator = self.producers.get(index)
        if operator is None:
            self._see(index, seen)
            return self.rows(index, np.arange(self.tensors[index].shape[0])[piece])
        if operator.kind in GATHERS:
            at, table = operator.inputs[:2] if operator.kind == "EMBEDDING_LOOKUP" else operator.inputs[1::-1]
            constant = self._constant_ids(at)
            if constant is not None:
                wanted = constant[piece]
            elif ids is not None and self.is_given(at):
                wanted = ids
            else:
                raise self.unknown("a lookup is neither by the token ids nor by constant ones")
            self._see(table, seen)
            return self.rows(table, wanted)
        if operator.kind in CARRIERS:
            found = self.evaluate(operator.inputs[0], ids, piece, seen)
            return found.reshape(len(found), *self.tensors[index].shape[1:])
        if operator.kind == "MUL":
            left, right = (self.evaluate(each, ids, piece, seen) for each in operator.inputs)
            return np.asarray(left * right, np.float32)
        raise self.unknown(f"{operator.kind} on the way from the table")

    def _constant_ids(self, index: int) -> NDArray[np.int64] | None:
        """Ids that depend on no input: a constant, or one plus what is subtracted from itself."""
        if self.tensors[index].place is not None:
            return self.values(index).reshape(-1).astype(np.int64)
        operator = self.producers.get(index)
        if operator is None or operator.kind != "ADD":
            return None
        left, right = operator.inputs
        nothing = self.producers.get(right)
        if nothing is None or nothing.kind != "SUB" or nothing.inputs[0] != nothing.inputs[1]:
            return None
        return self._constant_ids(left)

    def _see(self, index: int, seen: set[int]) -> None:
        quantization = self.tensors[index].quantization
        seen.add(index)
        if quantization is not None and quantization.blocks is not None:
            seen.add(quantization.blocks)

    def unknown(self, what: str) -> TieqError:
        """An error about something in the graph that the proof does not know."""
        return TieqError(f"the table cannot be followed: {what}.", where=str(self.path))


def _signed(packed: NDArray[np.uint8], bits: int) -> NDArray[np.int8]:
    """Codes in two's complement, the first in the lowest bits: ``[..., n]`` to ``[..., n * 8 / bits]``."""
    lanes = [(packed << np.uint8(8 - bits - shift)).view(np.int8) >> np.int8(8 - bits) for shift in range(0, 8, bits)]
    return np.stack(lanes, axis=-1)
