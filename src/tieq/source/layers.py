"""Run the reference model's decoder layers one at a time: what flows into each, and what each matrix in it reads."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.source.reference import ReferenceModel
from tieq.source.role_runs import blocks_of, body_of, with_lookup

# A residual stream: one float32 tensor ``[1, length, columns]`` a sequence.
Stream = list[Any]


@dataclasses.dataclass(frozen=True)
class LayerMatrix:
    """A matrix of a layer: canonical weight name, the module that holds it, and whether it is stored transposed."""

    name: str
    module: Any
    transposed: bool

    def weights(self) -> NDArray[np.float32]:
        """Values ``[rows = outputs, columns = inputs]``."""
        values: NDArray[np.float32] = self.module.weight.detach().numpy()
        return np.ascontiguousarray(values.T) if self.transposed else values

    def replace(self, weights: NDArray[np.float32]) -> None:
        """Put other values ``[rows, columns]`` into the module."""
        import torch

        values = np.ascontiguousarray(weights.T if self.transposed else weights)
        self.module.weight.data = torch.from_numpy(values)


class _Reached(Exception):  # noqa: N818 - control flow, no error
    """Raised by a hook to leave a forward pass that has given what was wanted."""


class Layer:
    """One decoder layer with the arguments that the model calls it with, apart from the stream."""

    def __init__(self, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name, self.module = name, module
        self._args, self._kwargs = args, kwargs

    def groups(self, state: Any) -> list[list[LayerMatrix]]:
        """The layer's matrices in the order in which they are used, those with one input together."""
        found: list[tuple[Any, list[LayerMatrix]]] = []
        known = {module: name for name, module in self.module.named_modules() if _is_matrix(module)}

        def used(module: Any, inputs: tuple[Any, ...]) -> None:
            name = f"{self.name}.{known[module]}.weight"
            matrix = LayerMatrix(name, module, type(module).__name__ == "Conv1D")
            if found and found[-1][0] is inputs[0]:
                found[-1][1].append(matrix)
            else:
                found.append((inputs[0], [matrix]))

        with _hooks(known, used):
            self._call(state)
        return [matrices for _, matrices in found]

    def run(self, stream: Stream) -> Stream:
        """The stream after the layer."""
        return [self._call(state) for state in stream]

    def run_watched(self, stream: Stream, modules: list[Any]) -> tuple[Stream, list[Stream]]:
        """The stream after the layer, and what each of the modules read, ``[length, columns]`` a sequence."""
        seen: dict[Any, Stream] = {module: [] for module in modules}
        with _hooks(modules, lambda module, inputs: seen[module].append(_rows(inputs))):
            after = self.run(stream)
        return after, [seen[module] for module in modules]

    def inputs(self, stream: Stream, module: Any) -> Stream:
        """What one module reads, ``[length, columns]`` a sequence; the layer runs only as far as there."""
        seen: Stream = []

        def reached(_: Any, inputs: tuple[Any, ...]) -> None:
            seen.append(_rows(inputs))
            raise _Reached

        with _hooks([module], reached):
            for state in stream:
                with contextlib.suppress(_Reached):
                    self._call(state)
        return seen

    def _call(self, state: Any) -> Any:
        import torch

        with torch.no_grad():
            after = self.module(state, *self._args, **self._kwargs)
        return after[0] if isinstance(after, tuple) else after


def decoder_layers(model: ReferenceModel, ids: NDArray[np.int64]) -> list[Layer]:
    """The decoder layers, with the masks and positions of sequences as long as ``ids`` ``[length]``."""
    import torch

    modules = blocks_of(model)
    names = {module: name for name, module in model.module.named_modules()}
    found: dict[Any, Layer] = {}

    def called(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        found[module] = Layer(names[module], module, args[1:], rest)

    handles = [module.register_forward_pre_hook(called, with_kwargs=True) for module in modules]
    try:
        with torch.no_grad():
            body_of(model)(torch.from_numpy(ids)[None], use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return [found[module] for module in modules if module in found]


def first_stream(
    model: ReferenceModel, layer: Layer, ids: NDArray[np.int64], lookup: NDArray[np.float32] | None = None
) -> Stream:
    """What enters the first layer for sequences ``[sequences, length]``, with another lookup table if given."""
    import torch

    stream: Stream = []

    def reached(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stream.append((args[0] if args else kwargs["hidden_states"]).detach())
        raise _Reached

    handle = layer.module.register_forward_pre_hook(reached, with_kwargs=True)
    try:
        with torch.no_grad(), with_lookup(model, lookup):
            for row in ids:
                with contextlib.suppress(_Reached):
                    body_of(model)(torch.from_numpy(row)[None], use_cache=False)
    finally:
        handle.remove()
    return stream


def _rows(inputs: tuple[Any, ...]) -> Any:
    """A module's input as ``[positions, columns]``."""
    return inputs[0].reshape(-1, inputs[0].shape[-1])


def _is_matrix(module: Any) -> bool:
    return type(module).__name__ in ("Linear", "Conv1D")


@contextlib.contextmanager
def _hooks(modules: Any, hook: Any) -> Iterator[None]:
    handles = [module.register_forward_pre_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
