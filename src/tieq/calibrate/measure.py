"""The calibration pass: the float model forwards and, for the vocabulary table, backwards over the text."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.calibrate.statistics import RowUse, Statistics, TableCost, TokenSample
from tieq.progress import counter
from tieq.source.reference import ReferenceModel
from tieq.text import Sequences

# Sequences whose single positions are kept: one in so many, and no more than this many tokens (20 MB for 576 columns).
# The cost matrices leave them out if most sequences remain: what a table is solved for says too little about the rest.
_ONE_IN, _SAMPLE_TOKENS = 6, 4096


def measure(model: ReferenceModel, sequences: Sequences, *, full: bool) -> Statistics:
    """Run the float model over the sequences and collect the mean squares of each linear layer's inputs.

    Args:
        model: the float model.
        sequences: calibration tokens; each domain weighs the same, however many sequences it has.
        full: also take the table's cost and use, which runs the model backwards too. Where the model's logits or
            gradients are not finite, cost and use are left out.
    """
    import torch

    inputs_seen, gradients_seen = _Sums(), _Sums()
    weight = 1.0

    def watch(name: str) -> Any:
        def hook(module: Any, inputs: tuple[Any, ...], output: Any) -> None:
            inputs_seen.add(name, inputs[0].detach(), weight)
            if output.requires_grad and module is not model.module.get_output_embeddings():
                output.register_hook(lambda gradient: gradients_seen.add(name, gradient, weight))

        return hook

    handles = [
        module.register_forward_hook(watch(f"{name}.weight"))
        for name, module in model.module.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D")
    ]
    sampled = _sampled(sequences)
    meter = _TableMeter(model, hold_out=2 * len(sampled) < len(sequences.ids)) if full else None
    try:
        with counter("calibration", len(sequences.ids), "sequences") as advance:
            for number, (row, weight) in enumerate(zip(sequences.ids, sequences.weights.tolist(), strict=True)):
                if meter is not None:
                    meter.add(row, weight, sampled=number in sampled)
                else:
                    with torch.no_grad():
                        model.module(torch.from_numpy(row)[None], use_cache=False)
                advance(1)
    finally:
        for handle in handles:
            handle.remove()
    tokens = int(sequences.ids.size)
    means = inputs_seen.means(tokens)
    if meter is None or not meter.is_finite:
        return Statistics(means, tokens)
    cost = meter.cost()
    if not (np.isfinite(cost.lookup).all() and np.isfinite(cost.logits).all()):
        return Statistics(means, tokens)
    return Statistics(means, tokens, cost, meter.use(), meter.sample(), gradients_seen.means(tokens))


class _Sums:
    """Weighted sums of squares by name, a column at a time, in float64."""

    def __init__(self) -> None:
        self._totals: dict[str, Any] = {}

    def add(self, name: str, values: Any, weight: float) -> None:
        found = values.reshape(-1, values.shape[-1]).double().square().sum(0) * weight
        self._totals[name] = found if name not in self._totals else self._totals[name].add_(found)

    def means(self, tokens: int) -> dict[str, NDArray[np.float32]]:
        return {name: (total / tokens).float().numpy() for name, total in self._totals.items()}


def _sampled(sequences: Sequences) -> set[int]:
    """Numbers of the sequences whose positions are kept: as many of each domain, spread over it."""
    members: dict[str, list[int]] = {}
    for number, domain in enumerate(sequences.domains):
        members.setdefault(domain, []).append(number)
    count, length = sequences.ids.shape
    budget = max(1, min(count // _ONE_IN, _SAMPLE_TOKENS // length) // len(members))
    count = min(budget, *map(len, members.values()))
    return {numbers[part * len(numbers) // count] for numbers in members.values() for part in range(count)}


class _TableMeter:
    """Adds up what the table's roles see, one sequence at a time, with one forward and one backward pass each."""

    def __init__(self, model: ReferenceModel, *, hold_out: bool) -> None:
        import torch

        self._model, self._hold_out = model.module, hold_out
        self._model.requires_grad_(False)
        # Targets are drawn from the model's own distribution, the same ones in every run.
        self._random = torch.Generator().manual_seed(0)
        self.is_finite = True
        self._tokens = 0
        self._cost_tokens = 0.0
        self._hidden: Any = 0
        self._gradient: Any = 0
        rows = self._model.get_output_embeddings().weight.shape[0]
        self._lookups = torch.zeros(rows, dtype=torch.float64)
        self._probability = torch.zeros(rows, dtype=torch.float64)
        self._squares = torch.zeros(rows, dtype=torch.float64)
        self._sampled: list[tuple[NDArray[np.int64], Any, Any]] = []

    def add(self, row: NDArray[np.int64], weight: float, *, sampled: bool) -> None:
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
                if not logits.isfinite().all():
                    self.is_finite = False
                    return
                targets, spread = self._sample_targets(logits, weight)
                torch.nn.functional.cross_entropy(logits, targets, reduction="sum").backward()  # type: ignore[no-untyped-call]
        finally:
            for handle in handles:
                handle.remove()
        # Gemma 3 scales inside the embedding module; the gradient is wanted at the stored row.
        gradient = kept["rows"].grad[0] * float(getattr(lookup, "embed_scale", 1.0))
        wide, hidden = gradient.double(), kept["hidden"].double()
        self.is_finite = self.is_finite and bool(wide.isfinite().all() and hidden.isfinite().all())
        self._lookups += weight * torch.bincount(torch.from_numpy(row), minlength=len(self._lookups))
        self._tokens += len(row)
        if sampled:
            self._sampled.append((row, kept["hidden"].float().numpy(), gradient.float().numpy()))
        if not (sampled and self._hold_out):
            self._hidden = self._hidden + weight * ((hidden * spread[:, None]).T @ hidden)
            self._gradient = self._gradient + weight * (wide.T @ wide)
            self._cost_tokens += weight * len(row)

    def _sample_targets(self, logits: Any, weight: float) -> tuple[Any, Any]:
        """Targets from the model's distribution, and ``1 - sum p^2``, ``[length]`` each."""
        import torch

        with torch.no_grad():
            chances = logits.softmax(-1)
            self._probability += weight * chances.sum(0)
            squares = chances.square()
            self._squares += weight * squares.sum(0)
            targets = torch.multinomial(chances, 1, generator=self._random)[:, 0]
            return targets, 1 - squares.sum(1, dtype=torch.float64)

    def cost(self) -> TableCost:
        """The cost matrices."""
        return TableCost(
            lookup=(self._gradient / self._cost_tokens).float().numpy(),
            logits=(self._hidden / self._cost_tokens).float().numpy(),
        )

    def use(self) -> RowUse:
        """How often each row is used."""
        return RowUse(
            lookups=(self._lookups / self._tokens).float().numpy(),
            probability=(self._probability / self._tokens).float().numpy(),
            spread=((self._probability - self._squares) / self._tokens).float().numpy(),
        )

    def sample(self) -> TokenSample:
        """The sampled sequences' positions."""
        ids, hidden, gradient = zip(*self._sampled, strict=True)
        return TokenSample(np.concatenate(ids), np.concatenate(hidden), np.concatenate(gradient))
