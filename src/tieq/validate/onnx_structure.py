"""The tie in an ONNX file: which initializers the lookup and the logits read, and over which bytes.

Works on any decoder graph: the lookup is the gather that ``input_ids`` indexes, the logits matrix is the nearest
product upstream of the ``logits`` output. A table payload is a distinct run of bytes that holds as many weights as
the lookup table, whoever reads it. Row bands that the roles add to the table are found by what reads them.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from tieq.errors import TieqError
from tieq.records import Payload
from tieq.validate.onnx_bands import BandUse, band_payloads, logits_bands, lookup_bands, with_bands
from tieq.validate.onnx_bytes import Place, place_of
from tieq.validate.onnx_graph import CARRIERS, GATHERS, PRODUCTS, Graph, Use
from tieq.validate.structure import Structure


def onnx_structure(path: Path) -> Structure:
    """Find the tables of an ONNX file and of its external data.

    Raises:
        TieqError: if the file is damaged or the roles cannot be found in its graph.
    """
    import onnx

    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # protobuf's exceptions share no base class
        raise TieqError(f"cannot be read as ONNX ({error}).", where=str(path)) from error
    graph = Graph(path, model)
    lookup, looked_up = graph.lookup()
    tail = graph.logits()
    rows, columns = graph.extent(lookup)
    bands = {"lookup": lookup_bands(graph, looked_up, rows), "logits": logits_bands(graph, tail, rows)}
    uses = {"lookup": lookup, "logits": tail.use}
    base = {role: _reader(graph, use, rows, columns) for role, use in uses.items()}
    return Structure(
        container="onnx",
        path=path,
        file_bytes=path.stat().st_size + graph.external_bytes(),
        rows=rows,
        columns=columns,
        payloads=(
            *_tables(graph, rows, columns, uses, bands),
            *band_payloads(graph, rows, columns, bands["lookup"], bands["logits"]),
        ),
        read_lookup=with_bands(graph, base["lookup"], bands["lookup"], rows),
        read_logits=with_bands(graph, base["logits"], bands["logits"], rows),
        base_lookup=base["lookup"],
        base_logits=base["logits"],
    )


def _reader(graph: Graph, use: Use, rows: int, columns: int) -> Any:
    return lambda piece: graph.decode(use, rows, columns, piece)


def _tables(
    graph: Graph, rows: int, columns: int, uses: dict[str, Use], bands: dict[str, list[BandUse]]
) -> list[Payload]:
    """Distinct runs of bytes that hold ``rows * columns`` weights, with the roles that read them; bands are none."""
    residuals = {place_of(graph.initializers[b.use.weights], graph.path) for found in bands.values() for b in found}
    by_place: dict[Place, list[str]] = defaultdict(list)
    for name, tensor in graph.initializers.items():
        place = place_of(tensor, graph.path)
        if place not in residuals and _weights_held(graph, tensor, rows, uses) == rows * columns:
            by_place[place].append(name)
    found = []
    for place, names in by_place.items():
        readers = [role for role, use in uses.items() if use.weights in names]
        used = next((use for use in uses.values() if use.weights in names), None)
        scales = graph.scales_bytes(used)
        places = [graph.scales_place(use) for use in uses.values() if use.weights in names]
        found.append(
            Payload(
                names=tuple(sorted(names)),
                location=str(place),
                nbytes=place.length + scales,
                scheme=graph.scheme(names[0], used),
                bits_per_weight=8 * (place.length + scales) / (rows * columns),
                readers=(*readers, *_other_readers(graph, names)),
                flaw=f"two sets of scales: {' and '.join(places)}" if len(set(places)) > 1 else "",
                scales=places[0] if places else "",
            )
        )
    return found


def _weights_held(graph: Graph, tensor: Any, rows: int, uses: dict[str, Use]) -> int:
    """Weights in an initializer, if it has a table's rows: elements for floats, codes for packed bytes."""
    from onnx import TensorProto, helper

    dims = list(tensor.dims)
    if not dims or rows not in dims:
        return 0
    count = int(np.prod(dims))
    if tensor.data_type in (TensorProto.UINT8, TensorProto.INT8):
        bits = next((use.bits for use in uses.values() if use.weights == tensor.name), 0) or _bits_of(
            graph, tensor.name
        )
        return count * 8 // bits if bits else count
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return count if np.issubdtype(dtype, np.floating) or dtype.itemsize <= 2 else 0


def _bits_of(graph: Graph, name: str) -> int:
    """Bits a code in a byte tensor, from the operator that reads it; unread ones count as the roles' bits."""
    bits = {}
    for node in graph.nodes:
        if node.op_type in ("MatMulNBits", "GatherBlockQuantized"):
            value = next((a.i for a in node.attribute if a.name == "bits"), 4)
            at = 1 if node.op_type == "MatMulNBits" else 0
            bits[node.input[at]] = value
    return bits.get(name) or next(iter(bits.values()), 0)


def _other_readers(graph: Graph, names: list[str]) -> list[str]:
    """Operators beyond the two roles' chains that read one of these names."""
    chain_ends = {"GatherBlockQuantized", "MatMulNBits", *GATHERS, *PRODUCTS, *CARRIERS}
    return [
        f"{node.op_type} {node.name}"
        for node in graph.nodes
        if node.op_type not in chain_ends and set(names) & set(node.input)
    ]
