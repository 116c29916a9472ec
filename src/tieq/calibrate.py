"""Calibration: what the model does to errors in its weights, measured over calibration text.

For a matrix, the second moment of its inputs: ``E[x x']`` weighs an output error to second order (Frantar et al. 2022,
GPTQ), and its diagonal does when columns are taken one by one. For a vocabulary table, the cost of a row error in nats:
``1/2 e' J e`` with ``J = c H + G``, where H is the second moment of the hidden state that the logits role reads,
``c = E[1 - sum p^2]`` puts it in Fisher units, and G is the second moment of the loss gradient at the looked-up row,
with targets sampled from the model itself.
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

# Wider inputs are measured by their diagonal only: the matrix of 4,096 columns takes 67 MB.
_WIDEST_MATRIX = 4096
# Added to the diagonal, as a share of its mean, where calibration text may have left a direction out.
_TABLE_DAMPING, _BODY_DAMPING, _DIAGONAL_DAMPING = 0.1, 0.05, 0.01


@dataclasses.dataclass(frozen=True)
class TableCost:
    """Cost of a row error by role, ``[columns, columns]`` float32 each, in nats per token."""

    lookup: NDArray[np.float32]
    logits: NDArray[np.float32]

    def of(self, role: str) -> NDArray[np.float32]:
        """The matrix for a table that plays ``lookup``, ``logits`` or (``table``) both, damped."""
        cost = {"lookup": self.lookup, "logits": self.logits}.get(role, self.lookup + self.logits)
        return _damped(cost, _TABLE_DAMPING)


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What was measured.

    Attributes:
        second_moments: by matrix name, ``[columns]`` or, for the full solver, ``[columns, columns]``, float32.
        tokens: number of tokens behind them.
        table: cost of the vocabulary table, for the full solver.
    """

    second_moments: dict[str, NDArray[np.float32]]
    tokens: int
    table: TableCost | None = None

    def save(self, path: Path, source: dict[str, str]) -> None:
        """Write ``calibration.safetensors``: diagonals and the table's cost, with the text's identity."""
        from safetensors.numpy import save_file

        # One key, because safetensors writes several in an order that changes from run to run.
        metadata = {"tieq": json.dumps({"tokens": self.tokens, **source}, sort_keys=True)}
        kept = {name: np.ascontiguousarray(_diagonal(value)) for name, value in sorted(self.second_moments.items())}
        if self.table is not None:
            kept |= {"table.lookup_cost": self.table.lookup, "table.logits_cost": self.table.logits}
        save_file(kept, path, metadata=metadata)

    def importance(self, name: str, role: str, logits: str) -> NDArray[np.float32] | None:
        """What a solver weighs errors of a matrix with, or None where nothing usable was measured.

        Args:
            name: the matrix.
            role: ``table``, ``lookup``, ``logits`` or ``body``.
            logits: name under which the logits role's inputs stand.
        """
        if role != "body" and self.table is not None:
            return usable_importance(self.table.of(role))
        measured = self.second_moments.get(logits if role in ("table", "logits") else name)
        if measured is not None and measured.ndim == 2:
            measured = _damped(measured, _BODY_DAMPING)
        return usable_importance(measured)


def measure(model: ReferenceModel, sequences: Sequences, *, full: bool) -> Statistics:
    """Run the float model over the sequences and collect the second moments of each linear layer's inputs.

    Args:
        model: the float model.
        sequences: calibration tokens.
        full: also take whole matrices, and the table's cost, which runs the model backwards too.
    """
    import torch

    sums: dict[str, Any] = {}

    def watch(name: str) -> Any:
        def hook(module: Any, inputs: tuple[Any, ...], output: Any) -> None:
            hidden = inputs[0].detach().reshape(-1, inputs[0].shape[-1])
            if full and hidden.shape[-1] <= _WIDEST_MATRIX:
                found = hidden.T @ hidden
            else:
                found = hidden.double().square().sum(0)
            sums[name] = found if name not in sums else sums[name].add_(found)

        return hook

    handles = [
        module.register_forward_hook(watch(f"{name}.weight"))
        for name, module in model.module.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D")
    ]
    cost = _TableCostMeter(model) if full else None
    try:
        with counter("calibration", len(sequences.ids), "sequences") as advance:
            for row in sequences.ids:
                if cost is not None:
                    cost.add(row)
                else:
                    with torch.no_grad():
                        model.module(torch.from_numpy(row)[None], use_cache=False)
                advance(1)
    finally:
        for handle in handles:
            handle.remove()
    tokens = int(sequences.ids.size)
    means = {name: (total / tokens).float().numpy() for name, total in sums.items()}
    return Statistics(means, tokens, None if cost is None else cost.result())


