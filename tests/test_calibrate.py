from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from safetensors import safe_open

from tieq.calibrate import Statistics, measure, usable_importance
from tieq.source.reference import ReferenceModel
from tieq.text import Sequences

IDS = np.random.default_rng(0).integers(0, tiny.ROWS, (3, 24))


def sequences(ids: np.ndarray = IDS) -> Sequences:
    return Sequences(ids, ("d",) * len(ids), False)


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny.model("llama")


def test_the_statistic_of_the_logits_is_the_mean_square_of_the_last_hidden_state(llama: Any) -> None:
    found = measure(ReferenceModel(llama), sequences(), full=False)
    with torch.no_grad():
        # The base model's output is what the head multiplies; in one batch, in float64.
        hidden = llama.model(torch.from_numpy(IDS)).last_hidden_state.double()
    expected = hidden.reshape(-1, 64).square().mean(0).numpy()
    # float32 hidden states of order one, computed in batches of 1 and of 3 that may sum in another order: some 100
    # additions a layer at 2**-24, squared.
    assert np.allclose(found.second_moments["lm_head.weight"], expected, rtol=1e-4, atol=0)
    assert found.tokens == 3 * 24


def test_every_linear_layer_has_a_statistic_of_its_inputs(llama: Any) -> None:
    found = measure(ReferenceModel(llama), sequences(), full=False).second_moments
    expected = {
        f"{name}.weight": module.in_features
        for name, module in llama.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    assert {name: values.shape for name, values in found.items()} == {n: (size,) for n, size in expected.items()}
    assert all(values.dtype == np.float32 and (values > 0).all() for values in found.values())
    # Matrices that read the same input have the same statistic, others have their own.
    layer = "model.layers.0.self_attn"
    assert np.array_equal(found[f"{layer}.q_proj.weight"], found[f"{layer}.v_proj.weight"])
    assert not np.allclose(found[f"{layer}.q_proj.weight"], found[f"{layer}.o_proj.weight"])


def test_conv1d_is_counted_by_its_inputs() -> None:
    found = measure(ReferenceModel(tiny.model("gpt2")), sequences(), full=False).second_moments
    assert found["transformer.h.0.mlp.c_fc.weight"].shape == (64,)
    assert found["transformer.h.0.mlp.c_proj.weight"].shape == (256,)
    assert "lm_head.weight" in found


def test_more_sequences_average_and_do_not_add_up(llama: Any) -> None:
    once = measure(ReferenceModel(llama), sequences(), full=False).second_moments
    twice = measure(ReferenceModel(llama), sequences(np.concatenate([IDS, IDS])), full=False).second_moments
    for name in once:
        # Sums in float64; the mean is rounded to float32 once.
        assert np.allclose(once[name], twice[name], rtol=2.0**-23, atol=0)


def test_the_order_of_the_sequences_does_not_matter_beyond_rounding(llama: Any) -> None:
    once = measure(ReferenceModel(llama), sequences(), full=False).second_moments
    reversed_ = measure(ReferenceModel(llama), sequences(IDS[::-1].copy()), full=False).second_moments
    for name in once:
        assert np.allclose(once[name], reversed_[name], rtol=2.0**-23, atol=0)


def hooks(model: Any) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def test_no_hook_stays_behind(llama: Any) -> None:
    measure(ReferenceModel(llama), sequences(), full=False)
    assert hooks(llama) == 0
    with pytest.raises(IndexError):
        measure(ReferenceModel(llama), sequences(np.full((1, 4), tiny.ROWS)), full=False)
    assert hooks(llama) == 0


def test_statistics_are_saved_with_where_they_come_from(tmp_path: Path) -> None:
    moments = {"b": np.arange(3, dtype=np.float32), "a": np.ones(2, np.float32)}
    for name in ("one", "two"):
        Statistics(moments, 42).save(tmp_path / name, {"text_sha256": "abc", "model": "m", "z": "z"})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    with safe_open(str(tmp_path / "one"), framework="numpy") as file:
        assert sorted(file.keys()) == ["a", "b"]
        assert np.array_equal(file.get_tensor("b"), moments["b"])
        said = " ".join(file.metadata().values())
    for part in ("42", "text_sha256", "abc", "model"):
        assert part in said


def test_importance_is_the_moments_raised_by_a_hundredth_of_their_mean() -> None:
    found = usable_importance(np.array([0, 1, 3], np.float32))
    assert found is not None
    assert found.dtype == np.float32
    # Mean 4/3, a hundredth of it 1/75; three float32 operations.
    assert np.allclose(found, [1 / 75, 1 + 1 / 75, 3 + 1 / 75], rtol=2.0**-22, atol=0)
    assert (found > 0).all()


@pytest.mark.parametrize(
    "moments", [None, np.zeros(4, np.float32), np.array([1, np.nan], np.float32), np.array([1, np.inf], np.float32)]
)
def test_moments_that_say_nothing_give_no_importance(moments: np.ndarray | None) -> None:
    assert usable_importance(moments) is None


def test_importance_changes_no_moments() -> None:
    moments = np.array([0, 1, 3], np.float32)
    usable_importance(moments)
    assert moments.tolist() == [0, 1, 3]


# The full cost


def test_a_full_measurement_has_the_same_mean_squares(llama: Any) -> None:
    half = measure(ReferenceModel(llama), sequences(), full=False).second_moments
    full = measure(ReferenceModel(llama), sequences(), full=True).second_moments
    assert {name: values.tolist() for name, values in full.items()} == {n: v.tolist() for n, v in half.items()}


def test_the_logits_cost_is_the_hidden_states_moment_in_fisher_units(llama: Any) -> None:
    found = measure(ReferenceModel(llama), sequences(), full=True)
    assert found.table is not None
    assert found.sample is not None
    # One of the three sequences is held out for predictions.
    assert np.array_equal(found.sample.ids, IDS[0])
    with torch.no_grad():
        chances = torch.cat([llama(torch.from_numpy(row)[None]).logits[0].softmax(-1) for row in IDS[1:]]).double()
        hidden = llama.model(torch.from_numpy(IDS[1:])).last_hidden_state.reshape(-1, 64).double()
    spread = 1 - chances.square().sum(-1)
    expected = (hidden * spread[:, None]).T @ hidden / len(hidden)
    assert np.allclose(found.table.logits, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "gpt2"])
