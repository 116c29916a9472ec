"""What a decoder computes beside its products, in TFLite's builtin operators: norms, activations, sums, splits."""

from __future__ import annotations

from collections.abc import Sequence

from tieq.export.litert_nodes import Nodes, Value

_OPTIONS = {"ADD": "AddOptions", "SUB": "SubOptions", "MUL": "MulOptions"}


class Math:
    """Adds operators on float32 values to a graph; ``name`` is what they are called."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    def binary(self, kind: str, left: Value, right: Value, name: str) -> Value:
        """``ADD``, ``SUB`` or ``MUL``, broadcast."""
        return self._nodes(kind, [left, right], _broadcast(left.shape, right.shape), name, (_OPTIONS[kind], {}))

    def unary(self, kind: str, value: Value, name: str) -> Value:
        """An operator without options."""
        return self._nodes(kind, [value], value.shape, name)

    def scaled(self, value: Value, factor: float, name: str) -> Value:
        """The value times a number; itself for 1."""
        return value if factor == 1.0 else self.binary("MUL", value, self._nodes.number(factor), name)

    def capped(self, value: Value, cap: float, name: str) -> Value:
        """``cap * tanh(value / cap)``; the value itself for 0."""
        if not cap:
            return value
        squashed = self.unary("TANH", self.scaled(value, 1.0 / cap, f"{name}/divided"), name)
        return self.scaled(squashed, cap, f"{name}/multiplied")

    def rms_norm(self, value: Value, gain: Value, epsilon: float, name: str) -> Value:
        """``value / sqrt(mean(value ** 2) + epsilon) * gain`` over the last dimension."""
        normed = self.binary("MUL", value, self._inverse_root(value, epsilon, name), name)
        return self.binary("MUL", normed, gain, f"{name}/gain")

    def layer_norm(self, value: Value, gain: Value, shift: Value, epsilon: float, name: str) -> Value:
        """The same of what differs from the mean, plus ``shift``."""
        centred = self.binary("SUB", value, self._mean(value, f"{name}/mean"), f"{name}/centred")
        return self.binary("ADD", self.rms_norm(centred, gain, epsilon, name), shift, f"{name}/shift")

    def _mean(self, value: Value, name: str) -> Value:
        axis = self._nodes.ints(len(value.shape) - 1)
        return self._nodes("MEAN", [value, axis], (*value.shape[:-1], 1), name, ("ReducerOptions", {"keepDims": True}))

    def _inverse_root(self, value: Value, epsilon: float, name: str) -> Value:
        mean = self._mean(self.binary("MUL", value, value, f"{name}/squared"), f"{name}/square")
        return self.unary("RSQRT", self.binary("ADD", mean, self._nodes.number(epsilon), f"{name}/epsilon"), name)

    def activated(self, value: Value, kind: str, name: str) -> Value:
        """``silu``, ``gelu`` or ``gelu_tanh``."""
        if kind == "silu":
            return self.binary("MUL", value, self.unary("LOGISTIC", value, name), f"{name}/activated")
        return self._nodes("GELU", [value], value.shape, name, ("GeluOptions", {"approximate": kind == "gelu_tanh"}))

    def split(self, value: Value, sizes: Sequence[int], name: str) -> list[Value]:
        """Pieces of the last dimension."""
        add, axis = self._nodes, len(value.shape) - 1
        shapes = [(*value.shape[:-1], size) for size in sizes]
        if len(set(sizes)) == 1:
            options = ("SplitOptions", {"numSplits": len(sizes)})
            return add.several("SPLIT", [add.ints(axis), value], shapes, name, options)
        options = ("SplitVOptions", {"numSplits": len(sizes)})
        return add.several("SPLIT_V", [value, add.ints(*sizes), add.ints(axis)], shapes, name, options)

    def joined(self, values: Sequence[Value], name: str) -> Value:
        """Pieces of the last dimension one after the other."""
        first, axis = values[0].shape, len(values[0].shape) - 1
        shape = (*first[:-1], sum(value.shape[-1] for value in values))
        return self._nodes("CONCATENATION", values, shape, name, ("ConcatenationOptions", {"axis": axis}))


def _broadcast(left: Sequence[int], right: Sequence[int]) -> tuple[int, ...]:
    """Shape of an operator's result; an unknown extent (-1) stays unknown."""
    length = max(len(left), len(right))
    pairs = zip((1,) * (length - len(left)) + tuple(left), (1,) * (length - len(right)) + tuple(right), strict=True)
    return tuple(b if a == 1 else a for a, b in pairs)
