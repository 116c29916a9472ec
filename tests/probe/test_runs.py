"""Tables measured by role against what transformers computes with those tables put in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
import torch

from tieq.metrics import score_sequence
from tieq.probe import Case, RoleRuns
from tieq.source.reference import ReferenceModel
from tieq.text import Sequences

IDS = np.random.default_rng(0).integers(0, tiny.ROWS, (2, 24))
SEQUENCES = Sequences(IDS, ("d", "d"), False)
ALLOWED = np.ones(tiny.ROWS, bool)


def table_of(module: Any) -> np.ndarray:
    return module.get_input_embeddings().weight.detach().numpy()


def wrong_table(module: Any) -> np.ndarray:
    table = table_of(module)
    return table + 0.02 * np.random.default_rng(1).standard_normal(table.shape).astype(np.float32)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "gpt2", "phi"])
def test_each_case_scores_what_the_model_with_those_tables_gives(family: str) -> None:
    model = ReferenceModel(tiny.model(family))
    table = wrong_table(model.module)
    runs = RoleRuns(model, SEQUENCES, ALLOWED)
    looked_up = runs.look_up(table)
    cases = {"lookup": Case(looked_up), "logits": Case(None, table), "both": Case(looked_up, table), "own": Case()}
    found = runs.score(cases)
    for name in cases:
        other = tiny.model(family)
        if name in ("lookup", "both"):
            other.get_input_embeddings().weight = torch.nn.Parameter(torch.from_numpy(table))
        if name in ("logits", "both"):
            other.get_output_embeddings().weight = torch.nn.Parameter(torch.from_numpy(table))
        for number, ids in enumerate(IDS):
            logits = ReferenceModel(other).logits(ids)
            (expected,) = score_sequence(ids, model.logits(ids), [logits], ALLOWED)
            # Both compute in float32, in another order: logits of order ten are apart by some 1e-5.
            assert found[name][number].kl / len(ids) == pytest.approx(expected.kl / len(ids), rel=1e-3, abs=1e-6)
            assert found[name][number].nll == pytest.approx(expected.nll, rel=1e-5)
    assert all(score.kl == 0 for score in found["own"])


def test_a_table_that_is_the_models_own_costs_exactly_nothing() -> None:
    model = ReferenceModel(tiny.model("llama"))
    runs = RoleRuns(model, SEQUENCES, ALLOWED)
    own = table_of(model.module).copy()
    looked_up = runs.look_up(own)
    assert (looked_up.residual_error == 0).all()
    assert [score.kl for score in runs.score({"both": Case(looked_up, own)})["both"]] == [0.0, 0.0]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_residual_error_starts_as_the_error_of_the_looked_up_rows(family: str) -> None:
    model = ReferenceModel(tiny.model(family))
    table, wrong = table_of(model.module), wrong_table(model.module)
    found = RoleRuns(model, SEQUENCES, ALLOWED).look_up(wrong).residual_error
    rows, errors = table[IDS].astype(np.float64), (wrong - table)[IDS].astype(np.float64)
    expected = (np.linalg.norm(errors, axis=-1) / np.linalg.norm(rows, axis=-1)).mean()
    # Gemma scales rows and errors alike; one float32 rounding of each value.
    assert found[0] == pytest.approx(expected, rel=1e-5)
    assert len(found) == model.module.config.num_hidden_layers + 1
    assert (found > 0).all()


def test_progress_counts_every_sequence_of_every_pass() -> None:
    counts: list[int] = []
    runs = RoleRuns(ReferenceModel(tiny.model("llama")), SEQUENCES, ALLOWED, counts.append)
    runs.look_up(wrong_table(tiny.model("llama")), counts.append)
    runs.score({"own": Case()}, counts.append)
    assert counts == [1] * 6
