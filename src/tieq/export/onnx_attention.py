"""What the attention of every layer takes beside its queries, keys and values: lengths, rotations, the mask.

Two things differ from what onnxruntime-genai's builder writes. Cosines and sines are computed for the positions that
are asked for instead of stored for all that there could be, so the file holds none and every context length works.
And the mask is added to the scores, so that padding may be on either side. The graph for generation leaves that out, as
the builder's does: its prompts may be padded on the right alone.
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
        rows: the row in them of each position, ``[batch, length]`` int64.
        bias: what is added to the scores, ``[batch, 1, length, total]`` float32, or None.
        now: the mask of the positions themselves, ``[batch, length]`` int64.
    """

    last_keys: ir.Value
    total: ir.Value
    tables: list[tuple[ir.Value, ir.Value]]
    rows: ir.Value
    bias: ir.Value | None
    now: ir.Value


def shared_inputs(
    nodes: Nodes, decoder: Decoder, mask: ir.Value, positions: ir.Value, *, generate: bool
) -> SharedInputs:
    """Add the nodes that make them.

    Args:
        nodes: the graph.
        decoder: for its rotary embeddings.
        mask: ``[batch, total]`` int64, 0 where a key is padding.
        positions: ``[batch, length]`` int64.
        generate: the graph for generation, whose prompts are padded on the right alone.
    """
    total = nodes("Shape", [mask], "attention/total", {"start": 1, "end": 2})
    batch = nodes("Shape", [mask], "attention/batch", {"start": 0, "end": 1})
    length = nodes("Shape", [positions], "attention/length", {"start": 1, "end": 2})
    most = nodes("Cast", [total], "attention/total32", {"to": INT32})
    shown = nodes("Cast", [mask], "attention/mask32", {"to": INT32})
    from_end = nodes("Neg", [length], "attention/from_end")
    now = nodes("Slice", [mask, from_end, nodes.shape(LAST), nodes.shape(1)], "attention/mask_now")
    bias = None
    if generate:
        keys = nodes("ReduceSum", [shown, nodes.shape(1)], "attention/shown", {"keepdims": 0})
        # For several tokens the operator takes the first sequence's positions for all; the longest has them.
        longest = nodes("ReduceMax", [positions, nodes.shape(0)], "attention/longest", {"keepdims": 1})
        rotated = _for_all(nodes, longest, positions, length)
    else:
        keys = nodes("Expand", [most, batch], "attention/keys")
        rotated = _positions(nodes, now, shown, positions, length)
        bias = _mask_bias(nodes, mask, batch, length, total)
    tables, rows = _tables(nodes, decoder, rotated, total)
    one = nodes.constant("one32", np.array([1], np.int32))
    return SharedInputs(
        last_keys=nodes("Sub", [keys, one], "attention/last_keys"),
        total=nodes("Squeeze", [most], "attention/total_scalar"),
        tables=tables,
        rows=rows,
        bias=bias,
        now=now,
    )


def _mask_bias(nodes: Nodes, mask: ir.Value, batch: ir.Value, length: ir.Value, total: ir.Value) -> ir.Value:
    wide = nodes("Cast", [mask], "attention/mask", {"to": FLOAT})
    hidden = nodes("Sub", [nodes.constant("shown", np.array(1, np.float32)), wide], "attention/left_out")
    bias = nodes("Mul", [hidden, nodes.constant("masked", np.array(_MASKED, np.float32))], "attention/bias")
    bias = nodes("Unsqueeze", [bias, nodes.shape(1, 2)], "attention/bias_by_head")
    extent = nodes("Concat", [batch, nodes.shape(1), length, total], "attention/extent", {"axis": 0})
    return nodes("Expand", [bias, extent], "attention/bias_by_query")


def _positions(nodes: Nodes, now: ir.Value, shown: ir.Value, positions: ir.Value, length: ir.Value) -> ir.Value:
    """Positions to rotate by wherever the padding is: those asked for, moved by the padding on the left.

    Rotations act through differences alone, so positions may count the padding on the left, in every step. Then all
    sequences agree wherever they have a token, which is what the operator assumes of several tokens.
    """
    padding = nodes("ArgMax", [shown], "attention/left_padding", {"axis": 1, "keepdims": 1})
    moved = nodes("Add", [positions, padding], "attention/moved")
    is_token = nodes("Cast", [now], "attention/is_token", {"to": BOOL})
    tokens = nodes("Where", [is_token, moved, nodes.shape(_BEYOND)], "attention/tokens")
    agreed = nodes("ReduceMin", [tokens, nodes.shape(0)], "attention/agreed", {"keepdims": 1})
    return _for_all(nodes, agreed, moved, length)


def _for_all(nodes: Nodes, several: ir.Value, each: ir.Value, length: ir.Value) -> ir.Value:
    """``several`` for every sequence where there are several tokens, ``each`` where there is one."""
    wide = nodes("Expand", [several, nodes("Shape", [each], "attention/each_shape")], "attention/for_all")
    is_prompt = nodes("Greater", [length, nodes.shape(1)], "attention/is_prompt")
    return nodes("Where", [is_prompt, wide, each], "attention/rotated")


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


def _table(nodes: Nodes, number: int, rotary: Rotary, positions: ir.Value, pads: ir.Value) -> tuple[ir.Value, ir.Value]:
    frequencies = nodes.constant(f"rotary.{number}.frequencies", rotary.frequencies[None])
    angles = nodes("Mul", [positions, frequencies], f"rotary/{number}/angles")
    found = []
    for kind in ("Cos", "Sin"):
        value = nodes(kind, [angles], f"rotary/{number}/{kind}")
        if rotary.scale != 1.0:
            scale = nodes.constant(f"rotary.{number}.scale", np.array(rotary.scale, np.float32))
            value = nodes("Mul", [value, scale], f"rotary/{number}/{kind}/scaled")
        found.append(nodes("Pad", [value, pads], f"rotary/{number}/{kind}/padded"))
    return found[0], found[1]
