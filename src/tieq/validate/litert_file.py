"""A TFLite flatbuffer as records: tensors, operators, and where the bytes of each constant are.

Source: TensorFlow Lite ``schema.fbs``, as ``ai_edge_litert`` carries it.
"""

from __future__ import annotations

import dataclasses
import mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.errors import TieqError


@dataclasses.dataclass(frozen=True)
class Place:
    """A run of bytes of the file."""

    offset: int
    length: int


@dataclasses.dataclass(frozen=True)
class Quantization:
    """What turns codes into weights: ``scale`` and ``zero``, of each row or one of all, or a tensor of block scales."""

    scale: NDArray[np.float32]
    zero: NDArray[np.int64]
    axis: int = 0
    blocks: int | None = None
    block: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of scales and zero points that are stored beside the tensor."""
        return self.scale.nbytes + self.zero.nbytes


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor; ``place`` is None where it is computed."""

    index: int
    name: str
    shape: tuple[int, ...]
    kind: str
    place: Place | None
    quantization: Quantization | None

    @property
    def elements(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape))


@dataclasses.dataclass(frozen=True)
class Operator:
    """One operator: its name, and the tensors it reads (-1 for none) and writes."""

    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class TfliteFile:
    """The first subgraph of a file, which interpreters run, mapped and not read.

    Attributes:
        tensors: by number.
        operators: in their order.
        inputs: numbers of the graph's inputs; ``outputs`` of its outputs.

    Raises:
        TieqError: if the file is no TFLite model, or ai-edge-litert, which has the schema, is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            from ai_edge_litert import schema_py_generated as schema
        except ImportError as error:
            raise TieqError(
                "ai-edge-litert is needed to read it, and is not installed.",
                where=str(path),
                todo="pip install 'tieq[litert]'.",
            ) from error
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if self._data[4:8] != b"TFL3":
                raise ValueError("its identifier is not TFL3")
            self._read(schema)
        except Exception as error:  # struct's, numpy's and ours: a damaged file fails anywhere
            raise TieqError(f"cannot be read as TFLite ({error}).", where=str(path)) from error

    def _read(self, schema: Any) -> None:
        self._start = np.frombuffer(self._data, np.uint8).__array_interface__["data"][0]
        model = schema.Model.GetRootAs(self._data, 0)
        graph = model.Subgraphs(0)
        kinds = _names(schema.TensorType)
        builtins = _names(schema.BuiltinOperator)
        codes = [model.OperatorCodes(number) for number in range(model.OperatorCodesLength())]
        names = [builtins.get(max(code.BuiltinCode(), code.DeprecatedBuiltinCode()), "CUSTOM") for code in codes]
        self.tensors = []
        for number in range(graph.TensorsLength()):
            tensor = graph.Tensors(number)
            shape = tuple(int(tensor.Shape(axis)) for axis in range(tensor.ShapeLength()))
            name = (tensor.Name() or b"").decode("utf-8", "replace")
            place = self._place(model.Buffers(tensor.Buffer()))
            kind = kinds.get(tensor.Type(), "?")
            self.tensors.append(Tensor(number, name, shape, kind, place, _quantization(schema, tensor.Quantization())))
        self.operators = []
        for number in range(graph.OperatorsLength()):
            operator = graph.Operators(number)
            inputs = tuple(int(operator.Inputs(at)) for at in range(operator.InputsLength()))
            outputs = tuple(int(operator.Outputs(at)) for at in range(operator.OutputsLength()))
            self.operators.append(Operator(names[operator.OpcodeIndex()], inputs, outputs))
        self.inputs = [int(graph.Inputs(at)) for at in range(graph.InputsLength())]
        self.outputs = [int(graph.Outputs(at)) for at in range(graph.OutputsLength())]

    def _place(self, buffer: Any) -> Place | None:
        if buffer.Offset() > 1:  # the data stands behind the flatbuffer, as in files beyond 2 GiB
            return Place(int(buffer.Offset()), int(buffer.Size()))
        if not buffer.DataLength():
            return None
        start = buffer.DataAsNumpy().__array_interface__["data"][0]
        return Place(start - self._start, int(buffer.DataLength()))

    def bytes_at(self, place: Place) -> NDArray[np.uint8]:
        """The bytes of a place."""
        return np.frombuffer(self._data, np.uint8, place.length, place.offset)


def _names(kind: Any) -> dict[int, str]:
    return {value: name for name, value in vars(kind).items() if isinstance(value, int)}


def _quantization(schema: Any, found: Any) -> Quantization | None:
    if found is None:
        return None
    if found.DetailsType() == schema.QuantizationDetails.BlockwiseQuantization:
        details = schema.BlockwiseQuantization()
        table = found.Details()
        details.Init(table.Bytes, table.Pos)
        none = np.zeros(0, np.float32), np.zeros(0, np.int64)
        return Quantization(*none, blocks=int(details.Scales()), block=int(details.BlockSize()))
    if not found.ScaleLength():
        return None
    zero = found.ZeroPointAsNumpy() if found.ZeroPointLength() else np.zeros(1, np.int64)
    return Quantization(found.ScaleAsNumpy(), zero, int(found.QuantizedDimension()))
