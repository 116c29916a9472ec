"""Calibration: input second moments of every weight matrix over calibration text.

``E[x_j^2]`` of the j-th input of a matrix is the weight of an error in its column j, to second order, when the
inputs are taken as uncorrelated (Frantar et al. 2022, GPTQ, has the full Hessian; this is its diagonal).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.progress import counter
from tieq.source.reference import ReferenceModel
from tieq.text import Sequences


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Second moments by matrix name, ``[columns]`` float32, and the number of tokens behind them."""

    second_moments: dict[str, NDArray[np.float32]]
    tokens: int

    def save(self, path: Path, source: dict[str, str]) -> None:
        """Write ``calibration.safetensors`` with the text's and model's identity in its metadata."""
        from safetensors.numpy import save_file

        # One key, because safetensors writes several in an order that changes from run to run.
        metadata = {"tieq": json.dumps({"tokens": self.tokens, **source}, sort_keys=True)}
        save_file(dict(sorted(self.second_moments.items())), path, metadata=metadata)


def second_moments(model: ReferenceModel, sequences: Sequences) -> Statistics:
    """Run the float model over the sequences and average the squared inputs of each linear layer.

    The statistic of the logits role stands under the name of the module that computes the logits.
    """
    import torch

    sums: dict[str, Any] = {}

    def watch(name: str) -> Any:
        def hook(module: Any, inputs: tuple[Any, ...], output: Any) -> None:
            hidden = inputs[0].detach().reshape(-1, inputs[0].shape[-1]).double()
            squares = hidden.square().sum(0)
            sums[name] = squares if name not in sums else sums[name] + squares

        return hook

    handles = [
        module.register_forward_hook(watch(f"{name}.weight"))
        for name, module in model.module.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D")
    ]
    try:
        with torch.no_grad(), counter("calibration", len(sequences.ids), "sequences") as advance:
            for row in sequences.ids:
                model.module(torch.from_numpy(row)[None], use_cache=False)
                advance(1)
    finally:
        for handle in handles:
            handle.remove()
    tokens = int(sequences.ids.size)
    means = {name: (total / tokens).float().numpy() for name, total in sums.items()}
    return Statistics(means, tokens)


def usable_importance(moments: NDArray[np.float32] | None) -> NDArray[np.float32] | None:
    """Importance weights from second moments, or None where they say nothing (absent, not finite, all zero)."""
    if moments is None or not np.isfinite(moments).all() or not moments.any():
        return None
    # A column that calibration never excited still matters a little elsewhere.
    raised: NDArray[np.float32] = (moments + np.float32(0.01) * moments.mean()).astype(np.float32)
    return raised
