"""Regressions against an earlier manifest: worse by more than noise fails, and says which number moved."""

from __future__ import annotations

import copy
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from tieq.errors import TieqError
from tieq.report.outputs import job_summary, junit_xml
from tieq.validate.baseline import _KERNELS, refuse_baseline, regression_checks


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


SCORES = (("kl", 1), ("top1", -1), ("perplexity_ratio", 1))
NAMES = ["KL, baseline", "top-1, baseline", "perplexity ratio, baseline"]


def allowance(key: str, entry: dict[str, Any]) -> float:
    return _KERNELS[key] * (entry["kl"]["value"] if key == "kl" else 1.0)


@pytest.mark.parametrize(("share", "worse"), [(0.95, False), (1.05, True)])
def test_without_scores_by_sequence_two_standard_errors_are_noise(known, share, worse):
    checks, manifest = known
    subject = "llama.cpp"
    entry = manifest["measured"][subject]
    del entry["by_sequence"]
    for key, up in SCORES:
        entry[key]["standard_error"] = 0.01
        item = next(item for item in checks["runtimes"] if item["runtime"] == subject)
        shift = share * (0.02 + allowance(key, entry))
        item["scores"][key] = {"value": entry[key]["value"] + up * shift, "standard_error": 0.0}
    assert failed(checks, manifest) == ([(name, subject) for name in NAMES] if worse else [])


@pytest.mark.parametrize(("share", "worse"), [(0.95, False), (1.05, True)])
def test_sequence_by_sequence_the_text_cancels(known, share, worse):
    """A shift of all sequences alike has no noise, however far the sequences lie apart."""
    checks, manifest = known
    subject = "llama.cpp"
    entry = manifest["measured"][subject]
    item = next(item for item in checks["runtimes"] if item["runtime"] == subject)
    for key, up in SCORES:
        shift = up * share * allowance(key, entry)
        item["scores"]["by_sequence"][key] = [value + shift for value in entry["by_sequence"][key]]
    assert entry["kl"]["standard_error"] > allowance("kl", entry)
    assert failed(checks, manifest) == ([(name, subject) for name in NAMES] if worse else [])


@pytest.mark.parametrize(("rate", "worse"), [(95.0, False), (91.0, True), (87.0, True)])
def test_a_decode_rate_has_to_be_above_its_share_by_more_than_noise(known, rate, worse):
    checks, manifest = known
    subject = "llama.cpp"
    manifest["measured"][subject]["decode_rate"] = {"value": 100.0, "standard_error": 1.0}
    item = next(item for item in checks["runtimes"] if item["runtime"] == subject)
    item["decode_rate"] = {"value": rate, "standard_error": 0.5}
    manifest["machine"] = checks["machine"] = "a machine"
    found = regression_checks(checks, manifest["evaluation"], manifest, 0.9)
    assert [c.name for c in found if not c.passed] == (["decode rate, baseline"] if worse else [])


def test_decode_rates_of_two_machines_are_not_compared(known):
    checks, manifest = known
    with pytest.raises(TieqError, match="holds no decode rate"):
        regression_checks(checks, manifest["evaluation"], manifest, 0.9)
    manifest["measured"]["llama.cpp"]["decode_rate"] = {"value": 100.0, "standard_error": 1.0}
    manifest["machine"], checks["machine"] = "one", "two"
    with pytest.raises(TieqError, match="another machine"):
        regression_checks(checks, manifest["evaluation"], manifest, 0.9)


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
