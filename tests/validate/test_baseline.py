"""Regressions against an earlier manifest: worse by more than noise fails, and says which number moved."""

from __future__ import annotations

import copy
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from tieq.errors import TieqError
from tieq.report.outputs import job_summary, junit_xml
from tieq.validate.baseline import refuse_baseline, regression_checks


@pytest.fixture
def known(tiny_export) -> tuple[dict[str, Any], dict[str, Any]]:
    """Checks and manifest of one export."""
    result = tiny_export("llama")
    return copy.deepcopy(result.checks), copy.deepcopy(result.manifest)


def failed(checks: dict[str, Any], manifest: dict[str, Any]) -> list[tuple[str, str]]:
    found = regression_checks(checks, manifest["evaluation"], manifest)
    return [(check.name, check.subject) for check in found if not check.passed]


def test_an_export_is_no_regression_of_itself(known):
    checks, manifest = known
    assert manifest["measured"].keys() >= {"onnxruntime, accuracy level 0", "llama.cpp"}
    assert failed(checks, manifest) == []


@pytest.mark.parametrize(("times", "worse"), [(1.9, False), (2.1, True)])
def test_a_score_fails_beyond_two_standard_errors(known, times, worse):
    checks, manifest = known
    subject = "llama.cpp"
    entry = manifest["measured"][subject]
    for key, up in (("kl", 1), ("top1", -1), ("perplexity_ratio", 1)):
        entry[key]["standard_error"] = 0.01
        item = next(item for item in checks["runtimes"] if item["runtime"] == subject)
        item["scores"][key] = {"value": entry[key]["value"] + up * times * 0.01, "standard_error": 0.0}
    names = [("KL, baseline", subject), ("top-1, baseline", subject), ("perplexity ratio, baseline", subject)]
    assert failed(checks, manifest) == (names if worse else [])


def test_a_larger_file_and_a_second_table_fail(known):
    checks, manifest = known
    manifest["containers"]["gguf"]["bytes"] -= 1 + manifest["containers"]["gguf"]["bytes"] // 500
    next(c for c in checks["checks"] if c["name"] == "table copies" and c["subject"] == "onnx")["value"] = 2
    assert failed(checks, manifest) == [("table copies, baseline", "onnx"), ("file size, baseline", "gguf")]


def test_what_is_no_longer_there_fails(known):
    checks, manifest = known
    checks["runtimes"] = [item for item in checks["runtimes"] if item["runtime"] != "llama.cpp"]
    checks["containers"] = [item for item in checks["containers"] if item["container"] != "gguf"]
    assert failed(checks, manifest) == [("baseline", "gguf"), ("baseline", "llama.cpp")]


def test_other_text_and_an_unmeasured_baseline_are_refused(known):
    checks, manifest = known
    with pytest.raises(TieqError, match="was measured on other text"):
        regression_checks(checks, {**manifest["evaluation"], "sha256": "0"}, manifest)
    own = manifest["source"]["fingerprint"]
    refuse_baseline(manifest, own)
    with pytest.raises(TieqError, match="holds no measurement"):
        refuse_baseline({**manifest, "measured": {}}, own)
    with pytest.raises(TieqError, match="other weights"):
        refuse_baseline(manifest, "0")
    with pytest.raises(TieqError, match="no manifest"):
        refuse_baseline({"decisions": []}, own)


def test_the_outputs_name_a_failed_gate(known):
    checks, _ = known
    checks["checks"][0] |= {"passed": False, "detail": "first copy: <a> & b"}
    checks["passed"] = False
    suite = ET.fromstring(junit_xml(checks))
    assert (suite.get("failures"), suite.get("tests")) == ("1", str(len(checks["checks"])))
    failure = suite[0].find("failure")
    assert failure is not None
    assert failure.text == "first copy: <a> & b"
    summary = job_summary(checks)
    assert summary.startswith("# tieq: a gate failed")
    assert "**table copies** (onnx)" in summary
