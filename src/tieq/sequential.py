"""Solve the body in the order in which it runs: each matrix for the inputs that the quantized model will give it.

What is rounded is not W but ``W + a W D A^-1``, with ``A = E[xq xq']`` over the quantized model's inputs xq and the
drift ``D = E[(x - xq) xq']`` from the float model's x: the least-squares matrix for the float model's outputs on
quantized inputs, taken a share a of the way, because all of it fits the calibration text and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tieq.calibrate.statistics import damped
from tieq.progress import counter
from tieq.source.layers import Layer, LayerMatrix, Stream, decoder_layers, first_stream
from tieq.source.reference import ReferenceModel

# Share of the drift that is corrected; docs/method.md has the figures of others.
_CORRECTED = 0.5
_DAMPING = 0.05

Encode = Callable[[str, NDArray[np.float32], NDArray[np.float32]], NDArray[np.float32]]


def solve_body(
    model: ReferenceModel, ids: NDArray[np.int64], lookup: NDArray[np.float32] | None, encode: Encode
) -> None:
    """Walk through the layers; the model is left as it was.

    Args:
        model: the float model.
        ids: calibration tokens ``[sequences, length]``.
        lookup: the quantized lookup table, decoded, ``[rows, columns]``; None for the model's own.
        encode: called once a matrix with its name, the weights to round ``[rows, columns]`` float32 and the cost
            matrix ``[columns, columns]`` float32; returns the decoded weights, which later matrices are solved for.
    """
    layers = decoder_layers(model, ids[0])
    exact = first_stream(model, layers[0], ids)
    rounded = first_stream(model, layers[0], ids, lookup)
    with counter("body", len(layers), "layers") as advance:
        for layer in layers:
            exact, rounded = _solve_layer(layer, exact, rounded, encode)
            advance(1)


def _solve_layer(layer: Layer, exact: Stream, rounded: Stream, encode: Encode) -> tuple[Stream, Stream]:
    groups = layer.groups(exact[0])
    after, wanted = layer.run_watched(exact, [group[0].module for group in groups])
    kept = [(matrix, matrix.module.weight.data) for group in groups for matrix in group]
    try:
        for group, inputs in zip(groups, wanted, strict=True):
            _solve_group(group, inputs, layer.inputs(rounded, group[0].module), encode)
        return after, layer.run(rounded)
    finally:
        for matrix, weights in kept:
            matrix.module.weight.data = weights


def _solve_group(group: list[LayerMatrix], exact: Stream, rounded: Stream, encode: Encode) -> None:
    moments = _Moments.of(exact, rounded, group[0].weights().shape[1])
    cost = damped(moments.second, _DAMPING)
    shift = np.zeros_like(cost)
    if moments.say_something:
        shift = np.linalg.solve(cost.astype(np.float64), moments.drift.T.astype(np.float64)).T * _CORRECTED
    for matrix in group:
        weights = matrix.weights()
        target = (weights + weights @ shift).astype(np.float32)
        matrix.replace(encode(matrix.name, target, cost))


@dataclasses.dataclass(frozen=True)
class _Moments:
    """A and D of the module's docstring, ``[columns, columns]`` float32."""

    second: NDArray[np.float32]
    drift: NDArray[np.float32]

    @property
    def say_something(self) -> bool:
        """Whether the inputs were finite and not all zero; else there is no drift to correct."""
        return bool(np.isfinite(self.second).all() and np.isfinite(self.drift).all() and self.second.any())

    @staticmethod
    def of(exact: Stream, rounded: Stream, columns: int) -> _Moments:
        second = np.zeros((columns, columns))
        drift = np.zeros((columns, columns))
        # A router may send other positions to an expert once its inputs are quantized; then none can be paired.
        paired = [left.shape for left in exact] == [right.shape for right in rounded]
        tokens = sum(len(right) for right in rounded)
        for number, right in enumerate(rounded):
            second += (right.T @ right).double().numpy()
            if paired:
                drift += ((exact[number] - right).T @ right).double().numpy()
        share = 1.0 / max(tokens, 1)
        return _Moments((second * share).astype(np.float32), (drift * share).astype(np.float32))
