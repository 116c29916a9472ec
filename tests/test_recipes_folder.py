"""Every shipped recipe loads, plans and exports, and can be named without a path."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tiny
from ruamel.yaml import YAML

from tieq.codecs.schemes import SCHEMES
from tieq.errors import TieqError
from tieq.pipeline import export
from tieq.recipe import Recipe, find_recipe, load_recipe, recipe_schema, shipped_recipes
from tieq.source.locate import aliases

RECIPES = shipped_recipes()
GENERIC = {"smallest", "fast", "balanced", "near-lossless"}
# Models whose gates were measured; the others cannot be had without the hub.
MEASURED = {"smollm2-135m", "gemma-3-270m"}
# Stem of the recipe's name to the tiny model's family.
FAMILIES = {"gemma-2": "gemma2", "gemma-3": "gemma3_text", "qwen2": "qwen2", "qwen3": "qwen3", "gpt2": "gpt2"}


def family(name: str) -> str:
    return next((found for stem, found in FAMILIES.items() if name.startswith(stem)), "llama")


def test_each_is_generic_or_of_a_model_that_has_an_alias():
    assert set(RECIPES) >= GENERIC
    assert len(RECIPES) == 16
    assert set(RECIPES) - GENERIC <= set(aliases())


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_gates_where_they_were_measured_and_says_where_not(name):
    recipe, text = load_recipe(RECIPES[name]), RECIPES[name].read_text()
    assert text.startswith("# yaml-language-server: $schema=recipe.schema.json\n")
    assert len(text.splitlines()) <= 8
    gates = [recipe.gates.max_kl, recipe.gates.min_top1]
    if name in MEASURED | {"near-lossless"}:
        assert None not in gates
    else:
        assert gates == [None, None]
        assert re.search("gates (have not been measured on the real model|depend on the model)$", recipe.description)


@pytest.mark.parametrize("name", RECIPES)
def test_a_shipped_recipe_exports_a_tiny_model_of_its_family(name, tmp_path, tiny_checkpoint):
    recipe = find_recipe(name)
    few = {key: getattr(tiny.recipe(), key) for key in ("calibration", "evaluation", "gguf")}
    result = export(str(tiny_checkpoint(family(name))), recipe.model_copy(update=few), tmp_path / "out")
    assert [c["value"] for c in result.checks["checks"] if c["name"] == "table copies"] == [1, 1]
    assert result.manifest["recipe"]["name"] == recipe.name


@pytest.mark.parametrize("name", sorted(GENERIC))
def test_a_generic_recipe_exports_an_untied_model_too(name, tmp_path, tiny_checkpoint):
    few = {key: getattr(tiny.recipe(), key) for key in ("calibration", "evaluation", "gguf")}
    recipe = find_recipe(name).model_copy(update=few)
    result = export(str(tiny_checkpoint("phi")), recipe, tmp_path / "out", ("onnx",))
    assert not result.manifest["tied"]
    said = [note for note in result.manifest["notes"] if "takes none" in note]
    assert len(said) == bool(recipe.table.bands)


def test_the_schema_for_editors_is_the_models():
    assert (RECIPES["balanced"].parent / "recipe.schema.json").read_text() == recipe_schema()


def test_a_path_wins_over_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_recipe("balanced").name == "balanced"
    Path("balanced").write_text("name: mine")
    assert find_recipe("balanced").name == "mine"


def test_an_unknown_name_lists_the_known_ones_and_the_near_one():
    with pytest.raises(TieqError, match=r"recipe 'balancd': is no file .* Did you mean balanced\? Known: balanced, "):
        find_recipe("balancd")
    with pytest.raises(TieqError, match=r"shipped recipe\. Known: .*smollm2-360m\."):
        find_recipe("zzz")


@pytest.mark.parametrize("wanted", ["none.yaml", "folder/none", "none.yml"])
def test_what_looks_like_a_file_is_said_to_be_missing(wanted):
    with pytest.raises(TieqError, match="cannot be read as YAML"):
        find_recipe(wanted)


def test_the_page_has_every_key_with_its_default():
    page = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    found = YAML(typ="safe").load(example)
    assert Recipe.model_validate(found) == Recipe()
    assert set(found) == set(Recipe.model_fields)
    for section in ("gates", "evaluation", "onnx", "gguf", "litert", "table"):
        assert set(found[section]) == set(type(getattr(Recipe(), section)).model_fields), section
    # Every integer scheme has its bits in the table of schemes.
    for name, scheme in SCHEMES.items():
        if scheme.onnx:
            row = next(line for line in page.splitlines() if line.startswith("|") and f"`{name}`" in line)
            assert f"{scheme.bits_per_weight:g}" in row
