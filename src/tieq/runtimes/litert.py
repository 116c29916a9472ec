"""LiteRT (TFLite) on the CPU: the file as it is, and with its integer products widened for a numeric reference."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.errors import TieqError
from tieq.runtimes.base import Availability, Runtime, Session, check_ids


class LiteRt(Runtime):
    """Runs graphs that take token ids ``[1, length]`` and give logits ``[1, length, vocabulary]``."""

    name = "litert"
    suffixes = (".tflite",)
    purpose = "TFLite on the CPU"

    def availability(self) -> Availability:
        """Whether ai-edge-litert is installed."""
        try:
            version = importlib.metadata.version("ai-edge-litert")
        except importlib.metadata.PackageNotFoundError:
            return Availability(False, "", "pip install 'tieq[litert]'")
        return Availability(True, version, "")

    def modes(self, path: Path) -> Iterator[tuple[str, contextlib.AbstractContextManager[Session]]]:
        """With float and with int8 activations where products read block-wise weights; the file as it is elsewhere."""
        widened = _widened(path)
        if widened is None:
            yield "", _open(path, None)
            return
        yield "float activations", _open(path, widened)
        yield "int8 activations", _open(path, None)


def _widened(path: Path) -> bytes | None:
    """The same model with each block-wise FULLY_CONNECTED reading its rows through EMBEDDING_LOOKUP, as floats.

    None where there is none. Lookups compute what the file's weights are, so that activations stay float32.

    Raises:
        TieqError: if the file is no TFLite model.
    """
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    try:
        content = path.read_bytes()
        if content[4:8] != b"TFL3":
            raise ValueError("its identifier is not TFL3")
        model = schema.ModelT.InitFromPackedBuf(content, 0)
    except Exception as error:  # struct's, numpy's and ours: a damaged file fails anywhere
        raise TieqError(f"cannot be read as TFLite ({error}).", where=str(path)) from error
    builtin = [code.builtinCode for code in model.operatorCodes]
    changed = False
    for graph in model.subgraphs:
        operators = []
        for operator in graph.operators:
            table = graph.tensors[operator.inputs[1]] if len(operator.inputs) > 1 else None
            if builtin[operator.opcodeIndex] == schema.BuiltinOperator.FULLY_CONNECTED and _is_blockwise(table):
                operators.append(_lookup_of_all_rows(schema, model, graph, operator))
                changed = True
            operators.append(operator)
        graph.operators = operators
    if not changed:
        return None
    builder = flatbuffers.Builder(len(content) + (1 << 20))
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def _is_blockwise(tensor: Any) -> bool:
    details = getattr(getattr(tensor, "quantization", None), "details", None)
    return type(details).__name__ == "BlockwiseQuantizationT"


def _lookup_of_all_rows(schema: Any, model: Any, graph: Any, operator: Any) -> Any:
    """An EMBEDDING_LOOKUP of the product's weights; the product is changed to read what it gives."""
    rows, columns = (int(extent) for extent in graph.tensors[operator.inputs[1]].shape)
    ids, values = schema.TensorT(), schema.TensorT()
    ids.name, ids.type, ids.shape, ids.buffer = f"rows.{rows}", schema.TensorType.INT32, [rows], len(model.buffers)
    values.name, values.type, values.shape = f"values.{len(graph.tensors)}", schema.TensorType.FLOAT32, [rows, columns]
    values.buffer = 0
    numbers = schema.BufferT()
    numbers.data = np.arange(rows, dtype=np.int32).view(np.uint8)
    model.buffers.append(numbers)
    lookup = schema.OperatorT()
    lookup.opcodeIndex = _code(schema, model)
    lookup.inputs = [len(graph.tensors), int(operator.inputs[1])]
    lookup.outputs = [len(graph.tensors) + 1]
    operator.inputs = [int(operator.inputs[0]), len(graph.tensors) + 1, *(int(index) for index in operator.inputs[2:])]
    graph.tensors += [ids, values]
    return lookup


def _code(schema: Any, model: Any) -> int:
    """Number of the operator EMBEDDING_LOOKUP, added where the model has none."""
    wanted = schema.BuiltinOperator.EMBEDDING_LOOKUP
    for number, code in enumerate(model.operatorCodes):
        if code.builtinCode == wanted:
            code.version = max(code.version, 4)
            return number
    code = schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = wanted
    code.version = 4
    model.operatorCodes.append(code)
    return len(model.operatorCodes) - 1


@contextlib.contextmanager
def _open(path: Path, content: bytes | None) -> Iterator[Session]:
    from ai_edge_litert.interpreter import Interpreter

    try:
        source = {"model_path": str(path)} if content is None else {"model_content": content}
        interpreter = Interpreter(**source, num_threads=os.cpu_count())
    except (ValueError, RuntimeError) as error:
        raise TieqError(f"LiteRT cannot load the file ({error}).", where=str(path)) from error
    yield _LiteRtSession(interpreter, path)


class _LiteRtSession:
    """Resizes the one input to the sequence and reads the one output."""

    def __init__(self, interpreter: Any, path: Path) -> None:
        inputs, outputs = interpreter.get_input_details(), interpreter.get_output_details()
        if len(inputs) != 1 or len(outputs) != 1 or len(inputs[0]["shape"]) != 2 or len(outputs[0]["shape"]) != 3:
            raise TieqError(
                "the graph is not one that takes token ids [1, length] and gives logits [1, length, vocabulary].",
                where=str(path),
                todo="Prove its structure alone with --no-evaluation.",
            )
        self._interpreter, self._path = interpreter, path
        self._input, self._output = inputs[0]["index"], outputs[0]["index"]
        self._type, self._rows, self._length = inputs[0]["dtype"], int(outputs[0]["shape"][2]), 0

    def logits(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Logits ``[length, vocab]`` of one sequence."""
        check_ids(ids, self._rows)
        try:
            if len(ids) != self._length:
                self._interpreter.resize_tensor_input(self._input, [1, len(ids)])
                self._interpreter.allocate_tensors()
                self._length = len(ids)
            self._interpreter.set_tensor(self._input, ids[None].astype(self._type))
            self._interpreter.invoke()
        except (ValueError, RuntimeError) as error:
            raise TieqError(f"LiteRT cannot run the file ({error}).", where=str(self._path)) from error
        found: NDArray[np.float32] = self._interpreter.get_tensor(self._output)[0]
        return found