def test_the_lookup_cost_predicts_what_a_small_row_error_costs(family: str) -> None:
    model = tiny.model(family, seed=3)
    ids = np.random.default_rng(0).integers(2, tiny.ROWS, (64, 24))
    cost = measure(ReferenceModel(model), Sequences(ids, ("x",) * len(ids), False), full=True).table
    assert cost is not None
    with torch.no_grad():
        before = [model(torch.from_numpy(row)[None]).logits[0].log_softmax(-1) for row in ids]
    untied = tiny.model(family, seed=3, tie_word_embeddings=False)
    untied.load_state_dict(model.state_dict(), strict=False)
    untied.get_output_embeddings().weight.data = model.get_input_embeddings().weight.data.clone()
    table = untied.get_input_embeddings().weight
    noise = 1e-3 * torch.randn(table.shape, generator=torch.Generator().manual_seed(1)) * table.detach().std()
    with torch.no_grad():
        table += noise
        kl = 0.0
        for row, expected in zip(ids, before, strict=True):
            found = untied(torch.from_numpy(row)[None]).logits[0].log_softmax(-1)
            kl += float((expected.exp() * (expected.double() - found.double())).sum())
    rows = noise.numpy()[ids.reshape(-1)]
    predicted = 0.5 * np.einsum("ti,ij,tj->", rows, cost.lookup, rows, optimize=True) / ids.size
    # One sampled target a position stands for the whole distribution, over 1,536 positions that attention correlates:
    # the estimate scatters by about ten percent. A missing embedding scale (8 or 64 times) is far outside.
    assert kl / ids.size == pytest.approx(predicted, rel=0.4)
