"""Put quantized operators in the places of a traced graph's float ones: lookup, logits and body.

What the operators are and how the table stays single: see ``onnx_products.py``.
"""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir

from tieq.errors import TieqError
from tieq.export.onnx_products import Products
from tieq.quantize import QuantizedCheckpoint


class Surgeon:
    """Rewrites one graph. Use :meth:`operate` once.

    Args:
        model: the float graph.
        checkpoint: quantized matrices and float tensors.
        products: makes the quantized operators.
        lookup: initializer name of the lookup table; ``logits`` of the logits matrix.
        tied: whether the lookup table plays the logits role too.
    """

    def __init__(
        self,
        model: ir.Model,
        checkpoint: QuantizedCheckpoint,
        products: Products,
        *,
        lookup: str,
        logits: str,
        tied: bool,
    ) -> None:
        self.model, self.checkpoint, self.products = model, checkpoint, products
        # The exporter keeps one of the two names of a tied parameter; which one is its own affair.
        self._stored_as = {logits: lookup} if tied else {}
        self._done: set[str] = set()

    def operate(self) -> None:
        """Replace every use of a planned matrix.

        Raises:
            TieqError: if a planned matrix has no use in the graph, or a use that cannot be replaced.
        """
        for node in list(self.model.graph):
            if node.op_type == "Gather" and node.domain == "":
                self._lookup(node)
            elif node.op_type == "MatMul" and node.domain == "":
                self._product(node)
            elif node.op_type == "Gemm" and node.domain == "":
                self._gemm(node)
        missing = [name for name in self.checkpoint.matrices if name not in self._done]
        if missing:
            raise TieqError(
                f"{len(missing)} planned matrices have no product in the ONNX graph, first '{missing[0]}'.",
                todo="This architecture needs `--format gguf`; please report it.",
            )

    def _planned(self, value: ir.Value | None) -> tuple[str, bool] | None:
        """The planned matrix behind a value and whether it arrives transposed, through Transpose and Identity."""
        transposed = False
        while value is not None and not value.is_initializer():
            node = value.producer()
            if node is None or node.op_type not in ("Transpose", "Identity"):
                return None
            transposed ^= node.op_type == "Transpose"
            value = node.inputs[0]
        if value is None or value.name is None:
            return None
        name = self._stored_as.get(value.name, value.name)
        return (name, transposed) if name in self.checkpoint.matrices else None

    def _lookup(self, node: ir.Node) -> None:
        found = self._planned(node.inputs[0])
        if found is None or found[1]:
            return
        self._replace(node, self.products.lookup(found[0], node.inputs[1]), found[0])

    def _product(self, node: ir.Node) -> None:
        found = self._planned(node.inputs[1])
        if found is None:
            return
        name, transposed = found
        if not transposed:
            raise TieqError("is multiplied untransposed, which no quantized operator does.", where=name)
        self._replace(node, self.products.multiply(name, node.inputs[0]), name)

    def _gemm(self, node: ir.Node) -> None:
        """``Gemm(x, W, b)``: GPT-2's Conv1D stores W as ``[in, out]``, a Linear layer passes transB."""
        found = self._planned(node.inputs[1])
        if found is None:
            return
        name = found[0]
        made = self.products.multiply(name, node.inputs[0])
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            made.append(ir.node("Add", [made[-1].outputs[0], node.inputs[2]]))
        self._replace(node, made, name)

    def _replace(self, old: ir.Node, made: list[ir.Node], name: str) -> None:
        repeated: Counter[str] = Counter()
        for node in made:
            count = repeated[node.op_type]
            repeated[node.op_type] += 1
            node.name = f"{old.name}/{node.op_type}" + (f"_{count}" if count else "")
            for output in node.outputs:
                output.name = f"{node.name}_output"
        last = made[-1].outputs[0]
        last.type, last.shape = old.outputs[0].type, old.outputs[0].shape
        graph = self.model.graph
        output_name = old.outputs[0].name
        graph.insert_before(old, made)
        ir.convenience.replace_all_uses_with(old.outputs[0], last, replace_graph_outputs=True)
        graph.remove(old, safe=True)
        last.name = output_name
        self._done.add(name)
