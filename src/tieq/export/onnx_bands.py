"""Row bands in the graph: a small table of residuals that both roles of the shared table read and add.

Lookup adds a second GatherBlockQuantized at ``row_map[ids]``; rows outside the band meet its zero row. Logits add the
band's own MatMulNBits to the columns of its rows: scattering these few columns is cheaper than gathering the band's
logits to all columns and adding them, twice as fast with many positions.
Source: ONNX operators Gather, ScatterElements (``reduction`` since opset 16).
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from tieq.bands import Band
from tieq.codecs.schemes import SCHEMES, Scheme
from tieq.errors import RefusedError
from tieq.export.onnx_data import DataFile

CONTRIB = "com.microsoft"
_SCATTER_ADD_OPSET = 16


@dataclasses.dataclass(frozen=True)
class BandViews:
    """A band's initializers: codes in the ranks of both operators over one range of bytes, and where its rows are.

    ``made`` are nodes that have to come before the first use.
    """

    scheme: Scheme
    rows: int
    columns: int
    codes: ir.Value
    lookup_codes: ir.Value
    scales: ir.Value
    row_map: ir.Value
    token_columns: ir.Value
    made: list[ir.Node]


def band_views(data: DataFile, prefix: str, band: Band, table_rows: int) -> BandViews:
    """Write a band's payloads at their first use and name them.

    Raises:
        RefusedError: if the graph's operator set has no adding scatter.
    """
    opset = data.graph.opset_imports.get("", 0)
    if opset < _SCATTER_ADD_OPSET:
        raise RefusedError(
            f"the graph uses ONNX operator set {opset}, and row bands need {_SCATTER_ADD_OPSET}.",
            where=prefix,
            todo="Leave `bands` out.",
        )
    scheme = SCHEMES[band.scheme]
    packed, scales, token_columns = band.padded(table_rows)
    row_map = band.row_map(table_rows)
    rows, blocks, _ = packed.shape
    made, wide = data.widened(f"{prefix}.scales", scales)
    return BandViews(
        scheme=scheme,
        rows=rows,
        columns=blocks * scheme.block,
        codes=data.initializer(f"{prefix}.codes", prefix, packed, packed.shape),
        lookup_codes=data.initializer(f"{prefix}.lookup_codes", prefix, packed, (rows, packed[0].size)),
        scales=wide,
        row_map=data.initializer(f"{prefix}.row_map", f"{prefix}.row_map", row_map, row_map.shape),
        token_columns=data.initializer(f"{prefix}.rows", f"{prefix}.rows", token_columns, token_columns.shape),
        made=made,
    )


def refine_lookup(views: BandViews, ids: ir.Value | None, base: ir.Value) -> list[ir.Node]:
    """Nodes that add the band's residuals to looked-up rows; the last one's output is the sum."""
    place = ir.node("Gather", [views.row_map, ids], attributes={"axis": 0})
    wide = ir.node("Cast", [place.outputs[0]], attributes={"to": int(ir.DataType.INT32)})
    attributes = {
        "gather_axis": 0,
        "quantize_axis": 1,
        "block_size": views.scheme.block,
        "bits": views.scheme.bits,
    }
    inputs = [views.lookup_codes, wide.outputs[0], views.scales]
    residual = ir.node("GatherBlockQuantized", inputs, attributes=attributes, domain=CONTRIB)
    return [*views.made, place, wide, residual, ir.node("Add", [base, residual.outputs[0]])]


def refine_product(views: BandViews, hidden: ir.Value | None, base: ir.Value, accuracy_level: int) -> list[ir.Node]:
    """Nodes that add the band's logits to the columns of its rows; the last one's output is the sum."""
    attributes = {
        "K": views.columns,
        "N": views.rows,
        "bits": views.scheme.bits,
        "block_size": views.scheme.block,
        "accuracy_level": accuracy_level,
    }
    product = ir.node("MatMulNBits", [hidden, views.codes, views.scales], attributes=attributes, domain=CONTRIB)
    shape = ir.node("Shape", [product.outputs[0]])
    columns = ir.node("Expand", [views.token_columns, shape.outputs[0]])
    inputs = [base, columns.outputs[0], product.outputs[0]]
    return [
        *views.made,
        product,
        shape,
        columns,
        ir.node("ScatterElements", inputs, attributes={"axis": -1, "reduction": "add"}),
    ]
