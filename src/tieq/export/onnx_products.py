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

import numpy as np
import onnx_ir as ir

from tieq.bands import band_prefix
from tieq.codecs.schemes import SCHEMES
from tieq.export.onnx_bands import BandViews, band_views, refine_lookup, refine_product
from tieq.export.onnx_data import DataFile
from tieq.quantize import QuantizedCheckpoint

CONTRIB = "com.microsoft"
# A piece of a matrix: enough for a kernel to be busy, little beside a model whose table is that large. Its rows are a
# multiple of what kernels take at once, and keep pieces on pages.
_PIECE_BYTES, _PIECE_ROWS = 32 << 20, 64


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
        codes = self._data.lookup_view(name, self._checkpoint)
        made, scales = self._data.scales((name,), self._checkpoint)
        made.append(_gather(scheme, codes, ids, scales))
        for views in self._band_views(name):
            made += refine_lookup(views, ids, made[-1].outputs[0])
        return made

    def lookup_rows_first(self, name: str, ids: ir.Value) -> list[ir.Node]:
        """The same, with the rows' codes and scales gathered before they are decoded.

        Costs four more nodes and leaves the scales of a large table in the file, where :meth:`lookup` has them
        widened in memory. Where one product reads the whole table it needs them widened anyway.
        """
        if not self.large(name):
            return self.lookup(name, ids)
        codes = self._data.lookup_view(name, self._checkpoint)
        scales = self._data.half_scales(name, self._checkpoint)
        # The decoder picks one entry of a leading axis, the only one: all that was gathered.
        only = self._data.constant(np.array(0, np.int64))
        leading = ir.node("Unsqueeze", [ids, self._data.constant(np.array([0], np.int64))])
        of_rows = [
            ir.node("Gather", [stored, leading.outputs[0]], attributes={"axis": 0}) for stored in (codes, scales)
        ]
        wide = to_float(of_rows[1].outputs[0])
        scheme = self._checkpoint.scheme(name)
        decoded = _gather(scheme, of_rows[0].outputs[0], only, wide.outputs[0], quantize_axis=3)
        made = [leading, *of_rows, wide, decoded]
        for views in self._band_views(name):
            made += refine_lookup(views, ids, made[-1].outputs[0])
        return made

    def large(self, name: str) -> bool:
        """Whether products are by pieces of the matrix."""
        return self._piece_rows(name) < self._checkpoint.extent(name)[0]

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
        codes = self._data.product_view(names, self._checkpoint)
        made, scales = self._data.scales(names, self._checkpoint)
        made.append(self._product(scheme, hidden, codes, scales, bias))
        for views in self._band_views(names[0]):
            made += refine_product(views, hidden, made[-1].outputs[0], self._level)
        return made

    def multiply_in_pieces(self, name: str, hidden: ir.Value | None) -> list[ir.Node]:
        """``hidden @ W.T`` by one product or, for a large matrix, by some of its rows at a time, side by side.

        A session reorders a matrix into memory of its own and lets the file's pages go afterwards, so that a table in
        one piece is there twice for a moment; in a 1B model that moment is the peak. The matrix has to be in the data
        file already.
        """
        if not self.large(name):
            return self.multiply(name, hidden)
        scheme, step, rows = self._checkpoint.scheme(name), self._piece_rows(name), self._checkpoint.extent(name)[0]
        made, products = [], []
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            codes = self._data.rows(f"{name}.codes.{start}", name, start, stop)
            stored = self._data.rows(f"{name}.scales.{start}", f"{name}.scales", start, stop)
            scales = to_float(stored)
            products.append(self._product(scheme, hidden, codes, scales.outputs[0]))
            made += [scales, products[-1]]
        sides = [product.outputs[0] for product in products]
        made.append(ir.node("Concat", sides, attributes={"axis": -1}))
        for views in self._band_views(name):
            made += refine_product(views, hidden, made[-1].outputs[0], self._level)
        return made

    def _product(
        self, scheme: str, hidden: ir.Value | None, codes: ir.Value, scales: ir.Value, bias: ir.Value | None = None
    ) -> ir.Node:
        geometry = SCHEMES[scheme]
        rows, blocks, _ = codes.shape.numpy() if codes.shape is not None else (0, 0, 0)
        attributes = {
            "K": blocks * geometry.block,
            "N": rows,
            "bits": geometry.bits,
            "block_size": geometry.block,
            "accuracy_level": self._level,
        }
        inputs = [hidden, codes, scales, *([None, None, bias] if bias is not None else [])]
        return ir.node("MatMulNBits", inputs, attributes=attributes, domain=CONTRIB)

    def _piece_rows(self, name: str) -> int:
        rows, columns = self._checkpoint.extent(name)
        scheme = self._checkpoint.scheme(name)
        if scheme not in SCHEMES:
            return rows
        pieces = max(1, -(-rows * columns * SCHEMES[scheme].bits // 8 // _PIECE_BYTES))
        return -(-rows // pieces // _PIECE_ROWS) * _PIECE_ROWS

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


def _gather(scheme: str, codes: ir.Value, ids: ir.Value | None, scales: ir.Value, quantize_axis: int = 1) -> ir.Node:
    geometry = SCHEMES[scheme]
    attributes = {
        "gather_axis": 0,
        "quantize_axis": quantize_axis,
        "block_size": geometry.block,
        "bits": geometry.bits,
    }
    return ir.node("GatherBlockQuantized", [codes, ids, scales], attributes=attributes, domain=CONTRIB)
