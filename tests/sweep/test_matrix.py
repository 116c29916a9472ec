"""The models file, the cells and their keys."""

from __future__ import annotations

import json
import shutil

import pytest

from tieq.errors import TieqError
from tieq.sweep.matrix import Cell, Wishes, load_models, make_cells


def cells(matrix, *recipes, wishes=None, **more):
    return make_cells(matrix.models, recipes or ("smallest",), wishes or Wishes(), **more)


def test_models_are_names_or_mappings(matrix):
    matrix.models.write_text("- smollm2-135m\n- {model: some/Model, name: Mine}\n- ./files/Tiny Model.gguf\n")
    assert [entry.label for entry in load_models(matrix.models)] == ["smollm2-135m", "Mine", "tiny-model"]


def test_every_wrong_entry_is_reported_at_once(matrix):
    matrix.models.write_text("- gpt2\n- {model: gpt2, nmae: x}\n- {name: a}\n- {model: gpt2, name: a/b}\n- 3\n")
    with pytest.raises(TieqError) as caught:
        load_models(matrix.models)
    said = str(caught.value)
    assert said.startswith(str(matrix.models))
    for part in ("entry 2, nmae:", "entry 3, model:", "entry 4, name:", "entry 5:"):
        assert part in said
    assert "entry 1" not in said


@pytest.mark.parametrize("content", ["", "[]", "models: [gpt2]", "gpt2", "- [", "a: *b"])
def test_what_is_no_list_is_refused(matrix, content):
    matrix.models.write_text(content)
    with pytest.raises(TieqError, match=r"no list of models|as YAML"):
        load_models(matrix.models)


def test_missing_models_recipes_and_double_names_are_reported_together(matrix, tmp_path):
    matrix.models.write_text("- gpt2\n- GPT2\n- ./nowhere\n- gpt3\n")
    with pytest.raises(TieqError) as caught:
        cells(matrix, "smallest", "smalest", tmp_path / "missing.yaml")
    said = str(caught.value)
    for part in ("'./nowhere'", "'gpt3'", "'smalest'", "missing.yaml", "Two cells would be called 'gpt2-smallest'"):
        assert part in said


def test_cells_are_models_times_recipes(matrix):
    found = cells(matrix, "smallest", matrix.recipe("mine"))
    assert [cell.name for cell in found] == [
        "smollm2-135m-smallest", "smollm2-135m-mine", "gpt2-smallest", "gpt2-mine",
    ]  # fmt: skip
    assert len({cell.key for cell in found}) == 4
    assert {cell.recipe.effort for cell in cells(matrix, effort="quick")} == {"quick"}


def test_a_cell_survives_json(matrix, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    wishes = Wishes(("gguf",), ("llama.cpp",), (str(tmp_path / "a.txt"),), ("samples",))
    for wished in (wishes, Wishes()):
        (cell, _) = cells(matrix, wishes=wished)
        assert Cell.from_json(json.loads(json.dumps(cell.to_json()))) == cell


def test_a_key_follows_from_what_the_result_follows_from(matrix, tmp_path, monkeypatch):
    text = tmp_path / "a.txt"
    text.write_text("one")
    base = Wishes(texts=(str(text),))
    key = cells(matrix, wishes=base)[0].key
    assert cells(matrix, wishes=base)[0].key == key
    others = [
        cells(matrix, wishes=Wishes())[0].key,
        cells(matrix, wishes=Wishes(("gguf",), texts=base.texts))[0].key,
        cells(matrix, wishes=Wishes(runtimes=("llama.cpp",), texts=base.texts))[0].key,
        cells(matrix, wishes=base, effort="quick")[0].key,
        cells(matrix, "near-lossless", wishes=base)[0].key,
        cells(matrix, wishes=base)[1].key,
    ]
    text.write_text("two")
    others.append(cells(matrix, wishes=base)[0].key)
    monkeypatch.setattr("tieq.sweep.matrix.__version__", "9")
    others.append(cells(matrix, wishes=base)[0].key)
    assert key not in others
    assert len(set(others)) == len(others)


def test_a_model_on_disk_is_known_by_its_content(matrix, tiny_checkpoint):
    # Paths are those of the models file's folder.
    folder = shutil.copytree(tiny_checkpoint("llama"), matrix.folder / "tiny")
    shutil.copytree(folder, matrix.folder / "same")
    matrix.models.write_text("- ./tiny\n- same\n")
    first, second = cells(matrix)
    assert first.model == str(folder)
    assert first.key == second.key
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + "\n")
    assert cells(matrix)[0].key != second.key
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    assert cells(matrix)[0].key not in (first.key, second.key)
