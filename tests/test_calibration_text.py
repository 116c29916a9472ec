"""What is calibrated on: the model's own samples, equal weights of the domains, and text that says too little."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from safetensors.numpy import load_file, save_file
from test_faults import copy

from tieq.calibrate import Statistics, TableCost, calibrate, measure, request
from tieq.calibrate.generate import generate
from tieq.errors import RefusedError, TieqError
from tieq.pipeline import export
from tieq.quantize import QuantizedCheckpoint
from tieq.recipe import Sampling
from tieq.source.reference import ReferenceModel
from tieq.source.tokenizer import TextTokenizer
from tieq.text import CALIBRATION, SAMPLES, Corpus, Sequences, calibration_corpus, default_corpus, monotonous_domains

EFFORTS = ("quick", "standard", "best")
ALL = np.ones(tiny.ROWS, dtype=bool)


@pytest.fixture(scope="module")
def llama() -> ReferenceModel:
    return ReferenceModel(tiny.model("llama"))


# The model's own samples


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_samples_follow_the_models_probabilities(family: str) -> None:
    model = ReferenceModel(tiny.model(family, vocab_size=16))
    starts = np.full(4000, 5)
    written = generate(model, starts, 2, np.ones(16, dtype=bool))
    assert written is not None
    expected = torch.from_numpy(model.logits(np.array([5]))[0]).double().softmax(-1).numpy()
    found = np.bincount(written[:, 1], minlength=16) / len(starts)
    # A share of 4,000 draws is off by 0.008 at most at one sigma; five of them for 16 shares.
    assert np.abs(found - expected).max() < 0.04


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "gpt2"])
def test_the_kept_keys_and_values_change_nothing(family: str) -> None:
    model = ReferenceModel(tiny.model(family))
    written = generate(model, np.array([7, 9]), 24, ALL)
    assert written is not None
    for number, row in enumerate(written):
        chances = np.random.default_rng([0, number]).random(23)
        logits = torch.from_numpy(model.logits(row)).double()
        reached = logits.softmax(-1).cumsum(-1).numpy()
        for step, token in enumerate(row[1:]):
            below = reached[step, token - 1] if token else 0.0
            # float32 logits from a cache and from one pass: 1e-5 apart, and so are the probabilities.
            assert below - 1e-4 <= chances[step] <= reached[step, token] + 1e-4


def test_samples_are_the_same_each_time_and_in_any_batch(llama: ReferenceModel) -> None:
    starts = np.arange(3, 11)
    once = generate(llama, starts, 16, ALL)
    assert once is not None
    assert once.shape == (8, 16)
    assert np.array_equal(once, generate(llama, starts, 16, ALL))
    assert np.array_equal(once[:3], generate(llama, starts[:3], 16, ALL))
    assert not np.array_equal(once, generate(llama, starts, 16, ALL, seed=1))
    assert np.array_equal(once[:, 0], starts)


def test_more_sequences_than_a_batch_holds_go_on(llama: ReferenceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = generate(llama, np.arange(3, 8), 8, ALL)
    monkeypatch.setattr("tieq.calibrate.generate._BATCH", 2)
    assert np.array_equal(whole, generate(llama, np.arange(3, 8), 8, ALL))


def test_only_allowed_ids_follow(llama: ReferenceModel) -> None:
    allowed = np.zeros(tiny.ROWS, dtype=bool)
    allowed[10:14] = True
    written = generate(llama, np.array([0, 1]), 32, allowed)
    assert set(np.unique(written[:, 1:])) <= {10, 11, 12, 13}


def test_a_model_without_finite_probabilities_writes_nothing() -> None:
    model = tiny.model("llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    assert generate(ReferenceModel(model), np.array([3, 4]), 8, ALL) is None


# Which text is asked for


@pytest.fixture
def tokenizer(tiny_checkpoint: Any) -> TextTokenizer:
    return TextTokenizer(tiny_checkpoint(), "here")


def test_the_default_text_has_the_models_own_as_a_third_domain(tokenizer: TextTokenizer) -> None:
    corpus = default_corpus(CALIBRATION)
    assert corpus.shares(16) == {"prose": 6, "code": 5, SAMPLES: 5}
    made = request(corpus, tokenizer, tiny.ROWS, 16, 32)
    assert made.text.domains == ("prose",) * 6 + ("code",) * 5
    assert made.starts.shape == (5,)
    # Without BOS they begin with tokens of the text, and never hold a special one.
    assert set(made.starts) <= set(made.text.ids.reshape(-1))
    assert not made.allowed[[0, 1]].any()
    assert made.allowed[2:].all()


def test_samples_are_asked_for_alone_or_with_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "samples").write_text("a file of that name")
    (tmp_path / "a.txt").write_text("text")
    assert calibration_corpus([]) == default_corpus(CALIBRATION)
    alone, both, file = calibration_corpus(["samples"]), calibration_corpus(["a.txt", "samples"]), Path("samples")
    assert (alone.domains, alone.samples) == ({}, True)
    assert (list(both.domains), both.samples) == (["a.txt"], True)
    assert not calibration_corpus(["a.txt"]).samples
    for named in ("./samples", file):
        assert calibration_corpus([named]) == Corpus({"samples": "a file of that name"}, "text files samples")


def test_only_its_own_text_calibrates_a_model(llama: ReferenceModel, tokenizer: TextTokenizer) -> None:
    wanted = request(calibration_corpus(["samples"]), tokenizer, tiny.ROWS, 3, 16)
    found = calibrate(wanted, lambda: llama, full=False, model={})
    assert found.sequences.domains == (SAMPLES,) * 3
    assert found.sequences.ids.shape == (3, 16)
    assert found.statistics.tokens == 48


def test_an_export_says_that_the_model_wrote_some_of_it(tiny_checkpoint: Any, tmp_path: Path) -> None:
    chosen = tiny.recipe(calibration=Sampling(sequences=6, length=32))
    used = export(str(tiny_checkpoint()), chosen, tmp_path / "out", ("gguf",)).manifest["calibration"]
    assert used["domains"] == ["prose", "code", "samples"]
    assert used["description"].endswith("text that the model wrote itself (samples)")


# Each domain weighs the same


def test_domains_weigh_the_same_whatever_their_number_of_sequences(llama: ReferenceModel) -> None:
    ids = np.random.default_rng(0).integers(2, tiny.ROWS, (5, 16))
    both = measure(llama, Sequences(ids, ("a", "b", "b", "b", "b"), False), full=True)
    parts = [
        measure(llama, Sequences(ids[part], ("x",) * n, False), full=True)
        for part, n in ((slice(1), 1), (slice(1, 5), 4))
    ]
    for name, value in both.second_moments.items():
        expected = (parts[0].second_moments[name] + parts[1].second_moments[name]) / 2
        # float32 sums of 16 positions, weighted and added in another order: some 100 roundings of 2**-24.
        assert np.allclose(value, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    lookups = [part.rows.lookups for part in parts if part.rows is not None]
    assert both.rows is not None
    assert np.allclose(both.rows.lookups, (lookups[0] + lookups[1]) / 2, atol=1e-7)
    for shares in (both.rows.lookups, both.rows.probability):
        assert float(shares.sum(dtype=np.float64)) == pytest.approx(1, abs=1e-5)


def test_equal_domains_weigh_one_each() -> None:
    sequences = Sequences(np.zeros((4, 2), np.int64), ("a", "b", "a", "b"), False)
    assert sequences.weights.tolist() == [1.0] * 4
    uneven = Sequences(np.zeros((4, 2), np.int64), ("a", "b", "b", "b"), False)
    assert uneven.weights.tolist() == [2.0, *[2 / 3] * 3]


def test_the_sampled_positions_are_as_many_of_each_domain(
    llama: ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["tieq.calibrate.measure"]  # hidden by the function's name
    monkeypatch.setattr(module, "_SAMPLE_TOKENS", 48)
    monkeypatch.setattr(module, "_ONE_IN", 1)
    ids = np.random.default_rng(0).integers(2, tiny.ROWS, (7, 8))
    sample = measure(llama, Sequences(ids, ("a",) * 5 + ("b",) * 2, False), full=True).sample
    assert sample is not None
    assert np.array_equal(sample.ids, ids[[0, 2, 5, 6]].reshape(-1))


# Too little text (each with every effort)


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("content", ["", " \n\n "])
def test_an_empty_calibration_text_is_refused(effort: str, content: str, tiny_checkpoint: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(TieqError, match=r"a\.txt: is empty"):
        export(str(tiny_checkpoint()), tiny.recipe(effort=effort), tmp_path / "out", calibration=[tmp_path / "a.txt"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize(
    ("content", "said"), [("a few words", "fewer than one sequence"), ("aa\n" * 4000, "different")]
)
def test_short_or_repeated_text_is_refused_where_it_would_be_used(
    effort: str, content: str, said: str, tiny_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text(content)
    arguments = (str(tiny_checkpoint()), tiny.recipe(effort=effort), tmp_path / "out", ("gguf",))
    if effort == "quick":  # calibrates nothing
        assert export(*arguments, calibration=[tmp_path / "a.txt"]).passed
        return
    monkeypatch.setattr("tieq.pipeline.load_model", lambda *a, **k: pytest.fail("work began"))
    with pytest.raises(TieqError, match=rf"a\.txt.*{said}"):
        export(*arguments, calibration=[tmp_path / "a.txt"])
    assert not (tmp_path / "out").exists()


def test_a_text_is_monotonous_by_its_different_tokens_and_its_length() -> None:
    def found(ids: list[int], count: int = 1, *, bos: bool = False) -> dict[str, int]:
        return monotonous_domains(Sequences(np.array([ids] * count), ("d",) * count, bos))

    assert found([7] * 256) == {"d": 1}
    assert found([0, *[7] * 255], bos=True) == {"d": 1}
    assert found(list(range(15)) * 20) == {"d": 15}
    assert not found(list(range(16)) * 20)
    assert not found([7] * 8)  # too short to tell
    assert found([7, 8] * 64) == {"d": 2}


@pytest.mark.parametrize("effort", EFFORTS)
def test_text_that_excites_nothing_falls_back_and_says_so(effort: str, tiny_checkpoint: Any, tmp_path: Path) -> None:
    """Gates of zero: the inputs of every down projection are zero at every position."""
    folder = copy(tiny_checkpoint(), tmp_path / "llama")
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if "gate_proj" in name:
            tensors[name] = np.zeros_like(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    result = export(str(folder), tiny.recipe(effort=effort), tmp_path / "out", ("gguf",))
    said = [note for note in result.manifest["notes"] if "calibration says nothing about" in note]
    assert len(said) == (effort != "quick")
    if said:
        assert "down_proj.weight and 1 more" in said[0]
    assert_finite(result.folder)


@pytest.mark.parametrize("effort", EFFORTS)
def test_activations_beyond_float32_fall_back_and_say_so(effort: str, tiny_checkpoint: Any, tmp_path: Path) -> None:
    # llama.cpp's 8-bit activations have fp16 scales, so only ONNX Runtime runs such a model.
    folder = copy(tiny_checkpoint(), tmp_path / "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], 1e25)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    result = export(str(folder), tiny.recipe(effort=effort), tmp_path / "out", ("onnx",))
    notes = " ".join(result.manifest["notes"])
    assert ("calibration says nothing about lm_head.weight" in notes) == (effort != "quick")
    assert_finite(result.folder)


@pytest.mark.parametrize("effort", EFFORTS)
def test_weights_that_are_not_finite_are_refused_by_row_whatever_calibration_saw(
    effort: str, tiny_checkpoint: Any, tmp_path: Path
) -> None:
    folder = copy(tiny_checkpoint(), tmp_path / "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][40, 3] = np.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RefusedError, match=r"1 rows hold NaN or infinity: 40"):
        export(str(folder), tiny.recipe(effort=effort), tmp_path / "out", ("gguf",))


def assert_finite(folder: Path) -> None:
    checkpoint = QuantizedCheckpoint(folder / "quantized.safetensors")
    for name in checkpoint.matrices:
        assert np.isfinite(checkpoint.decode(name)).all(), name
    json.loads((folder / "manifest.json").read_text())


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, 1e-38, 3e38])
@pytest.mark.parametrize("shape", [(4,), (4, 4)])
def test_moments_that_say_nothing_weigh_equally(value: float, shape: tuple[int, ...]) -> None:
    moments = np.full(shape, value, np.float32)
    found = Statistics({"a": moments}, 1).importance("a", "body", "lm_head")
    assert found is not None
    assert found.tolist() == [1.0] * 4
    assert len(Statistics({"a": moments}, 1).problems()) == 1


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, 3e38])
def test_a_cost_that_says_nothing_gives_way_to_the_second_moments(value: float) -> None:
    nothing = np.full((4, 4), value, np.float32)
    statistics = Statistics({"head": np.ones(4, np.float32)}, 1, TableCost(nothing, nothing))
    found = statistics.importance("table", "table", "head")
    assert found is not None
    assert found.shape == (4,)
    assert np.isfinite(found).all()
    assert statistics.importance("lookup", "lookup", "head") is None
