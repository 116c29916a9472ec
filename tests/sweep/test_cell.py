"""One cell in this process, on tiny models."""

from __future__ import annotations

import tiny

from tieq.sweep.cell import attempt
from tieq.sweep.matrix import Cell, Wishes


def cell(model, recipe, *runtimes, formats=("gguf",)) -> Cell:
    return Cell("tiny-x", str(model), "tiny", "x", recipe, Wishes(formats, runtimes), "key")


def test_runtimes_that_the_export_ran_are_not_run_again(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("tieq.revalidate.validate_path", None)
    wanted = cell(tiny_checkpoint(), tiny.recipe(effort="quick"), "llama.cpp", formats=("onnx", "gguf"))
    outcome = attempt(wanted, tmp_path / "artifact")
    assert outcome["state"] == "done", outcome
    found = outcome["result"]
    assert found["passed"]
    assert [item["runtime"] for item in found["checks"]["runtimes"]] == ["llama.cpp"]
    assert [item["container"] for item in found["checks"]["containers"]] == ["onnx", "gguf"]
    assert found["evaluation"]["sequences"] == 2
    # In the place of an earlier result comes the new one, or none.
    assert (tmp_path / "artifact" / "onnx").exists()
    outcome = attempt(cell(tmp_path / "nowhere", tiny.recipe()), tmp_path / "artifact")
    assert outcome["state"] == "failed"
    assert outcome["error"].startswith(f"model '{tmp_path / 'nowhere'}': is no folder")
    assert not (tmp_path / "artifact").exists()


def test_runtimes_that_it_did_not_run_are_run_by_validation(tiny_checkpoint, tmp_path):
    outcome = attempt(
        cell(tiny_checkpoint(), tiny.recipe(effort="quick", evaluation=None), "llama.cpp"), tmp_path / "artifact"
    )
    assert outcome["state"] == "done", outcome
    found = outcome["result"]
    assert [item["runtime"] for item in found["checks"]["runtimes"]] == ["llama.cpp"]
    assert found["evaluation"]["sequences"] == 8
    assert "evaluation" not in found["checks"]


def test_what_nobody_foresaw_is_a_failure_with_a_name(tiny_checkpoint, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("tieq.pipeline.export", broken)
    outcome = attempt(cell(tiny_checkpoint(), tiny.recipe()), tmp_path / "artifact")
    assert outcome == {"state": "failed", "error": "ZeroDivisionError: by zero; the log has the traceback."}
