from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny

from tieq.codecs.schemes import SCHEMES, dequantize
from tieq.sequential import solve_body
from tieq.solve import SOLVERS
from tieq.source.reference import ReferenceModel, inventory

IDS = np.random.default_rng(0).integers(2, tiny.ROWS, (12, 32))


def encode(weights: np.ndarray, cost: np.ndarray) -> np.ndarray:
    scheme = SCHEMES["q2_0"]
    return dequantize(*SOLVERS["hessian"](weights, scheme, cost), scheme)


def weights_of(model: Any) -> dict[str, np.ndarray]:
    return {name: values.numpy().copy() for name, values in model.state_dict().items()}


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_every_body_matrix_is_asked_for_once_and_the_model_is_left_alone(family: str) -> None:
    model = tiny.model(family)
    before = weights_of(model)
    asked = []

    def round_to_zero(name: str, weights: np.ndarray, cost: np.ndarray) -> np.ndarray:
        asked.append((name, *weights.shape))
        assert cost.shape == (weights.shape[1],) * 2
        return np.zeros_like(weights)

    solve_body(ReferenceModel(model), IDS[:2], None, round_to_zero)
    expected = [(m.name, m.rows, m.columns) for m in inventory(model.config.to_dict()).body]
    assert sorted(asked) == sorted(expected)
    after = weights_of(model)
    assert all(np.array_equal(after[name], values) for name, values in before.items())


def test_experts_that_see_few_positions_are_solved_for_those() -> None:
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    settings = {**tiny._COMMON, "num_local_experts": 6, "num_experts_per_tok": 2, "initializer_range": 0.3}
    module = AutoModelForCausalLM.from_config(CONFIG_MAPPING["mixtral"](**settings)).eval()
    before = weights_of(module)
    table = before["model.embed_tokens.weight"]
    lookup = table + 0.2 * np.random.default_rng(1).standard_normal(table.shape).astype(np.float32)
    asked: dict[str, np.ndarray] = {}

    def rounded(name: str, weights: np.ndarray, cost: np.ndarray) -> np.ndarray:
        assert name not in asked
        assert np.isfinite(weights).all()
        asked[name] = encode(weights, cost)
        return asked[name]

    solve_body(ReferenceModel(module), IDS[:3], lookup, rounded)
    experts = [name for name in asked if ".experts." in name]
    assert len(experts) > 2 * 6  # three matrices an expert in two layers, where any position reached it
    after = weights_of(module)
    assert all(np.array_equal(after[name], values) for name, values in before.items())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_without_loss_the_target_is_the_weight_itself(family: str) -> None:
    model = tiny.model(family)
    stored = {m.name: m for m in inventory(model.config.to_dict()).body}
    before = weights_of(model)

    def keep(name: str, weights: np.ndarray, cost: np.ndarray) -> np.ndarray:
        own = before[name].T if stored[name].transposed else before[name]
        # Both streams run the same kernels on the same values, so there is no drift at all.
        assert np.array_equal(weights, own)
        return weights

    solve_body(ReferenceModel(model), IDS[:2], None, keep)


def kl(model: Any, made: dict[str, np.ndarray], lookup: np.ndarray) -> float:
    """Of the model with other body weights and another lookup, to the model itself, on the tokens it was solved for."""
    import torch

    from tieq.metrics import log_softmax
    from tieq.source.role_runs import hidden_states, logits_of

    reference = ReferenceModel(model)
    wanted = [log_softmax(reference.logits(row)) for row in IDS]
    for name, values in made.items():
        model.get_parameter(name).data = torch.from_numpy(values)
    found = [log_softmax(logits_of(reference, hidden_states(reference, row, lookup))) for row in IDS]
    return sum(float((np.exp(p) * (p - q)).sum()) for p, q in zip(wanted, found, strict=True)) / IDS.size


def test_solving_in_order_beats_solving_alone_where_it_was_calibrated() -> None:
    table = tiny.model("llama").get_input_embeddings().weight.detach().numpy()
    scheme = SCHEMES["q4_0"]
    lookup = dequantize(*SOLVERS["nearest"](table, scheme), scheme)
    in_order: dict[str, np.ndarray] = {}
    alone: dict[str, np.ndarray] = {}

    def ours(name: str, weights: np.ndarray, cost: np.ndarray) -> np.ndarray:
        in_order[name] = encode(weights, cost)
        return in_order[name]

    def theirs(name: str, weights: np.ndarray, cost: np.ndarray) -> np.ndarray:
        alone[name] = encode(weights, cost)
        return weights

    model = tiny.model("llama")
    solve_body(ReferenceModel(model), IDS, lookup, ours)
    solve_body(ReferenceModel(model), IDS, None, theirs)
    assert kl(tiny.model("llama"), in_order, lookup) < kl(tiny.model("llama"), alone, lookup)
