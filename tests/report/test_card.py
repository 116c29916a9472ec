"""`report.md` as a model card: front matter that the hub reads, and commands with the names of real files."""

from __future__ import annotations

import json

import pytest
import tiny
from huggingface_hub import ModelCard
from ruamel.yaml import YAML

from tieq.pipeline import export
from tieq.report.card import front_matter, run_text
from tieq.source.checkpoint import CheckpointSource
from tieq.source.gguf_file import GgufValue
from tieq.source.gguf_source import GgufSource


def read_card(text: str) -> dict:
    """The front matter, as the hub's library and as a YAML reader see it."""
    opening, content, _ = text.split("---\n", 2)
    assert opening == ""
    parsed = YAML(typ="safe").load(content)
    assert ModelCard(text, ignore_metadata_errors=False).data.to_dict() == parsed
    return parsed


def test_a_report_is_a_model_card(tiny_export):
    folder = tiny_export().folder
    text = (folder / "report.md").read_text(encoding="utf-8")
    found = read_card(text)
    assert found == {
        "library_name": "transformers.js",
        "pipeline_tag": "text-generation",
        "tags": ["tieq", "quantized", "onnx", "gguf"],
    }
    content = ModelCard(text).content
    assert content == text
    # Names in the commands are files that are there.
    listed = {item["path"] for item in tiny_export().manifest["files"]}
    run = run_text(tiny_export().manifest)
    assert run in text
    for name in ("gguf/model.gguf", "gguf/Modelfile", "onnx/model_generate.onnx", "onnx/model.onnx_data"):
        assert name in listed
        assert name in run
    assert json.loads((folder / "onnx/genai_config.json").read_text())["model"]["decoder"]["filename"] in run
    assert text.index("# ") < text.index("## Run it") < text.index("## Files")


def test_license_and_base_model_stand_where_the_source_says_them():
    manifest = {
        "source": {"label": "x", "origin": "hub some-one/model.v1, revision 0123abc", "license": "Apache-2.0"},
        "formats": ["gguf"],
        "files": [],
    }
    found = read_card(front_matter(manifest) + "\n\ntext\n")
    assert found["license"] == "apache-2.0"
    assert found["base_model"] == "some-one/model.v1"
    assert found["base_model_relation"] == "quantized"
    assert found["library_name"] == "gguf"


@pytest.mark.parametrize("license_id", ["see: the\n---\nfile", "", None, "<b>", "a license of ours"])
@pytest.mark.parametrize("origin", ["checkpoint folder hub a/b, revision c", "hub a/b\n---\nx: y, revision c", "hub"])
def test_what_the_hub_would_refuse_is_left_out(license_id, origin):
    source = {"label": "x", "origin": origin, "license": license_id}
    found = read_card(front_matter({"source": source, "formats": ["ort"], "files": []}) + "\n\ntext\n")
    assert set(found) == {"library_name", "pipeline_tag", "tags"}


def test_a_checkpoints_card_and_a_gguf_file_name_their_license(tiny_checkpoint, tmp_path):
    folder = tiny.save(tmp_path / "model", "llama")
    assert CheckpointSource(folder).license_id() is None
    for card, expected in (
        ("---\nlicense: mit\ntags: [a]\n---\n# text\n", "mit"),
        ("---\ntags: [a]\n---\n", None),
        ("# no front matter\n---\nlicense: mit\n---\n", None),
        ("---\nlicense: [a, b]\n---\n", None),
        ("---\n: : :\n\t---\n", None),
    ):
        (folder / "README.md").write_text(card)
        assert CheckpointSource(folder).license_id() == expected
    (folder / "README.md").write_bytes(b"---\n\xff\n---\n")
    assert CheckpointSource(folder).license_id() is None
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    result = export(str(folder), tiny.recipe(evaluation=None, effort="quick"), tmp_path / "out", ("gguf",))
    assert result.manifest["source"]["license"] == "apache-2.0"
    assert read_card((result.folder / "report.md").read_text())["license"] == "apache-2.0"
    # llama.cpp's converter leaves it out of the file; one that has it says it.
    source = GgufSource(result.folder / "gguf/model.gguf")
    assert source.license_id() is None
    source.file.metadata["general.license"] = GgufValue("mit", 8)
    assert source.license_id() == "mit"


def test_containers_without_genai_or_with_ort_have_their_own_command():
    files = [
        {"path": path} for path in ("onnx/model.onnx", "onnx/model.onnx.data", "onnx/config.json", "ort/model.ort")
    ]
    run = run_text({"files": files})
    assert "ORTModelForCausalLM" in run
    assert "onnxruntime_genai" not in run
    assert 'InferenceSession("ort/model.ort")' in run
    assert "llama-cli" not in run
