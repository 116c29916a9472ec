from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny

from tieq.budget import Budget
from tieq.errors import TieqError
from tieq.pipeline import export
from tieq.planning import plan, read_choices
from tieq.recipe import Recipe

RECIPE = tiny.recipe(effort="standard")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("text") / "own.txt"
    path.write_text("the dog sleeps in the warm sun and the fox walks by the news of bread. " * 300)
    return {"calibration": [path], "evaluation": [path], "cache": False}


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "phi"])
def test_a_plan_for_a_size_is_followed_and_fits(family: str, tiny_checkpoint: Any, texts: Any, tmp_path: Path) -> None:
    model = str(tiny_checkpoint(family))
    loose = plan(model, RECIPE, Budget(size=10_000_000), ("onnx",), measured=False, **texts)
    whole, fixed = loose["predicted"]["file_bytes"], loose["predicted"]["fixed_bytes"]
    target = fixed + int(0.75 * (whole - fixed))
    made = plan(model, RECIPE, Budget(size=target), ("onnx",), out=tmp_path / "plan", **texts)
    assert fixed < made["predicted"]["file_bytes"] <= target
    choices = read_choices(tmp_path / "plan" / "plan.json")
    done = export(model, RECIPE, tmp_path / "out", ("onnx",), choices=choices, **texts)
    decided = json.loads((tmp_path / "out" / "plan.json").read_text())["decisions"]
    assert {d["name"]: d["scheme"] for d in decided} == {name: p.scheme for name, p in choices.items()}
    assert {d["reason"] for d in decided} == {"budget"}
    (container,) = done.checks["containers"]
    assert container["file_bytes"] <= target
    assert (tmp_path / "plan" / "front.svg").read_text().startswith("<?xml")


def test_a_plan_for_a_quality_is_the_smaller_the_worse(tiny_checkpoint: Any, texts: Any) -> None:
    model = str(tiny_checkpoint())
    fine, coarse = (plan(model, RECIPE, Budget(kl=kl), ("onnx",), **texts) for kl in (1e-3, 3e-2))
    assert fine["predicted"]["kl"] <= 1e-3
    assert coarse["predicted"]["kl"] <= 3e-2
    assert coarse["predicted"]["file_bytes"] < fine["predicted"]["file_bytes"]
    assert set(coarse["measured"]) == {"lookup", "logits", "table", "whole", "body"}


def test_the_prices_follow_the_measurement(tiny_checkpoint: Any, texts: Any) -> None:
    made = plan(str(tiny_checkpoint()), RECIPE, Budget(), ("onnx",), **texts)
    priced, measured = made["predicted"]["by_role"], made["measured"]
    # The recipe's own precisions are priced and measured, so the corrected prices are the measurement itself.
    for role in ("lookup", "logits", "body"):
        assert priced[role] == pytest.approx(measured[role])


def test_two_plans_are_the_same(tiny_checkpoint: Any, texts: Any) -> None:
    first, second = (
        plan(str(tiny_checkpoint()), RECIPE, Budget(size=420_000), ("onnx",), measured=False, **texts) for _ in "12"
    )
    assert first == second


@pytest.mark.parametrize(
    ("budget", "said"), [(Budget(size=1000), "the smallest has about"), (Budget(kl=1e-9), "the best reaches about")]
)
def test_what_no_plan_reaches_is_said(
    budget: Budget, said: str, tiny_checkpoint: Any, texts: Any, tmp_path: Path
) -> None:
    with pytest.raises(TieqError, match=said):
        plan(str(tiny_checkpoint()), RECIPE, budget, ("onnx",), out=tmp_path / "out", measured=False, **texts)
    assert not (tmp_path / "out").exists()


def test_a_plan_needs_calibration(tiny_checkpoint: Any, texts: Any) -> None:
    with pytest.raises(TieqError, match="needs calibration"):
        plan(str(tiny_checkpoint()), Recipe(effort="quick"), Budget(), ("onnx",), **texts)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"choices": 3}', '{"choices": {}}', '{"choices": {"a": {"scheme": "q9"}}}']
)
def test_a_file_that_is_no_plan_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(TieqError, match="is no plan"):
        read_choices(tmp_path / "plan.json")


def test_a_plan_of_another_model_is_refused(tiny_checkpoint: Any, texts: Any, tmp_path: Path) -> None:
    document = {"choices": {"h.0.c_fc.weight": {"scheme": "q4_0"}}, "formats": ["onnx"], "budget": {},
                "model": {"fingerprint": "0"}}  # fmt: skip
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(TieqError, match="was made for other weights"):
        read_choices(tmp_path / "plan.json", str(tiny_checkpoint()))
    choices = read_choices(tmp_path / "plan.json")
    with pytest.raises(TieqError, match="is no matrix of this model"):
        export(str(tiny_checkpoint()), RECIPE, tmp_path / "out", ("onnx",), choices=choices, **texts)
