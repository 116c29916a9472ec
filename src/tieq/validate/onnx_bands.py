"""Row bands in an ONNX graph: small tables of residuals that the roles add to the table, found by what reads them.

The lookup adds ``GatherBlockQuantized(band, row_map[input_ids])`` to the row, the logits scatter-add
``MatMulNBits(hidden, band)`` to columns. Each role so pairs rows of the table with rows of the band; both must read the
same bytes and have the same pairs, all-zero rows of the band left out.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.errors import TieqError
from tieq.records import Payload
from tieq.validate.onnx_bytes import Place, place_of
from tieq.validate.onnx_graph import Graph, LogitsTail, Use
from tieq.validate.structure import RowReader

# A runtime's optimizer merges the sum with the normalization that follows; the fourth output is the sum itself.
_SUMS = {"Add": 0, "SkipLayerNormalization": 3, "SkipSimplifiedLayerNormalization": 3}
_PASSING = ("Cast", "Identity", "Reshape")


@dataclasses.dataclass(frozen=True)
class BandUse:
    """A band as one role reads it.

    Attributes:
        use: its codes, scales and geometry.
        index: initializer that holds the row map (lookup) or the columns (logits).
        pairs: row of the table and row of the band that is added to it, ``[pairs, 2]`` int64, ascending; rows of the
            band that are all zero left out.
    """

    use: Use
    index: str
    pairs: NDArray[np.int64]


def lookup_bands(graph: Graph, value: str, rows: int) -> list[BandUse]:
    """The bands whose residuals are added to the looked-up rows ``value``, in the order of the sums.

    Raises:
        TieqError: if a band is added to a part of the readers only, or its row map leaves the band.
    """
    found = []
    while (step := _next_sum(graph, value)) is not None:
        gather, row_map, value = step
        use = graph.use(gather, gather.input[0])
        if use is None:
            raise TieqError(f"'{gather.name}' reads no stored band.", where=str(graph.path))
        places = _indices(graph, row_map, graph.extent(use)[0])
        if len(places) != rows:
            raise TieqError(f"row map '{row_map}' has {len(places)} rows, not {rows}.", where=str(graph.path))
        found.append(_band_use(graph, use, row_map, np.arange(rows), places))
    return found


def _next_sum(graph: Graph, value: str) -> tuple[Any, str, str] | None:
    """The first sum of a value with a band: the band's gather, its row map, and the sum's name."""
    readers = graph.consumers.get(value, []) if value else []
    for node in readers:
        if node.op_type in _PASSING:
            deeper = _next_sum(graph, node.output[0])
            if deeper is not None:
                return deeper
        if node.op_type not in _SUMS:
            continue
        for other in node.input[:2]:
            gather = None if other == value else _band_gather(graph, other)
            if gather is None:
                continue
            if len(readers) > 1:
                raise TieqError(f"'{value}' is read with a row band and without it.", where=str(graph.path))
            at = _SUMS[node.op_type]
            return *gather, node.output[at] if len(node.output) > at else ""
    return None


def _band_gather(graph: Graph, name: str) -> tuple[Any, str] | None:
    node = graph.producers.get(graph.upstream(name))
    if node is None or node.op_type != "GatherBlockQuantized":
        return None
    index = graph.producers.get(graph.upstream(node.input[1]))
    if index is None or index.op_type != "Gather" or graph.upstream(index.input[1]) != "input_ids":
        return None
    row_map = graph.upstream(index.input[0])
    return (node, row_map) if row_map in graph.initializers else None


def logits_bands(graph: Graph, tail: LogitsTail, rows: int) -> list[BandUse]:
    """The bands whose logits are added to columns of the product, in the order of the sums.

    Raises:
        TieqError: if something else is scattered into the logits, or the columns leave the table.
    """
    found = []
    for node in tail.scatters:
        attributes = {attribute.name: attribute for attribute in node.attribute}
        adds = "reduction" in attributes and attributes["reduction"].s == b"add"
        last = "axis" in attributes and attributes["axis"].i in (-1, 2)
        product = graph.producers.get(graph.upstream(node.input[2]))
        use = None
        if product is not None and product.op_type == "MatMulNBits" and product.input[0] == tail.hidden:
            use = graph.use(product, product.input[1])
        columns = graph.upstream(node.input[1], (*_PASSING, "Expand", "Unsqueeze"))
        if not adds or not last or use is None or columns not in graph.initializers:
            raise TieqError(f"'{node.name}' puts no row band's logits into the logits.", where=str(graph.path))
        band_rows = graph.extent(use)[0]
        table_rows = _indices(graph, columns, rows)
        if len(table_rows) != band_rows:
            raise TieqError(
                f"'{columns}' names {len(table_rows)} columns for {band_rows} rows of a band.", where=str(graph.path)
            )
        found.append(_band_use(graph, use, columns, table_rows, np.arange(band_rows)))
    return found


def _band_use(graph: Graph, use: Use, index: str, table_rows: NDArray[np.int64], places: NDArray[np.int64]) -> BandUse:
    scales = graph.array(use.scales or "").reshape(graph.extent(use)[0], -1)
    live = (scales != 0).any(axis=1)[places]
    pairs = np.stack([table_rows[live], places[live]], axis=1)
    return BandUse(use, index, pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))])


def _indices(graph: Graph, name: str, bound: int) -> NDArray[np.int64]:
    values = np.asarray(graph.array(name)).astype(np.int64).reshape(-1)
    if values.size and (values.min() < 0 or values.max() >= bound):
        raise TieqError(f"'{name}' points outside of {bound} rows.", where=str(graph.path))
    return values


def with_bands(graph: Graph, base: RowReader, bands: list[BandUse], rows: int) -> RowReader:
    """A reader of the table with the bands of one role added, in float32 and in the graph's order.

    Args:
        graph: the graph.
        base: reads the table itself.
        bands: as :func:`lookup_bands` or :func:`logits_bands` found them.
        rows: rows of the table.
    """

    def read(piece: slice) -> NDArray[np.float32]:
        values = np.array(base(piece))
        start, stop, _ = piece.indices(rows)
        for band in bands:
            first, last = np.searchsorted(band.pairs[:, 0], (start, stop))
            table_rows, places = band.pairs[first:last].T
            np.add.at(values, table_rows - start, graph.decode(band.use, *graph.extent(band.use), places))
        return values

    return read


def band_payloads(graph: Graph, rows: int, columns: int, lookup: list[BandUse], logits: list[BandUse]) -> list[Payload]:
    """Each band's bytes once, with the roles that read them and, where these do not read it alike, the flaw.

    Args:
        graph: the graph.
        rows: rows of the table.
        columns: its columns.
        lookup: as :func:`lookup_bands` found them.
        logits: as :func:`logits_bands` found them.
    """
    by_place: dict[Place, dict[str, list[BandUse]]] = {}
    for role, bands in (("lookup", lookup), ("logits", logits)):
        for band in bands:
            place = place_of(graph.initializers[band.use.weights], graph.path)
            by_place.setdefault(place, {}).setdefault(role, []).append(band)
    found = []
    for place, readers in by_place.items():
        uses = [use for each in readers.values() for use in each]
        names = {name for name, tensor in graph.initializers.items() if place_of(tensor, graph.path) == place}
        others = {name for use in uses for name in (use.use.scales, use.index) if name is not None}
        parts = {place, *(place_of(graph.initializers[name], graph.path) for name in others)}
        nbytes = sum(part.length for part in parts)
        found.append(
            Payload(
                names=tuple(sorted(names)),
                location=str(place),
                nbytes=nbytes,
                scheme=graph.scheme(uses[0].use.weights, uses[0].use),
                bits_per_weight=8 * nbytes / (rows * columns),
                readers=tuple(readers),
                band_rows=len(np.unique(uses[0].pairs[:, 0])),
                flaw=_flaw(graph, readers),
            )
        )
    return found


def _flaw(graph: Graph, readers: dict[str, list[BandUse]]) -> str:
    """Where the roles read a band's bytes differently; empty if nowhere, or if one role alone reads them."""
    for role, uses in readers.items():
        if len(uses) > 1:
            return f"added {len(uses)} times by the {role}"
    if len(readers) < 2:
        return ""
    (lookup,), (logits,) = readers["lookup"], readers["logits"]
    if (lookup.use.bits, lookup.use.block) != (logits.use.bits, logits.use.block):
        return "read as blocks of two kinds"
    scales = [place_of(graph.initializers[b.use.scales or ""], graph.path) for b in (lookup, logits)]
    if scales[0] != scales[1]:
        return f"two sets of scales: {scales[0]} and {scales[1]}"
    left, right = ({tuple(pair) for pair in band.pairs.tolist()} for band in (lookup, logits))
    if left != right:
        row = min(left ^ right)[0]
        return f"'{lookup.index}' and '{logits.index}' differ at row {row}"
    return ""
