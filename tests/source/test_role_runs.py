from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
import torch

from tieq.source.reference import ReferenceModel
from tieq.source.role_runs import hidden_states, logits_of

IDS = np.random.default_rng(0).integers(0, tiny.ROWS, 24)
# Two orders of the same float32 sums over two layers of 64 columns: relative errors of some 1e-6.
TOLERANCE = 1e-5


def other_table(module: Any) -> np.ndarray:
    table = module.get_input_embeddings().weight.detach().numpy()
    return table + 0.05 * np.random.default_rng(1).standard_normal(table.shape).astype(np.float32)


def untied_copy(family: str, *, lookup: np.ndarray | None = None, logits: np.ndarray | None = None) -> Any:
    """The same model with tables of its own in each role."""
    module = tiny.model(family)
    for role, table in ((module.get_input_embeddings(), lookup), (module.get_output_embeddings(), logits)):
        if table is not None:
            role.weight = torch.nn.Parameter(torch.from_numpy(table))
    return module


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "gpt2", "phi"])
def test_each_role_takes_its_own_table(family: str) -> None:
    model = ReferenceModel(tiny.model(family))
    table = other_table(model.module)
    for roles in ({}, {"lookup": table}, {"logits": table}, {"lookup": table, "logits": table}):
        expected = ReferenceModel(untied_copy(family, **roles)).logits(IDS)
        found = logits_of(model, hidden_states(model, IDS, roles.get("lookup")), roles.get("logits"))
        assert np.allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def test_the_model_is_left_as_it_was() -> None:
    model = ReferenceModel(tiny.model("llama"))
    before = model.logits(IDS)
    table = other_table(model.module)
    logits_of(model, hidden_states(model, IDS, table), table)
    with pytest.raises(IndexError):
        hidden_states(model, np.array([tiny.ROWS]), table)
    assert model.module.get_input_embeddings().weight is model.module.get_output_embeddings().weight
    assert np.array_equal(model.logits(IDS), before)
