"""The two quantized operators, and what stands in for them where a matrix is a float one.

Lookups are GatherBlockQuantized and products MatMulNBits. The two roles of a shared table are two initializer names
over one range of bytes: the operators want different ranks, and a Reshape between them would be folded into a second
table when the session starts. Scales are stored as they are, in fp16; a Cast widens them, which a session folds when it
starts, because the operators take them in the activations' type. Row bands are added to both (``onnx_bands.py``).
Source: ONNX Runtime ``docs/ContribOperators.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from tieq.bands import band_prefix
from tieq.codecs.schemes import SCHEMES
from tieq.export.onnx_bands import BandViews, band_views, refine_lookup, refine_product
from tieq.export.onnx_data import DataFile
from tieq.quantize import QuantizedCheckpoint

CONTRIB = "com.microsoft"


class Products:
    """Makes the nodes that look a quantized matrix up or multiply by it; the last one's output is the result.

    Args:
        data: where the packed bytes go.
        checkpoint: quantized matrices.
        accuracy_level: MatMulNBits' attribute (4: int8 activations, 0: the input's own type).
    """

    def __init__(self, data: DataFile, checkpoint: QuantizedCheckpoint, accuracy_level: int) -> None:
        self._data, self._checkpoint, self._level = data, checkpoint, accuracy_level

    def lookup(self, name: str, ids: ir.Value | None) -> list[ir.Node]:
        """Rows ``[..., columns]`` float32 of a matrix at ``ids``."""
        scheme = self._checkpoint.scheme(name)
        if scheme not in SCHEMES:
            table = self._data.matrix(name, self._checkpoint)
            gathered = ir.node("Gather", [table, ids], attributes={"axis": 0})
            return [gathered, to_float(gathered.outputs[0])]
        geometry = SCHEMES[scheme]
        codes = self._data.lookup_view(name, self._checkpoint)
        made, scales = self._data.scales((name,), self._checkpoint)
        attributes = {"gather_axis": 0, "quantize_axis": 1, "block_size": geometry.block, "bits": geometry.bits}
        made.append(ir.node("GatherBlockQuantized", [codes, ids, scales], attributes=attributes, domain=CONTRIB))
        for views in self._band_views(name):
            made += refine_lookup(views, ids, made[-1].outputs[0])
        return made

    def multiply(
        self, names: str | Sequence[str], hidden: ir.Value | None, bias: ir.Value | None = None
    ) -> list[ir.Node]:
        """``hidden @ W.T + bias`` for one matrix, or for several, whose rows are then one after the other.

        Several have to be of one integer scheme: see :meth:`together`.
        """
        names = (names,) if isinstance(names, str) else tuple(names)
        scheme = self._checkpoint.scheme(names[0])
        if scheme not in SCHEMES:
            assert len(names) == 1
            weights = to_float(self._data.matrix(names[0], self._checkpoint))
            turned = ir.node("Transpose", [weights.outputs[0]], attributes={"perm": [1, 0]})
            made = [weights, turned, ir.node("MatMul", [hidden, turned.outputs[0]])]
            if bias is not None:
                made.append(ir.node("Add", [made[-1].outputs[0], bias]))
            return made
        geometry = SCHEMES[scheme]
        codes = self._data.product_view(names, self._checkpoint)
        made, scales = self._data.scales(names, self._checkpoint)
        rows, blocks, _ = codes.shape.numpy() if codes.shape is not None else (0, 0, 0)
        attributes = {
            "K": blocks * geometry.block,
            "N": rows,
            "bits": geometry.bits,
            "block_size": geometry.block,
            "accuracy_level": self._level,
        }
        inputs = [hidden, codes, scales, *([None, None, bias] if bias is not None else [])]
        made.append(ir.node("MatMulNBits", inputs, attributes=attributes, domain=CONTRIB))
        for views in self._band_views(names[0]):
            made += refine_product(views, hidden, made[-1].outputs[0], self._level)
        return made

    def together(self, names: Sequence[str]) -> bool:
        """Whether several matrices of the same inputs can be one product."""
        schemes = {self._checkpoint.scheme(name) for name in names}
        return len(schemes) == 1 and schemes <= set(SCHEMES)

    def _band_views(self, name: str) -> list[BandViews]:
        bands = self._checkpoint.bands(name)
        if not bands:
            return []
        rows = len(self._checkpoint.packed(name)[0])
        return [band_views(self._data, band_prefix(name, number), band, rows) for number, band in enumerate(bands)]


def to_float(value: ir.Value) -> ir.Node:
    """A Cast to float32."""
    attributes: dict[str, Any] = {"to": int(ir.DataType.FLOAT)}
    return ir.node("Cast", [value], attributes=attributes)
