"""``probe`` on whole tiny models: facts that must hold, one document for all families, the same bytes twice."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file

from tieq.errors import RefusedError, TieqError
from tieq.probing import probe
from tieq.recipe import Sampling
from tieq.study import wishes

FEW = Sampling(sequences=4, length=32)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "untied llama": ("llama", {"tie_word_embeddings": False}),
    "phi": ("phi", {}),
    "gpt2": ("gpt2", {}),
    "gemma3_text": ("gemma3_text", {}),
}


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Probe (once) a tiny model at three widths; returns the checkpoint and the document."""
    made: dict[str, tuple[Path, dict[str, Any]]] = {}

    def run(name: str) -> tuple[Path, dict[str, Any]]:
        if name not in made:
            family, changes = MODELS[name]
            folder = tiny.save(tmp_path_factory.mktemp("models") / family, family, **changes)
            made[name] = folder, probe(str(folder), [2, 4, 8], effort="standard", calibrated=FEW, evaluated=FEW)
        return made[name]

    return run


def shape_of(value: Any, free: tuple[str, ...] = ("by_domain", "versions")) -> Any:
    """Keys and kinds of a document: numbers alike, lists by their first element."""
    if isinstance(value, dict):
        return {key: "any" if key in free else shape_of(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape_of(value[0])] if value else []
    return "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value).__name__


@pytest.mark.parametrize("name", MODELS)
def test_every_family_gives_the_same_document(name: str, probed: Any) -> None:
    document = probed(name)[1]
    assert document["tied"] == (name not in ("untied llama", "phi"))
    shape, expected = shape_of(document), shape_of(probed("llama")[1])
    shape.pop("notes"), expected.pop("notes")
    assert shape == expected
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_the_document_has_the_keys_that_readers_know(probed: Any) -> None:
    document = probed("llama")[1]
    assert set(document) == {
        "format", "kind", "model", "tied", "rows", "columns", "scored_ids", "effort", "calibration", "evaluation",
        "notes", "versions", "reference_perplexity", "norm", "bands", "schemes",
    }  # fmt: skip
    entry = document["schemes"][0]
    assert set(entry) == {
        "scheme", "asked", "notes", "solver", "bits_per_weight", "table_bytes", "measured", "interaction", "predicted",
        "predicted_over_measured", "bands", "residual_error", "logits_cost_in_top_columns",
    }  # fmt: skip
    assert set(entry["measured"]) == set(entry["predicted"]) == {"lookup", "logits", "both"}
    assert set(entry["measured"]["both"]["by_domain"]) == {"prose", "code"}


@pytest.mark.parametrize("name", MODELS)
def test_more_bits_cost_less_in_every_role_and_every_block(name: str, probed: Any) -> None:
    schemes = probed(name)[1]["schemes"]
    assert [entry["scheme"] for entry in schemes] == ["q2_0", "q4_0", "q8_0"]
    # From one width to the next the rounding error shrinks by four or more, its square by sixteen.
    for coarse, fine in itertools.pairwise(schemes):
        for role in ("lookup", "logits", "both"):
            assert 0 < fine["measured"][role]["kl"]["value"] < coarse["measured"][role]["kl"]["value"]
            assert 0 < fine["predicted"][role] < coarse["predicted"][role]
        assert all(a > b > 0 for a, b in zip(coarse["residual_error"], fine["residual_error"], strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_small_errors_add_up_as_far_as_cauchy_and_schwarz_allow(name: str, probed: Any) -> None:
    entry = probed(name)[1]["schemes"][-1]
    lookup, logits, both = (entry["measured"][role]["kl"]["value"] for role in ("lookup", "logits", "both"))
    # KL of small errors is a quadratic form: of a sum, it is the sum of both and twice their product, which is at most
    # the root of the two. Float32 noise of some 1e-7 nats beside it.
    assert abs(both - lookup - logits) <= 2 * math.sqrt(lookup * logits) + 1e-6
    assert entry["interaction"]["value"] == pytest.approx(both - lookup - logits, abs=1e-12)


def test_bands_and_counts_are_shares_of_one(probed: Any) -> None:
    document = probed("llama")[1]
    bands = document["bands"]
    assert sum(band["rows"] for band in bands) == document["rows"]
    assert sum(band["token_share"] for band in bands) == pytest.approx(1)
    assert sum(band["expected_share"] for band in bands) == pytest.approx(1, abs=1e-5)
    assert all(len(entry["bands"]["lookup"]) == len(bands) for entry in document["schemes"])


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_same_input_gives_the_same_bytes_on_any_number_of_threads(probed: Any, tmp_path: Path) -> None:
    import torch

    checkpoint, document = probed("llama")
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            out = tmp_path / str(count)
            found = probe(str(checkpoint), [2, 4, 8], out=out, calibrated=FEW, evaluated=FEW)
            assert found == document
    finally:
        torch.set_num_threads(threads)
    first, second = files_of(tmp_path / "1"), files_of(tmp_path / "2")
    assert first == second
    assert set(first) == {
        "probe.json", "manifest.json", "cost_by_role.svg", "residual_error.svg", "frequency_bands.svg",
    }  # fmt: skip
    assert json.loads(first["probe.json"]) == document
    # A later run replaces the folder as a whole, and one that holds something else stays.
    probe(str(checkpoint), [8], out=tmp_path / "1", calibrated=FEW, evaluated=FEW)
    assert len(json.loads((tmp_path / "1" / "probe.json").read_text())["schemes"]) == 1
    (tmp_path / "1" / "mine.txt").write_text("precious")
    with pytest.raises(RefusedError, match=r"mine\.txt"):
        probe(str(checkpoint), [8], out=tmp_path / "1", calibrated=FEW, evaluated=FEW)


def test_a_scheme_that_does_not_fit_says_what_was_used_and_is_measured_once(probed: Any) -> None:
    found = probe(str(probed("llama")[0]), [3, 4], ["f16"], effort="quick", calibrated=FEW, evaluated=FEW)
    four, half = found["schemes"]
    assert (four["scheme"], four["asked"]) == ("q4_0", ["3 bits", "4 bits"])
    assert four["notes"] == ["3 bits: q4_0, 4.5 bits/weight (fallback from q3_k: 64 columns are not divisible by 256)"]
    assert (half["scheme"], half["bits_per_weight"], half["table_bytes"]) == ("f16", 16.0, 320 * 64 * 2)
    assert half["measured"]["both"]["kl"]["value"] < four["measured"]["both"]["kl"]["value"]


def test_a_model_without_a_tokenizer_runs_random_ids_and_says_so(tmp_path: Path, capsys: Any) -> None:
    checkpoint = tiny.save(tmp_path / "llama", tokenizer=False)
    found = probe(str(checkpoint), [4], calibrated=FEW, evaluated=FEW)
    assert found["calibration"]["description"] == found["evaluation"]["description"] == "random token ids"
    assert found["scored_ids"] == tiny.ROWS
    assert "random token ids are run instead of text" in capsys.readouterr().err


def test_rows_that_are_not_numbers_are_refused_before_the_model_runs(tmp_path: Path, capsys: Any) -> None:
    checkpoint = tiny.save(tmp_path / "llama")
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.embed_tokens.weight"][7, 3] = np.nan
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RefusedError, match="1 rows hold NaN or infinity: 7"):
        probe(str(checkpoint), [4], calibrated=FEW, evaluated=FEW)
    assert "calibration" not in capsys.readouterr().err


def test_own_text_replaces_the_default(probed: Any, tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    text.write_text("the dog sleeps and the fox walks by. " * 200)
    found = probe(str(probed("llama")[0]), [4], calibration=[text], evaluation=[text], calibrated=FEW, evaluated=FEW)
    assert found["evaluation"]["domains"] == ["own.txt"]
    assert found["calibration"]["sha256"] == found["evaluation"]["sha256"]


def test_wishes_that_name_nothing_known_are_refused() -> None:
    assert wishes([2, 8, 2], ["iq4_nl"]) == [("2 bits", "q2_0"), ("8 bits", "q8_0"), ("iq4_nl", "iq4_nl")]
    with pytest.raises(TieqError, match="--bits 7 has no scheme"):
        wishes([7])
    with pytest.raises(TieqError, match="'q9_9' is no scheme"):
        wishes([], ["q9_9"])
    with pytest.raises(TieqError, match="no bits and no scheme"):
        wishes([])
