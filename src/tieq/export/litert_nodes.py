"""Operators, tensors and buffers of a TFLite graph under construction, and the flatbuffer that they become.

A dimension that is not known before the input is there is -1; the file then names 1 for it, and the runtime takes
what the input has. Source: TensorFlow Lite's ``schema.fbs``, version 3, as ``ai_edge_litert`` carries it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.errors import RefusedError

_FILE_IDENTIFIER = b"TFL3"
# Offsets in a flatbuffer are signed 32-bit numbers.
_MOST_BYTES = (1 << 31) - (1 << 20)
# What a runtime may ask of a constant it reads in place (`force_align` of a buffer's data).
_ALIGNMENT = 16
# The lowest version of each operator that does what is asked of it here; 1 where none is named.
_VERSIONS = {"EMBEDDING_LOOKUP": 4, "FULLY_CONNECTED": 12, "GELU": 1, "DEQUANTIZE": 3}
_TYPES = {
    np.dtype(np.float32): "FLOAT32",
    np.dtype(np.float16): "FLOAT16",
    np.dtype(np.int32): "INT32",
    np.dtype(np.int8): "INT8",
}

# An operator's options: the name of their table and its fields.
Options = tuple[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Value:
    """A tensor of the graph: its number, its shape (-1 where the input decides) and its type's name."""

    index: int
    shape: tuple[int, ...]
    kind: str


