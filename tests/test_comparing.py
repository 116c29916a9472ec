"""``compare`` on whole tiny models: what must hold between shared, untied and plain tables."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from tieq.comparing import _pairs, compare
from tieq.errors import RefusedError
from tieq.recipe import Sampling
from tieq.records import Decision

FEW = Sampling(sequences=4, length=32)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "gpt2": ("gpt2", {}),
    "gemma3_text": ("gemma3_text", {}),
    "untied llama": ("llama", {"tie_word_embeddings": False}),
    "phi": ("phi", {}),
}
TIED = ("llama", "gpt2", "gemma3_text")


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Compare (once) a tiny model at three widths with the full solver; returns checkpoint, folder and document."""
    made: dict[str, tuple[Path, Path, dict[str, Any]]] = {}

    def run(name: str) -> tuple[Path, Path, dict[str, Any]]:
        if name not in made:
            family, changes = MODELS[name]
            base = tmp_path_factory.mktemp("models")
            folder = tiny.save(base / family, family, **changes)
            document = compare(str(folder), [2, 4, 8], out=base / "out", calibrated=FEW, evaluated=FEW)
            made[name] = folder, base / "out", document
        return made[name]

    return run


@pytest.mark.parametrize("name", MODELS)
def test_every_family_gives_the_same_document(name: str, compared: Any) -> None:
    _, folder, document = compared(name)
    assert set(document) == {
        "format", "kind", "model", "tied", "rows", "columns", "scored_ids", "effort", "calibration", "evaluation",
        "notes", "versions", "float", "schemes",
    }  # fmt: skip
    for entry in document["schemes"]:
        assert set(entry) == {
            "scheme", "asked", "notes", "solver", "bits_per_weight", "table_bytes", "shared", "untied", "naive",
            "untied_same_bytes", "tie_tax", "same_bytes_tax", "bytes_saved", "verdict",
        }  # fmt: skip
        assert entry["untied"]["bytes"] == 2 * entry["table_bytes"]
        assert entry["verdict"].startswith(entry["scheme"])
        assert entry["verdict"].endswith(".")
    assert json.loads((folder / "compare.json").read_text()) == document
    assert sorted(path.name for path in folder.iterdir()) == ["compare.json", "compare.svg", "manifest.json"]


@pytest.mark.parametrize("name", TIED)
def test_a_tied_model_has_a_tax_and_pays_it_in_bytes(name: str, compared: Any) -> None:
    document = compared(name)[2]
    assert document["float"] is None
    for entry in document["schemes"]:
        shared, untied = entry["shared"]["kl"]["value"], entry["untied"]["kl"]["value"]
        assert entry["tie_tax"]["value"] == pytest.approx(shared - untied, abs=1e-12)
        # Pairing over sequences can only take out what both have in common: at most the sum of the two errors is left.
        bound = entry["shared"]["kl"]["standard_error"] + entry["untied"]["kl"]["standard_error"]
        assert 0 < entry["tie_tax"]["standard_error"] <= bound
        assert entry["bytes_saved"] == entry["shared"]["bytes"] == entry["naive"]["bytes"] == entry["table_bytes"]
    two, four, eight = document["schemes"]
    assert two["untied_same_bytes"] is two["same_bytes_tax"] is None
    assert "no two tables fit" in two["verdict"]
    # Two tables of 2.25 bits fill one of 4.5, and have an error many times as large.
    assert (four["untied_same_bytes"]["lookup"], four["untied_same_bytes"]["logits"]) == ("q2_0", "q2_0")
    assert four["untied_same_bytes"]["bytes"] == four["table_bytes"]
    assert four["untied_same_bytes"]["kl"] == two["untied"]["kl"]
    for entry in (four, eight):
        assert entry["untied_same_bytes"]["bytes"] <= entry["table_bytes"]
        assert entry["same_bytes_tax"]["value"] > 0
        assert entry["untied_same_bytes"]["kl"]["value"] > entry["shared"]["kl"]["value"]
    kinds = ("shared", "untied", "naive")
    for coarse, fine in ((two, four), (four, eight)):
        assert all(fine[kind]["kl"]["value"] < coarse[kind]["kl"]["value"] for kind in kinds)


def test_without_calibration_both_roles_have_one_solution_and_the_tax_is_exactly_zero(compared: Any) -> None:
    found = compare(str(compared("llama")[0]), [4], effort="quick", calibrated=FEW, evaluated=FEW)
    (entry,) = found["schemes"]
    assert entry["tie_tax"] == {"value": 0.0, "standard_error": 0.0}
    assert entry["shared"]["kl"] == entry["untied"]["kl"]
    assert "loses nothing measurable" in entry["verdict"]


@pytest.mark.parametrize("name", ["untied llama", "phi"])
def test_an_untied_model_says_what_tying_would_do(name: str, compared: Any) -> None:
    document = compared(name)[2]
    assert set(document["float"]) == {"lookup_table_for_both", "logits_table_for_both", "mean_of_both"}
    assert all(found["kl"]["value"] > 0 for found in document["float"].values())
    for entry in document["schemes"]:
        assert entry["shared"] is entry["tie_tax"] is entry["untied_same_bytes"] is entry["bytes_saved"] is None
        assert entry["naive"]["bytes"] == entry["untied"]["bytes"]
        # Random tables have nothing to do with each other: no rounding costs as much as taking one for the other.
        assert entry["untied"]["kl"]["value"] < document["float"]["lookup_table_for_both"]["kl"]["value"]


def test_two_equal_tables_that_are_kept_apart_lose_nothing_when_tied(tmp_path: Path) -> None:
    module = tiny.model("llama", tie_word_embeddings=False)
    with torch.no_grad():
        module.get_output_embeddings().weight.copy_(module.get_input_embeddings().weight)
    module.save_pretrained(tmp_path / "equal")
    tiny.save_byte_level(tmp_path / "equal")
    found = compare(str(tmp_path / "equal"), [8], effort="quick", calibrated=FEW, evaluated=FEW)
    assert found["tied"] is False
    for scores in found["float"].values():
        assert (scores["kl"]["value"], scores["top1"]["value"], scores["perplexity_ratio"]["value"]) == (0.0, 1.0, 1.0)


def test_the_same_input_gives_the_same_bytes_and_foreign_files_stay(compared: Any, tmp_path: Path) -> None:
    checkpoint, folder, document = compared("llama")
    again = compare(str(checkpoint), [2, 4, 8], out=tmp_path / "again", calibrated=FEW, evaluated=FEW)
    assert again == document
    for path in folder.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("precious")
    with pytest.raises(RefusedError, match="not replaced"):
        compare(str(checkpoint), [4], out=tmp_path / "thesis")


def decision(scheme: str, bits: float) -> Decision:
    return Decision("t", "t", "table", 64, 64, scheme, "hessian", bits, "recipe")


def test_pairs_fill_the_shared_tables_bytes_and_leave_no_room() -> None:
    known = [decision(*item) for item in (("two", 2.25), ("three", 3.5), ("four", 4.5), ("five", 5.5), ("eight", 8.5))]
    by_name = {item.scheme: item for item in known}
    assert _pairs(by_name["two"], known) == []
    assert _pairs(by_name["four"], known) == [("two", "two")]
    assert _pairs(by_name["five"], known) == [("two", "two")]
    assert _pairs(by_name["eight"], known) == [("two", "five"), ("three", "four"), ("four", "three"), ("five", "two")]
    wide = dataclasses.replace(by_name["eight"], scheme="f16", bits_per_weight=16.0)
    assert ("eight", "five") in _pairs(wide, known)
    assert ("four", "four") not in _pairs(wide, known)
