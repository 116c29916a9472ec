"""The Python API takes plain arguments and stays callable whatever was imported before."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import tiny

from tieq import api
from tieq.recipe import dump_recipe


def test_importing_it_loads_nothing_heavy():
    code = "import sys, tieq.api; sys.exit(bool({'torch', 'numpy', 'onnx', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_export_inspect_and_validate_take_strings(tiny_checkpoint, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_recipe(tiny.recipe()))
    result = api.export(str(tiny_checkpoint()), str(tmp_path / "out"), recipe=str(recipe), formats=("gguf",))
    assert result.passed
    assert api.inspect(str(result.folder))["containers"][0]["shared"]
    found = api.validate(str(result.folder))
    assert found["passed"]
    assert found["runtimes"] == result.checks["runtimes"]


def test_probe_and_compare_return_their_documents_and_write_only_where_they_are_told(tiny_checkpoint, tmp_path):
    probed = api.probe(tiny_checkpoint(), bits=(8,), schemes=("q4_0",), effort="quick")
    assert [entry["scheme"] for entry in probed["schemes"]] == ["q4_0", "q8_0"]
    compared = api.compare(tiny_checkpoint(), tmp_path / "out", bits=(8,), effort="quick")
    assert compared["schemes"][0]["tie_tax"]["value"] == 0.0
    assert (tmp_path / "out" / "compare.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_any_changed_byte_of_an_artifact_is_noticed(tiny_checkpoint, tmp_path):
    result = api.export(tiny_checkpoint(), tmp_path / "out", recipe=tiny.recipe(), formats=("gguf",))
    file = result.folder / "quantized.safetensors"
    content = np.fromfile(file, np.uint8)
    content[-1] ^= 1
    content.tofile(file)
    found = api.validate(result.folder)
    assert not found["passed"]
    (check,) = [check for check in found["checks"] if not check["passed"]]
    assert (check["name"], check["detail"]) == ("files", "quantized.safetensors")


def test_an_artifact_without_a_tokenizer_is_validated_again_on_the_same_ids(tmp_path):
    checkpoint = tiny.save(tmp_path / "llama", tokenizer=False)
    result = api.export(checkpoint, tmp_path / "out", recipe=tiny.recipe(), formats=("onnx",))
    assert api.validate(result.folder)["runtimes"] == result.checks["runtimes"]


def test_what_a_killed_export_left_is_removed_by_the_next(tiny_checkpoint, tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    stale, running = tmp_path / f".out.partial-{dead.pid}-abc", tmp_path / ".out.partial-1-abc"
    stale.mkdir()
    running.mkdir()
    api.export(tiny_checkpoint(), tmp_path / "out", recipe=tiny.recipe(), formats=("gguf",))
    assert sorted(path.name for path in tmp_path.iterdir()) == [running.name, "out"]
