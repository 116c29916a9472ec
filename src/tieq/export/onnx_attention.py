"""What the attention of every layer takes beside its queries, keys and values: lengths, rotations, the mask.

Two things differ from what onnxruntime-genai's builder writes. Cosines and sines are computed instead of stored for all
positions that there could be, so the file holds none. And the mask is added to the scores and positions are an input,
so that padding may be on either side. The graph for generation leaves both out, as the builder's does: its prompts may
be padded on the right alone. Each of its nodes counts, because it runs once for every token.
Source: ONNX Runtime ``docs/ContribOperators.md``, GroupQueryAttention.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from tieq.export.onnx_nodes import Nodes
from tieq.source.decoder import Decoder, Rotary

if TYPE_CHECKING:
    import onnx_ir as ir

# Added to the score of a key that the mask leaves out: far below any score, far above the lowest float32.
_MASKED = -1e30
# A position that no token has.
_BEYOND = 1 << 24
# Tables of cosines and sines that a session may hold.
_FOLDED_BYTES = 4 << 20
# ``onnx.TensorProto.DataType``.
FLOAT, INT32, INT64, BOOL = 1, 6, 7, 9
LAST = np.iinfo(np.int64).max


@dataclasses.dataclass(frozen=True)
class SharedInputs:
    """Inputs of GroupQueryAttention that all layers share.

    Attributes:
        last_keys: number of the last key of each sequence, ``[batch]`` int32.
        total: keys in all, int32.
        tables: cosines and sines of each kind of rotary embedding, ``[at least total, rotary columns / 2]`` float32.
        rows: the row in them of each position, ``[batch, length]`` int64; None where the operator counts them itself.
        bias: what is added to the scores, ``[batch, 1, length, total]`` float32, or None.
    """

    last_keys: ir.Value
    total: ir.Value
    tables: list[tuple[ir.Value, ir.Value]]
    rows: ir.Value | None
    bias: ir.Value | None


def shared_inputs(nodes: Nodes, decoder: Decoder, ids: ir.Value, mask: ir.Value, positions: ir.Value) -> SharedInputs:
    """Add the nodes that make them for any padding.

    Args:
        nodes: the graph.
        decoder: for its rotary embeddings.
        ids: ``[batch, length]`` int64.
        mask: ``[batch, total]`` int64, 0 where a key is padding.
        positions: ``[batch, length]`` int64.
    """
    total = _extent(nodes, mask, "attention/total")
    length = _extent(nodes, ids, "attention/length")
    most = nodes("Cast", [total], "attention/total32", {"to": INT32})
    batch = nodes("Shape", [mask], "attention/batch", {"start": 0, "end": 1})
    keys = nodes("Expand", [most, batch], "attention/keys")
    rotated = _positions(nodes, mask, positions, length)
    tables, rows = _tables(nodes, decoder, rotated, total)
    one = nodes.constant("one32", np.array([1], np.int32))
    return SharedInputs(
        last_keys=nodes("Sub", [keys, one], "attention/last_keys"),
        total=nodes("Squeeze", [most], "attention/total_scalar"),
        tables=tables,
        rows=rows,
        bias=_mask_bias(nodes, mask, batch, length, total),
    )


def generation_inputs(
    nodes: Nodes, decoder: Decoder, ids: ir.Value, mask: ir.Value, context: int
) -> tuple[SharedInputs, ir.Value]:
    """Add the nodes that make them where prompts are padded on the right alone.

    Each of these nodes counts: they run once for every token.

    Args:
        nodes: the graph.
        decoder: for its rotary embeddings.
        ids: ``[batch, length]`` int64; several tokens after others only in a batch of one.
        mask: ``[batch, total]`` int64, 0 where a key is padding.
        context: most positions that there may be.

    Returns:
        The inputs, and which of its tokens is each sequence's last, ``[batch, 1, 1]`` int64.
    """
    total, one = _extent(nodes, mask, "attention/total"), nodes.shape(1)
    most = nodes("Cast", [total], "attention/total32", {"to": INT32})
    shown = nodes("ReduceSum", [mask, one], "attention/shown", {"keepdims": 0})
    last_key = nodes("Sub", [shown, one], "attention/last_key")
    # In a prompt, the last key's; after it there is one token, whatever padding came before.
    last_token = nodes("Sub", [_extent(nodes, ids, "attention/length"), one], "logits/last_token")
    last = nodes("Min", [last_key, last_token], "logits/last")
    inputs = SharedInputs(
        last_keys=nodes("Cast", [last_key], "attention/last_keys", {"to": INT32}),
        total=nodes("Squeeze", [most], "attention/total_scalar"),
        tables=_tables_of_all(nodes, decoder, total, context),
        rows=None,
        bias=None,
    )
    return inputs, nodes("Unsqueeze", [last, nodes.shape(1, 2)], "logits/index")


def _extent(nodes: Nodes, value: ir.Value, name: str) -> ir.Value:
    """Its second extent, ``[1]`` int64."""
    return nodes("Shape", [value], name, {"start": 1, "end": 2})


def _mask_bias(nodes: Nodes, mask: ir.Value, batch: ir.Value, length: ir.Value, total: ir.Value) -> ir.Value:
    wide = nodes("Cast", [mask], "attention/mask", {"to": FLOAT})
    hidden = nodes("Sub", [nodes.constant("shown", np.array(1, np.float32)), wide], "attention/left_out")
    bias = nodes("Mul", [hidden, nodes.constant("masked", np.array(_MASKED, np.float32))], "attention/bias")
    bias = nodes("Unsqueeze", [bias, nodes.shape(1, 2)], "attention/bias_by_head")
    extent = nodes("Concat", [batch, nodes.shape(1), length, total], "attention/extent", {"axis": 0})
    return nodes("Expand", [bias, extent], "attention/bias_by_query")


def _positions(nodes: Nodes, mask: ir.Value, positions: ir.Value, length: ir.Value) -> ir.Value:
    """Positions to rotate by wherever the padding is: those asked for, moved by the padding on the left.

    Rotations act through differences alone, so positions may count the padding on the left, in every step. Then all
    sequences agree wherever they have a token, which is what the operator assumes of several tokens.
    """
    shown = nodes("Cast", [mask], "attention/mask32", {"to": INT32})
    from_end = nodes("Neg", [length], "attention/from_end")
    now = nodes("Slice", [mask, from_end, nodes.shape(LAST), nodes.shape(1)], "attention/mask_now")
    padding = nodes("ArgMax", [shown], "attention/left_padding", {"axis": 1, "keepdims": 1})
    moved = nodes("Add", [positions, padding], "attention/moved")
    is_token = nodes("Cast", [now], "attention/is_token", {"to": BOOL})
    tokens = nodes("Where", [is_token, moved, nodes.shape(_BEYOND)], "attention/tokens")
    agreed = nodes("ReduceMin", [tokens, nodes.shape(0)], "attention/agreed", {"keepdims": 1})
    wide = nodes("Expand", [agreed, nodes("Shape", [moved], "attention/each_shape")], "attention/for_all")
    is_prompt = nodes("Greater", [length, nodes.shape(1)], "attention/is_prompt")
    return nodes("Where", [is_prompt, wide, moved], "attention/rotated")


def _tables_of_all(nodes: Nodes, decoder: Decoder, total: ir.Value, context: int) -> list[tuple[ir.Value, ir.Value]]:
    """Tables with a row for each position, in order.

    Those of all positions that there may be depend on nothing, and a session folds them when it starts. Where they
    would be large, each step computes as many as there are keys: little beside what attention to these costs.
    """
    zero, one = (nodes.constant(f"float.{value}", np.array(value, np.float32)) for value in (0, 1))
    if context * sum(rotary.frequencies.nbytes for rotary in decoder.rotaries) * 2 <= _FOLDED_BYTES:
        stop = nodes.constant("context", np.array(context, np.float32))
    else:
        stop = nodes("Squeeze", [nodes("Cast", [total], "attention/total_float", {"to": FLOAT})], "attention/stop")
    order = nodes("Range", [zero, stop, one], "attention/positions")
    column = nodes("Reshape", [order, nodes.shape(-1, 1)], "attention/position_column")
    return [_table(nodes, number, rotary, column, None) for number, rotary in enumerate(decoder.rotaries)]


def _tables(
    nodes: Nodes, decoder: Decoder, positions: ir.Value, total: ir.Value
) -> tuple[list[tuple[ir.Value, ir.Value]], ir.Value]:
    """Tables in which every position that is asked for has a row of its own, and these rows."""
    count = nodes("Size", [positions], "attention/count")
    zero, one = nodes.constant("zero64", np.array(0, np.int64)), nodes.constant("one64", np.array(1, np.int64))
    order = nodes("Range", [zero, count, one], "attention/order")
    rows = nodes("Reshape", [order, nodes("Shape", [positions], "attention/shape")], "attention/rows")
    flat = nodes("Reshape", [positions, nodes.shape(-1, 1)], "attention/flat_positions")
    flat = nodes("Cast", [flat], "attention/float_positions", {"to": FLOAT})
    # The operator wants tables of at least as many rows as there are keys.
    missing = nodes("Max", [nodes("Sub", [total, count], "attention/fewer"), nodes.shape(0)], "attention/missing")
    pads = nodes("Concat", [nodes.shape(0, 0), missing, nodes.shape(0)], "attention/pads", {"axis": 0})
    return [_table(nodes, number, rotary, flat, pads) for number, rotary in enumerate(decoder.rotaries)], rows


def _table(
    nodes: Nodes, number: int, rotary: Rotary, positions: ir.Value, pads: ir.Value | None
) -> tuple[ir.Value, ir.Value]:
    frequencies = nodes.constant(f"rotary.{number}.frequencies", rotary.frequencies[None])
    angles = nodes("Mul", [positions, frequencies], f"rotary/{number}/angles")
    found = []
    for kind in ("Cos", "Sin"):
        value = nodes(kind, [angles], f"rotary/{number}/{kind}")
        if rotary.scale != 1.0:
            scale = nodes.constant(f"rotary.{number}.scale", np.array(rotary.scale, np.float32))
            value = nodes("Mul", [value, scale], f"rotary/{number}/{kind}/scaled")
        found.append(value if pads is None else nodes("Pad", [value, pads], f"rotary/{number}/{kind}/padded"))
    return found[0], found[1]