class _TableCostMeter:
    """Adds up H, c and G, one sequence at a time, with one forward and one backward pass each."""

    def __init__(self, model: ReferenceModel) -> None:
        import torch

        self._model = model.module
        self._model.requires_grad_(False)
        # Targets are drawn from the model's own distribution, the same ones in every run.
        self._random = torch.Generator().manual_seed(0)
        self._tokens = 0
        self._concentration = 0.0
        self._hidden: Any = 0
        self._gradient: Any = 0

    def add(self, row: NDArray[np.int64]) -> None:
        """Run one sequence forwards and backwards."""
        import torch

        kept: dict[str, Any] = {}

        def looked_up(module: Any, inputs: Any, output: Any) -> Any:
            kept["rows"] = output.detach().requires_grad_(True)
            return kept["rows"]

        def scored(module: Any, inputs: Any, output: Any) -> None:
            kept["hidden"] = inputs[0].detach()[0]

        lookup, head = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        handles = [lookup.register_forward_hook(looked_up), head.register_forward_hook(scored)]
        try:
            with torch.enable_grad():
                logits = self._model(torch.from_numpy(row)[None], use_cache=False).logits[0].float()
                with torch.no_grad():
                    chances = logits.softmax(-1)
                    targets = torch.multinomial(chances, 1, generator=self._random)[:, 0]
                    self._concentration += float(chances.square().sum())
                    del chances
                torch.nn.functional.cross_entropy(logits, targets, reduction="sum").backward()  # type: ignore[no-untyped-call]
        finally:
            for handle in handles:
                handle.remove()
        # Gemma 3 scales inside the embedding module; the gradient is wanted at the stored row.
        scale = float(getattr(lookup, "embed_scale", 1.0))
        gradient = kept["rows"].grad[0].double() * scale
        hidden = kept["hidden"].double()
        self._hidden = self._hidden + hidden.T @ hidden
        self._gradient = self._gradient + gradient.T @ gradient
        self._tokens += len(row)

    def result(self) -> TableCost:
        """The cost matrices."""
        spread = 1.0 - self._concentration / self._tokens
        return TableCost(
            lookup=(self._gradient / self._tokens).float().numpy(),
            logits=(self._hidden * (spread / self._tokens)).float().numpy(),
        )


def _diagonal(value: NDArray[np.float32]) -> NDArray[np.float32]:
    return value if value.ndim == 1 else value.diagonal()


def _damped(matrix: NDArray[np.float32], share: float) -> NDArray[np.float32]:
    raised: NDArray[np.float32] = matrix + np.eye(len(matrix), dtype=np.float32) * np.float32(
        share * float(matrix.diagonal().mean())
    )
    return raised


def usable_importance(moments: NDArray[np.float32] | None) -> NDArray[np.float32] | None:
    """Importance from second moments, or None where they say nothing (absent, not finite, all zero)."""
    if moments is None or not np.isfinite(moments).all() or not moments.any():
        return None
    if moments.ndim == 2:
        return moments
    # A column that calibration never excited still matters a little elsewhere.
    raised: NDArray[np.float32] = (moments + np.float32(_DIAGONAL_DAMPING) * moments.mean()).astype(np.float32)
    return raised
