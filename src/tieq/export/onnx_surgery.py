"""Put quantized operators in the places of float ones: lookup, logits and body, on bytes that are stored once.

Lookup becomes GatherBlockQuantized and every planned matrix product MatMulNBits. The two roles of a shared table
are two initializer names over one range of bytes: the operators want different ranks, and a Reshape between them
would be folded into a second table when the session starts. Row bands are added to both (``onnx_bands.py``).
Source: ONNX Runtime ``docs/ContribOperators.md``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import onnx_ir as ir

from tieq.bands import band_prefix
from tieq.codecs.schemes import SCHEMES, Scheme
from tieq.errors import TieqError
from tieq.export.onnx_bands import BandViews, band_views, refine_lookup, refine_product
from tieq.export.onnx_data import DataFile
from tieq.quantize import QuantizedCheckpoint

CONTRIB = "com.microsoft"


class Surgeon:
    """Rewrites one graph. Use :meth:`operate` once.

    Args:
        model: the float graph.
        checkpoint: quantized matrices and float tensors.
        data: where the packed bytes go.
        lookup: initializer name of the lookup table; ``logits`` of the logits matrix.
        tied: whether the lookup table plays the logits role too.
        accuracy_level: MatMulNBits' attribute (4: int8 activations, 0: the input's own type).
    """

    def __init__(
        self,
        model: ir.Model,
        checkpoint: QuantizedCheckpoint,
        data: DataFile,
        *,
        lookup: str,
        logits: str,
        tied: bool,
        accuracy_level: int,
    ) -> None:
        self.model, self.checkpoint, self.data = model, checkpoint, data
        self.accuracy_level = accuracy_level
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
        name = found[0]
        ids = node.inputs[1]
        scheme = self.checkpoint.scheme(name)
        if scheme in SCHEMES:
            made = self._gather_quantized(name, SCHEMES[scheme], ids)
        else:
            table = self.data.matrix(name, self.checkpoint)
            gathered = ir.node("Gather", [table, ids], attributes={"axis": 0})
            made = [gathered, _to_float(gathered.outputs[0])]
        self._replace(node, made, name)

    def _gather_quantized(self, name: str, scheme: Scheme, ids: ir.Value | None) -> list[ir.Node]:
        codes, scales = self.data.lookup_view(name, self.checkpoint)
        attributes = {"gather_axis": 0, "quantize_axis": 1, "block_size": scheme.block, "bits": scheme.bits}
        made = [ir.node("GatherBlockQuantized", [codes, ids, scales], attributes=attributes, domain=CONTRIB)]
        for views in self._band_views(name):
            made += refine_lookup(views, ids, made[-1].outputs[0])
        return made

    def _product(self, node: ir.Node) -> None:
        found = self._planned(node.inputs[1])
        if found is None:
            return
        name, transposed = found
        if not transposed:
            raise TieqError("is multiplied untransposed, which no quantized operator does.", where=name)
        self._replace(node, self._multiply(name, node.inputs[0]), name)

    def _gemm(self, node: ir.Node) -> None:
        """``Gemm(x, W, b)``: GPT-2's Conv1D stores W as ``[in, out]``, a Linear layer passes transB."""
        found = self._planned(node.inputs[1])
        if found is None:
            return
        name = found[0]
        made = self._multiply(name, node.inputs[0])
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            made.append(ir.node("Add", [made[-1].outputs[0], node.inputs[2]]))
        self._replace(node, made, name)

    def _multiply(self, name: str, hidden: ir.Value | None) -> list[ir.Node]:
        scheme = self.checkpoint.scheme(name)
        if scheme not in SCHEMES:
            weights = _to_float(self.data.matrix(name, self.checkpoint))
            turned = ir.node("Transpose", [weights.outputs[0]], attributes={"perm": [1, 0]})
            return [weights, turned, ir.node("MatMul", [hidden, turned.outputs[0]])]
        geometry = SCHEMES[scheme]
        codes, scales = self.data.product_view(name, self.checkpoint)
        rows, blocks, _ = self.checkpoint.packed(name)[0].shape
        attributes = {
            "K": blocks * geometry.block,
            "N": rows,
            "bits": geometry.bits,
            "block_size": geometry.block,
            "accuracy_level": self.accuracy_level,
        }
        made = [ir.node("MatMulNBits", [hidden, codes, scales], attributes=attributes, domain=CONTRIB)]
        for views in self._band_views(name):
            made += refine_product(views, hidden, made[-1].outputs[0], self.accuracy_level)
        return made

    def _band_views(self, name: str) -> list[BandViews]:
        rows = len(self.checkpoint.packed(name)[0])
        bands = self.checkpoint.bands(name)
        return [band_views(self.data, band_prefix(name, number), band, rows) for number, band in enumerate(bands)]

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


def _to_float(value: ir.Value) -> ir.Node:
    attributes: dict[str, Any] = {"to": int(ir.DataType.FLOAT)}
    return ir.node("Cast", [value], attributes=attributes)
