"""Every shipped recipe loads, plans and exports."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny

from tieq.pipeline import export
from tieq.recipe import load_recipe

FOLDER = Path(__file__).resolve().parents[1] / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))


def test_there_are_recipes():
    assert RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_exports_a_tiny_model_of_its_family(path, tmp_path, tiny_checkpoint):
    recipe = load_recipe(path)
    assert recipe.description
    assert recipe.gates.max_kl is not None
    family = "gemma3_text" if "gemma" in path.stem else "llama"
    few = {key: getattr(tiny.recipe(), key) for key in ("calibration", "evaluation", "gguf")}
    result = export(str(tiny_checkpoint(family)), recipe.model_copy(update=few), tmp_path / "out")
    assert [c["value"] for c in result.checks["checks"] if c["name"] == "table copies"] == [1, 1]
    assert result.manifest["recipe"]["name"] == recipe.name
