"""Points beside an export's own: only files of the same model, measured on the same text."""

from __future__ import annotations

import json

import pytest

from tieq.artifact import read_json
from tieq.errors import TieqError
from tieq.report.page import report_html
from tieq.report.points import beside_points, own_points, peer_points
from tieq.revalidate import validate_path


def peers(manifest: dict, **changes) -> dict:
    """A document of the form of ``peers.json`` with one file that was measured like the export."""
    estimate = {"value": 0.1, "standard_error": 0.01}
    point = {"tool": "other tool", "version": "1", "scheme": "X4", "made": "", "format": "gguf", "bytes": 1000,
             "table_bytes": 10, "table_copies": 1, "runtime": "llama.cpp", "mode": "", "kl": estimate, "top1": estimate,
             "command": "tieq validate x.gguf"}  # fmt: skip
    second = {**point, "mode": "a further mode of the same file"}
    group = {"source": manifest["source"], "evaluation": manifest["evaluation"], "points": [point, second], **changes}
    return {"format": 1, "groups": [group]}


def test_a_container_is_one_point_in_its_first_runtime(tiny_export):
    checks = tiny_export().checks
    points = own_points(checks)
    assert [point.container for point in points] == ["onnx", "gguf"]
    assert points[0].kl == checks["runtimes"][0]["scores"]["kl"]
    assert points[1].runtime == "llama.cpp"


def test_peers_are_drawn_on_equal_text_and_weights_only(tiny_export):
    manifest = tiny_export().manifest
    (point,) = peer_points(manifest, peers(manifest))
    assert (point.name, point.size, point.kind) == ("other tool X4", 1000, "peer")
    assert peer_points(manifest, peers(manifest, source={"fingerprint": "another"})) == []
    for key, value in (("sha256", "another"), ("sequences", 3), ("length", 65)):
        changed = {**manifest["evaluation"], key: value}
        assert peer_points(manifest, peers(manifest, evaluation=changed)) == []
    unknown = {**manifest, "evaluation": {"description": "random token ids", "sha256": None}}
    assert peer_points(unknown, peers(unknown)) == []


def test_the_peers_that_ship_are_whole(tiny_export):
    from importlib import resources

    shipped = json.loads(resources.files("tieq.report").joinpath("peers.json").read_text(encoding="utf-8"))
    assert shipped["groups"]
    for group in shipped["groups"]:
        found = peer_points({"source": group["source"], "evaluation": group["evaluation"]})
        assert {point.name for point in found} >= {"llama.cpp Q4_0", "llama.cpp Q4_K_M", "llama.cpp Q8_0"}
        for point in found:
            assert point.size > 0
            assert point.kl["value"] > 0
            assert point.kl["standard_error"] > 0
            assert point.command.startswith("tieq validate ")
            assert "/" not in point.command.replace("builder/", "")  # no path of the machine that measured


def test_another_exports_manifest_and_a_validation_come_beside(tiny_export, tiny_checkpoint, documents, tmp_path):
    found, other = documents(), tiny_export(bits=8)
    points = beside_points(found.manifest, found.checks, [other.folder / "manifest.json"])
    assert [(point.container, point.kind) for point in points] == [("onnx", "beside"), ("gguf", "beside")]
    kl = other.manifest["measured"]["llama.cpp"]["kl"]
    assert points[1].kl == kl
    document = validate_path(
        other.folder / "gguf" / "model.gguf",
        reference=str(tiny_checkpoint()),
        sampling=tiny_sampling(),
    )
    (tmp_path / "someone.json").write_text(json.dumps(document))
    (point,) = beside_points(found.manifest, found.checks, [tmp_path / "someone.json"])
    assert point.name == "someone, GGUF"
    assert point.kl["value"] == pytest.approx(kl["value"], rel=1e-3)
    page = report_html(type(found)(found.manifest, found.checks, found.graph, beside=(point,)))
    assert "someone, GGUF" in page
    assert "put beside" in page


def tiny_sampling():
    from tieq.recipe import Sampling

    return Sampling(sequences=2, length=64)


def test_documents_that_cannot_be_compared_are_refused(tiny_export, documents, tmp_path):
    found = documents()
    path = tmp_path / "beside.json"
    manifest = read_json(tiny_export().folder / "manifest.json")
    checks = {**read_json(tiny_export().folder / "checks.json"), "evaluation": manifest["evaluation"]}

    def refused(document: object) -> str:
        path.write_text(json.dumps(document))
        with pytest.raises(TieqError) as caught:
            beside_points(found.manifest, found.checks, [path])
        assert str(path) in str(caught.value)
        assert caught.value.exit_code == 2
        return str(caught.value)

    assert "neither" in refused({})
    assert "other text" in refused({**manifest, "evaluation": {**manifest["evaluation"], "length": 65}})
    assert "other weights" in refused({**manifest, "source": {**manifest["source"], "fingerprint": "another"}})
    assert "holds no KL" in refused({**manifest, "measured": {}})
    assert "lacks what a point needs" in refused({**manifest, "containers": {"gguf": {}}})
    for item in checks["runtimes"]:
        item["scores"]["reference_perplexity"] *= 1.1
    assert "another model" in refused(checks)
    for item in checks["runtimes"]:
        item["scores"] = None
    assert "holds no KL" in refused(checks)
