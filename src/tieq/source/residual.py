"""The residual stream: what each decoder block hands to the next, recorded while the body runs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.source.reference import ReferenceModel
from tieq.source.role_runs import Table, blocks_of, hidden_states


def residual_stream(
    model: ReferenceModel, ids: NDArray[np.int64], lookup: Table | None = None
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Run the body on one sequence ``[length]`` and record the stream before the first and after each block.

    Args:
        model: the float model.
        ids: tokens.
        lookup: table ``[rows, columns]`` that is looked up in place of the model's own.

    Returns:
        the hidden states that the logits role reads, ``[length, columns]``, and the stream,
        ``[blocks + 1, length, columns]``, both float32.
    """
    stream: list[NDArray[np.float32]] = []

    def keep(value: Any) -> None:
        stream.append((value[0] if isinstance(value, tuple) else value).detach()[0].numpy().copy())

    def enters(module: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        keep(inputs[0] if inputs else named["hidden_states"])

    def leaves(module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        keep(output)

    blocks = blocks_of(model)
    handles = [blocks[0].register_forward_pre_hook(enters, with_kwargs=True)]
    handles += [block.register_forward_hook(leaves) for block in blocks]
    try:
        hidden = hidden_states(model, ids, lookup)
    finally:
        for handle in handles:
            handle.remove()
    return hidden, np.stack(stream)
