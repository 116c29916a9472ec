"""Attention over one sequence in TFLite's builtin operators: positions, rotations, masks, heads in groups.

Positions are the running sum of ones as long as the ids, and masks are differences of positions, because shapes that
follow from a value would keep every operator behind them from being prepared, or given to a faster kernel, in advance.
"""

from __future__ import annotations

from collections.abc import Sequence

from tieq.export.litert_math import Math
from tieq.export.litert_nodes import Nodes, Value
from tieq.source.decoder import Decoder, Layer

# Added to the score of a key that the mask leaves out: nothing is left of it after the softmax, and fp16 holds it.
_MASKED = -30000.0


class Attention:
    """Adds what all layers share when it is made, and each layer's attention when asked.

    Args:
        decoder: the model.
        nodes: where operators go.
        math: over the same nodes.
        ids: ``[length]`` int32.
    """

    def __init__(self, decoder: Decoder, nodes: Nodes, math: Math, ids: Value) -> None:
        self._decoder, self._nodes, self._math = decoder, nodes, math
        self._groups = decoder.heads // decoder.kv_heads
        positions = self._positions(ids)
        rows = nodes.reshape(positions, (-1, 1), "attention/query")
        columns = nodes.reshape(positions, (1, -1), "attention/key")
        ahead = math.binary("SUB", columns, rows, "attention/ahead")
        self._masks = {window: self._mask(ahead, window) for window in {layer.window for layer in decoder.layers}}
        self._rotations = [self._rotation(number, rows) for number in range(len(decoder.rotaries))]

    def _positions(self, ids: Value) -> Value:
        """``[length]`` float32: 0, 1, 2 and so on."""
        add, shape = self._nodes, ids.shape
        nothing = add("SUB", [ids, ids], shape, "attention/nothing", ("SubOptions", {}), "INT32")
        ones = add("ADD", [nothing, add.ints(1)], shape, "attention/ones", ("AddOptions", {}), "INT32")
        counted = add(
            "CUMSUM", [ones, add.ints(0)], shape, "attention/count", ("CumsumOptions", {"exclusive": True}), "INT32"
        )
        return self._cast(counted, "attention/positions")

    def _cast(self, value: Value, name: str) -> Value:
        types = self._nodes.schema.TensorType
        options = ("CastOptions", {"inDataType": getattr(types, value.kind), "outDataType": types.FLOAT32})
        return self._nodes("CAST", [value], value.shape, name, options)

    def _mask(self, ahead: Value, window: int | None) -> Value:
        """``[length, length]`` float32 to add to the scores, of how far each key is ahead of each query."""
        add = self._nodes
        name = "attention/mask" if window is None else f"attention/mask_{window}"
        hidden = add("GREATER", [ahead, add.number(0.0)], ahead.shape, name, ("GreaterOptions", {}), "BOOL")
        bias = self._math.scaled(self._cast(hidden, name), _MASKED, name)
        if window is None:
            return bias
        behind = [ahead, add.number(-float(window))]
        left = add("LESS_EQUAL", behind, ahead.shape, name, ("LessEqualOptions", {}), "BOOL")
        return self._math.binary("ADD", bias, self._math.scaled(self._cast(left, name), _MASKED, name), name)

    def _rotation(self, number: int, rows: Value) -> tuple[Value, Value]:
        """Cosines and sines ``[length, rotary columns / 2]``."""
        math, rotary = self._math, self._decoder.rotaries[number]
        name = f"attention/rotary_{number}"
        frequencies = self._nodes.constant(f"{name}.frequencies", rotary.frequencies[None])
        angles = math.binary("MUL", rows, frequencies, f"{name}/angles")
        cosines, sines = (
            math.scaled(self._nodes(kind, [angles], angles.shape, name, options), rotary.scale, f"{name}/scaled")
            for kind, options in (("COS", ("CosOptions", {})), ("SIN", None))
        )
        return cosines, sines

    def attend(self, layer: Layer, parts: Sequence[Value], gains: Sequence[Value | None]) -> Value:
        """Weighted values ``[length, heads * head_size]``.

        Args:
            layer: for its rotation and window.
            parts: queries, keys and values, ``[length, their heads * head_size]``.
            gains: of the norms of query and key heads, None for none.
        """
        add, math, decoder = self._nodes, self._math, self._decoder
        name, size = f"{layer.prefix}self_attn", decoder.head_size
        query = self._heads(parts[0], self._groups, gains[0], layer, f"{name}/query")
        key = self._heads(parts[1], 1, gains[1], layer, f"{name}/key")
        value = self._by_head(add.reshape(parts[2], (-1, decoder.kv_heads, 1, size), f"{name}/value"), f"{name}/value")
        query = math.scaled(query, decoder.attention_scale, f"{name}/scale")
        shape = (decoder.kv_heads, self._groups, -1)
        options = ("BatchMatMulOptions", {"adjY": True})
        scores = add("BATCH_MATMUL", [query, key], (*shape, -1), f"{name}/scores", options)
        scores = math.capped(scores, decoder.attention_softcap, f"{name}/softcap")
        scores = math.binary("ADD", scores, self._masks[layer.window], f"{name}/masked")
        shares = add("SOFTMAX", [scores], scores.shape, f"{name}/shares", ("SoftmaxOptions", {"beta": 1.0}))
        found = add("BATCH_MATMUL", [shares, value], (*shape, size), f"{name}/found", ("BatchMatMulOptions", {}))
        found = self._turned(found, (2, 0, 1, 3), f"{name}/by_token")
        return add.reshape(found, (-1, decoder.heads * size), f"{name}/joined")

    def _heads(self, part: Value, groups: int, gain: Value | None, layer: Layer, name: str) -> Value:
        """``[kv_heads, groups, length, head_size]``, normed and rotated."""
        decoder = self._decoder
        value = self._nodes.reshape(part, (-1, decoder.kv_heads, groups, decoder.head_size), name)
        if gain is not None:
            value = self._math.rms_norm(value, gain, decoder.epsilon, f"{name}/norm")
        value = self._by_head(value, name)
        return value if layer.rotary is None else self._rotated(value, layer.rotary, name)

    def _rotated(self, value: Value, number: int, name: str) -> Value:
        """The first columns, half against half, turned by their angles; further columns as they are."""
        math, (cosines, sines) = self._math, self._rotations[number]
        half, size = cosines.shape[-1], value.shape[-1]
        rest = [size - 2 * half] if size > 2 * half else []
        first, second, *others = math.split(value, [half, half, *rest], f"{name}/halves")
        turned = [
            math.binary(
                sign,
                math.binary("MUL", one, cosines, f"{name}/cos"),
                math.binary("MUL", other, sines, f"{name}/sin"),
                f"{name}/turned",
            )
            for sign, one, other in (("SUB", first, second), ("ADD", second, first))
        ]
        return math.joined([*turned, *others], f"{name}/rotated")

    def _by_head(self, value: Value, name: str) -> Value:
        return self._turned(value, (1, 2, 0, 3), name)

    def _turned(self, value: Value, order: Sequence[int], name: str) -> Value:
        shape = tuple(value.shape[axis] for axis in order)
        return self._nodes("TRANSPOSE", [value, self._nodes.ints(*order)], shape, name, ("TransposeOptions", {}))
