"""The tie in a TFLite file: which constants the lookup and the logits read, and over which bytes.

Works on graphs of token ids and logits, however they were written: the lookup is the gather that the ids index, the
logits are the products nearest upstream of the output, side by side where there are several. What each reads is
followed to the constants and decoded from there; a product may look its rows up. Two tensors over one buffer are one
copy, two buffers of equal bytes are two.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tieq.codecs.schemes import SCHEMES
from tieq.records import Payload
from tieq.validate.litert_file import Place, Tensor
from tieq.validate.litert_graph import BITS, CARRIERS, GATHERS, Graph
from tieq.validate.structure import RowReader, Structure

_PRODUCTS = ("FULLY_CONNECTED", "BATCH_MATMUL")
# What may stand between the product and the output: scalings, soft caps, a bias.
_TAIL = (*CARRIERS, "MUL", "DIV", "TANH", "ADD")


@dataclasses.dataclass(frozen=True)
class _Use:
    """What one role reads: a reader of decoded rows, and the constants behind it (weights, then scales)."""

    read: RowReader
    weights: frozenset[int]
    scales: frozenset[int]


def litert_structure(path: Path) -> Structure:
    """Find the tables of a TFLite file.

    Raises:
        TieqError: if the file is damaged or the roles cannot be found in its graph.
    """
    graph = Graph(path)
    table, lookup = _lookup(graph)
    rows, columns = graph.tensors[table].shape
    uses = {"lookup": lookup, "logits": _logits(graph, rows, columns)}
    return Structure(
        container="tflite",
        path=path,
        file_bytes=path.stat().st_size,
        rows=rows,
        columns=columns,
        payloads=tuple(_payloads(graph, rows * columns, uses)),
        read_lookup=uses["lookup"].read,
        read_logits=uses["logits"].read,
    )


def _lookup(graph: Graph) -> tuple[int, _Use]:
    """The largest matrix that the token ids index, and what comes of its rows."""
    found = []
    for operator in graph.operators:
        if operator.kind in GATHERS:
            ids, table = operator.inputs[:2] if operator.kind == "EMBEDDING_LOOKUP" else operator.inputs[1::-1]
            tensor = graph.tensors[table]
            if graph.is_given(ids) and tensor.place is not None and len(tensor.shape) == 2:
                found.append((tensor.elements, table, operator.outputs[0]))
    if not found:
        raise graph.unknown("no lookup of a constant matrix by the token ids")
    _, table, value = max(found)
    value = _scaled_value(graph, value)
    columns = graph.tensors[table].shape[1]

    def read(ids: NDArray[np.int64], seen: set[int]) -> NDArray[np.float32]:
        return graph.evaluate(value, ids, slice(None), seen).reshape(len(ids), columns)

    seen: set[int] = set()
    read(np.zeros(1, np.int64), seen)
    rows = graph.tensors[table].shape[0]
    return table, _use(graph, lambda piece: read(np.arange(rows)[piece], set()), seen)


def _scaled_value(graph: Graph, value: int) -> int:
    """The rows behind a product with scales that the same ids looked up, where there is one; else as they are."""
    ahead = value
    while True:
        operators = list(graph.consumers(ahead))
        if len(operators) != 1:
            return value
        (operator,) = operators
        if operator.kind == "MUL" and all(_is_looked_up(graph, each) for each in operator.inputs):
            return operator.outputs[0]
        if operator.kind not in CARRIERS:
            return value
        ahead = operator.outputs[0]


def _is_looked_up(graph: Graph, index: int) -> bool:
    while (operator := graph.producers.get(index)) is not None and operator.kind in CARRIERS:
        index = operator.inputs[0]
    return operator is not None and operator.kind in GATHERS


def _logits(graph: Graph, rows: int, columns: int) -> _Use:
    """The products whose results, side by side, are the logits."""
    outputs = [index for index in graph.outputs if graph.tensors[index].shape[-1:] == (rows,)]
    if not outputs:
        raise graph.unknown(f"no output has the table's {rows} rows as its last dimension")
    parts = _products(graph, outputs[0])
    sizes = [graph.tensors[part].shape[-1] for part in parts]
    if sum(sizes) != rows:
        raise graph.unknown(f"products of {sum(sizes)} columns make up the logits of {rows} rows")
    starts = np.concatenate([[0], np.cumsum(sizes)]).tolist()

    def weights(part: int, piece: slice, seen: set[int]) -> NDArray[np.float32]:
        found = graph.evaluate(graph.producers[part].inputs[1], None, piece, seen)
        if found[:1].size not in (0, columns):
            raise graph.unknown(f"the logits multiply rows of {found[0].size} columns, the table has {columns}")
        return found.reshape(len(found), columns)

    def read(piece: slice) -> NDArray[np.float32]:
        first, last, _ = piece.indices(rows)
        found = []
        for part, start, stop in zip(parts, starts, starts[1:], strict=False):
            if start < last and first < stop:
                found.append(weights(part, slice(max(first, start) - start, min(last, stop) - start), set()))
        return np.concatenate(found) if found else np.zeros((0, columns), np.float32)

    seen: set[int] = set()
    for part in parts:
        weights(part, slice(0, 1), seen)
    return _use(graph, read, seen)


def _products(graph: Graph, index: int) -> list[int]:
    """Outputs of the products upstream of a value, left to right."""
    while True:
        operator = graph.producers.get(index)
        if operator is None:
            raise graph.unknown("no product upstream of the logits")
        if operator.kind in _PRODUCTS:
            return [index]
        if operator.kind == "CONCATENATION":
            return [part for each in operator.inputs for part in _products(graph, each)]
        computed = [each for each in operator.inputs if each in graph.producers]
        if operator.kind not in _TAIL or len(computed) != 1:
            raise graph.unknown(f"{operator.kind} between the product and the logits")
        (index,) = computed


def _use(graph: Graph, read: Callable[[slice], NDArray[np.float32]], seen: set[int]) -> _Use:
    """Constants by what they are: scales are read for blocks, or multiply codes that have no scale of their own."""
    blocks = {q.blocks for index in seen if (q := graph.tensors[index].quantization) is not None}
    largest = max(graph.tensors[index].shape[-1] for index in seen)
    scales = {index for index in seen if index in blocks or graph.tensors[index].shape[-1] < largest}
    return _Use(read, frozenset(seen - scales), frozenset(scales))


def _payloads(graph: Graph, weights: int, uses: dict[str, _Use]) -> list[Payload]:
    """Distinct runs of bytes that hold as many weights as the table, or that a role reads its rows from."""
    by_place: dict[Place, list[Tensor]] = defaultdict(list)
    for tensor in graph.tensors:
        if tensor.place is not None and tensor.kind in BITS and tensor.elements == weights:
            by_place[tensor.place].append(tensor)
    found = []
    for place, tensors in by_place.items():
        indices = {tensor.index for tensor in tensors}
        readers = [role for role, use in uses.items() if use.weights & indices]
        scales = {index for use in uses.values() if use.weights & indices for index in use.scales}
        found.append(_payload(graph, weights, [place], tensors, readers, scales))
    for role, use in uses.items():  # a role whose rows lie in several constants
        pieces = [graph.tensors[index] for index in sorted(use.weights)]
        if all(tensor.elements != weights for tensor in pieces):
            places = list(dict.fromkeys(tensor.place for tensor in pieces if tensor.place is not None))
            found.append(_payload(graph, weights, places, pieces, [role], set(use.scales)))
    return found


def _payload(
    graph: Graph, weights: int, places: list[Place], tensors: list[Tensor], readers: list[str], scales: set[int]
) -> Payload:
    beside = {place for index in scales if (place := graph.tensors[index].place) is not None}
    own = max(0 if tensor.quantization is None else tensor.quantization.nbytes for tensor in tensors)
    nbytes = sum(place.length for place in places) + sum(place.length for place in beside) + own
    first = tensors[0]
    block = 0 if first.quantization is None else first.quantization.block
    if not block and scales:
        block = first.shape[1] // graph.tensors[min(scales)].shape[1]
    ends = f"{graph.path.name} at byte {places[0].offset}" + (f" and {len(places) - 1} more" if places[1:] else "")
    chains = {*GATHERS, *_PRODUCTS}
    others = {op.kind for tensor in tensors for op in graph.consumers(tensor.index) if op.kind not in chains}
    return Payload(
        names=tuple(sorted({tensor.name for tensor in tensors})),
        location=ends,
        nbytes=nbytes,
        scheme=_scheme(first, block),
        bits_per_weight=8 * nbytes / weights,
        readers=(*readers, *sorted(others)),
    )


def _scheme(tensor: Tensor, block: int) -> str:
    bits = BITS[tensor.kind]
    if tensor.kind.startswith("FLOAT"):
        return tensor.kind.lower()
    if block:
        known = (name for name, scheme in SCHEMES.items() if (scheme.bits, scheme.block) == (bits, block))
        return next((name for name in known if SCHEMES[name].onnx), f"int{bits} in blocks of {block}")
    return f"int{bits}, a scale a row"
