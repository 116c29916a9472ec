"""Building an ONNX graph node by node: inputs, constants, named nodes, outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import onnx_ir as ir


class Nodes:
    """Adds to a graph; calling it adds one node and returns its first output, whose name is the node's."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self._names: Counter[str] = Counter()

    def __call__(
        self,
        kind: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        attributes: Mapping[str, Any] | None = None,
        domain: str = "",
    ) -> ir.Value:
        """Add a node with one output."""
        return self.several(kind, inputs, name, 1, attributes, domain)[0]

    def several(
        self,
        kind: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        outputs: int,
        attributes: Mapping[str, Any] | None = None,
        domain: str = "",
    ) -> Sequence[ir.Value]:
        """Add a node with several outputs."""
        import onnx_ir as ir

        made = ir.node(kind, inputs, attributes=dict(attributes or {}), domain=domain, num_outputs=outputs)
        return self._append(made, name)

    def last(self, made: Sequence[ir.Node], name: str) -> ir.Value:
        """Add nodes that are made already, in order; returns the last one's output."""
        for node in made[:-1]:
            self._append(node, f"{name}/{node.op_type}")
        return self._append(made[-1], name)[0]

    def _append(self, node: ir.Node, name: str) -> Sequence[ir.Value]:
        self._names[name] += 1
        node.name = name if self._names[name] == 1 else f"{name}_{self._names[name]}"
        for number, output in enumerate(node.outputs):
            output.name = f"{node.name}/output" + (f"_{number}" if number else "")
        self.graph.append(node)
        return node.outputs

    def input(self, name: str, kind: int, shape: Sequence[int | str]) -> ir.Value:
        """Add an input of the graph; ``kind`` is an ``onnx.TensorProto.DataType``."""
        import onnx_ir as ir

        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType(kind)))
        self.graph.inputs.append(value)
        return value

    def output(self, value: ir.Value, name: str, kind: int, shape: Sequence[int | str]) -> None:
        """Make a value an output of the graph, under a name; ``logits`` comes first, as everywhere."""
        import onnx_ir as ir

        value.name, value.shape, value.type = name, ir.Shape(shape), ir.TensorType(ir.DataType(kind))
        self.graph.outputs.insert(0 if name == "logits" else len(self.graph.outputs), value)

    def constant(self, name: str, values: NDArray[Any]) -> ir.Value:
        """An initializer; the same name gives the same one."""
        import onnx_ir as ir

        if name in self.graph.initializers:
            return self.graph.initializers[name]
        tensor = ir.tensor(np.ascontiguousarray(values) if values.ndim else values, name=name)
        value = ir.Value(name=name, shape=ir.Shape(values.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
        self.graph.register_initializer(value)
        return value

    def shape(self, *extents: int) -> ir.Value:
        """An int64 vector."""
        return self.constant(f"shape.{'.'.join(map(str, extents))}", np.array(extents, np.int64))