class Nodes:
    """Adds to one graph; calling it adds one operator and returns its output."""

    def __init__(self) -> None:
        from ai_edge_litert import schema_py_generated as schema

        self.schema: Any = schema
        self._model = schema.ModelT()
        self._model.version = 3
        self._model.description = "tieq"
        self._model.operatorCodes = []
        # The first buffer is empty by convention: tensors that are computed name it.
        self._model.buffers = [schema.BufferT()]
        self._graph = schema.SubGraphT()
        self._graph.tensors, self._graph.operators = [], []
        self._graph.inputs, self._graph.outputs = [], []
        self._model.subgraphs = [self._graph]
        self._codes: dict[str, int] = {}
        self._constants: dict[str, Value] = {}
        self._names: dict[str, int] = {}

    def __call__(
        self,
        kind: str,
        inputs: Sequence[Value | None],
        shape: Sequence[int],
        name: str,
        options: Options | None = None,
        type_: str = "FLOAT32",
    ) -> Value:
        """Add an operator with one output of the given shape and type."""
        return self.several(kind, inputs, [shape], name, options, type_)[0]

    def several(
        self,
        kind: str,
        inputs: Sequence[Value | None],
        shapes: Sequence[Sequence[int]],
        name: str,
        options: Options | None = None,
        type_: str = "FLOAT32",
    ) -> list[Value]:
        """Add an operator with an output for each shape."""
        outputs = [self._tensor(f"{name}/{kind.lower()}", shape, type_, 0) for shape in shapes]
        made = self.schema.OperatorT()
        made.opcodeIndex = self._code(kind)
        made.inputs = [-1 if value is None else value.index for value in inputs]
        made.outputs = [value.index for value in outputs]
        if options is not None:
            table, fields = options
            made.builtinOptionsType = getattr(self.schema.BuiltinOptions, table)
            made.builtinOptions = getattr(self.schema, f"{table}T")()
            for field, value in fields.items():
                setattr(made.builtinOptions, field, value)
        self._graph.operators.append(made)
        return outputs

    def _code(self, kind: str) -> int:
        if kind not in self._codes:
            code = self.schema.OperatorCodeT()
            code.builtinCode = getattr(self.schema.BuiltinOperator, kind)
            # Readers older than the wide field look at the narrow one, whose last value says "look elsewhere".
            code.deprecatedBuiltinCode = min(code.builtinCode, 127)
            code.version = _VERSIONS.get(kind, 1)
            self._codes[kind] = len(self._model.operatorCodes)
            self._model.operatorCodes.append(code)
        return self._codes[kind]

    def _tensor(self, name: str, shape: Sequence[int], kind: str, buffer: int, quantization: Any = None) -> Value:
        count = self._names[name] = self._names.get(name, 0) + 1
        made = self.schema.TensorT()
        made.name = name if count == 1 else f"{name}_{count}"
        made.shape = [1 if extent < 0 else extent for extent in shape]
        if min(shape, default=0) < 0:
            made.shapeSignature = list(shape)
        made.type = getattr(self.schema.TensorType, kind)
        made.buffer, made.quantization = buffer, quantization
        self._graph.tensors.append(made)
        return Value(len(self._graph.tensors) - 1, tuple(shape), kind)

    def input(self, name: str, shape: Sequence[int], kind: str) -> Value:
        """An input of the graph."""
        value = self._tensor(name, shape, kind, 0)
        self._graph.inputs.append(value.index)
        return value

    def output(self, value: Value, name: str) -> None:
        """Make a value an output of the graph, under a name."""
        self._graph.tensors[value.index].name = name
        self._graph.outputs.append(value.index)

    def constant(self, name: str, values: NDArray[Any]) -> Value:
        """A constant; the same name gives the same one."""
        if name not in self._constants:
            self._constants[name] = self._tensor(name, values.shape, _TYPES[values.dtype], self._buffer(values))
        return self._constants[name]

    def ints(self, *values: int) -> Value:
        """An int32 vector."""
        return self.constant(f"ints.{'.'.join(map(str, values))}", np.array(values, np.int32))

    def number(self, value: float) -> Value:
        """A float32 scalar."""
        return self.constant(f"number.{value!r}", np.array(value, np.float32))

    def packed(
        self, name: str, content: NDArray[np.uint8], shape: Sequence[int], kind: str, quantization: Any
    ) -> Value:
        """A constant of codes whose bytes are made already; the same name gives the same one."""
        if name not in self._constants:
            self._constants[name] = self._tensor(name, shape, kind, self._buffer(content), quantization)
        return self._constants[name]

    def known(self, name: str) -> Value | None:
        """The constant of that name, if there is one."""
        return self._constants.get(name)

    def reshape(self, value: Value, shape: Sequence[int], name: str) -> Value:
        """Another shape; at most one of its dimensions is -1."""
        return self("RESHAPE", [value, self.ints(*shape)], shape, name, ("ReshapeOptions", {}), value.kind)

    def _buffer(self, values: NDArray[Any]) -> int:
        self._model.buffers.append(_Buffer(self.schema, np.ascontiguousarray(values).reshape(-1).view(np.uint8)))
        return len(self._model.buffers) - 1

    def signature(self, key: str, inputs: dict[str, Value], outputs: dict[str, Value]) -> None:
        """Name the graph's inputs and outputs for callers that ask by name."""
        made = self.schema.SignatureDefT()
        made.signatureKey, made.subgraphIndex = key, 0
        made.inputs, made.outputs = (self._named(each) for each in (inputs, outputs))
        self._model.signatureDefs = [made]

    def _named(self, values: dict[str, Value]) -> list[Any]:
        found = []
        for name, value in values.items():
            made = self.schema.TensorMapT()
            made.name, made.tensorIndex = name, value.index
            found.append(made)
        return found

    def save(self, path: Path) -> None:
        """Write the flatbuffer.

        Raises:
            RefusedError: if it would be larger than a flatbuffer can be.
        """
        import flatbuffers

        size = sum(buffer.data.nbytes for buffer in self._model.buffers[1:])
        if size > _MOST_BYTES:
            raise RefusedError(
                f"{size:,} bytes of weights do not fit into one flatbuffer, which holds 2 GiB.",
                where="LiteRT",
                todo="Use fewer bits, or leave litert out.",
            )
        builder = flatbuffers.Builder(size + size // 16 + (1 << 20))
        builder.Finish(self._model.Pack(builder), _FILE_IDENTIFIER)
        path.write_bytes(memoryview(builder.Bytes)[builder.Head() :])


class _Buffer:
    """Stands in for the schema's ``BufferT``, whose own ``Pack`` would not align the data."""

    def __init__(self, schema: Any, data: NDArray[np.uint8]) -> None:
        self._schema, self.data = schema, data

    def Pack(self, builder: Any) -> Any:  # noqa: N802 - the schema's name
        builder.Prep(_ALIGNMENT, self.data.nbytes)
        vector = builder.CreateNumpyVector(self.data)
        self._schema.BufferStart(builder)
        self._schema.BufferAddData(builder, vector)
        return self._schema.BufferEnd(builder)
