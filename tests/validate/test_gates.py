"""Bounds against intervals: noise neither passes nor fails; more text is run where it might."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tieq.metrics import Estimate
from tieq.recipe import Gates
from tieq.validate.gates import measurement_checks


def checks(
    gates: Gates,
    *,
    kl=(0.1, 0.01),
    top1=(0.8, 0.02),
    ratio=(1.1, 0.01),
    to_first=None,
    bound_to_first=None,
    tokens=None,
):
    scores = SimpleNamespace(kl=Estimate(*kl), top1=Estimate(*top1), perplexity_ratio=Estimate(*ratio))
    measured = SimpleNamespace(
        scores=scores,
        subject="a runtime",
        first="another",
        kl_to_first=None if to_first is None else Estimate(*to_first),
        bound_to_first=bound_to_first,
        tokens=tokens,
    )
    return measurement_checks(measured, gates)


@pytest.mark.parametrize(
    ("gates", "passed", "undecided"),
    [
        ({"max_kl": 0.121}, True, False),
        ({"max_kl": 0.119}, False, True),
        ({"max_kl": 0.081}, False, True),
        ({"max_kl": 0.079}, False, False),
        ({"max_kl": 0.119, "undecided": "pass"}, True, True),
        ({"max_kl": 0.119, "undecided": "value"}, True, True),
        ({"max_kl": 0.081, "undecided": "value"}, False, True),
        ({"min_top1": 0.75}, True, False),
        ({"min_top1": 0.77}, False, True),
        ({"min_top1": 0.85}, False, False),
        ({"max_perplexity_ratio": 1.13}, True, False),
        ({"max_perplexity_ratio": 1.09}, False, True),
    ],
)
def test_a_bound_is_judged_by_the_interval(gates, passed, undecided):
    (check,) = checks(Gates(max_runtime_kl=None, **gates))
    assert (check.passed, check.undecided) == (passed, undecided)
    assert ("cannot be told from" in check.detail) == undecided


def test_a_single_sequence_has_no_interval_and_the_value_decides():
    (check,) = checks(Gates(max_kl=0.1001, max_runtime_kl=None), kl=(0.1, None))
    assert (check.passed, check.undecided) == (True, False)


def test_a_runtime_that_computes_in_float_has_a_bound_of_its_own():
    (check,) = checks(Gates(), to_first=(0.001, 0.0001))
    assert check.passed
    (check,) = checks(Gates(), to_first=(0.001, 0.0001), bound_to_first=1e-4)
    assert not check.passed


def test_an_undecided_bound_runs_more_text_until_it_is_decided(tiny_export):
    from tieq.revalidate import validate_path

    made = tiny_export()
    first = next(item for item in made.checks["runtimes"] if item["runtime"] == "llama.cpp")
    kl = first["scores"]["kl"]
    assert kl["standard_error"] > 0
    # Just outside the value: within the interval of the first text, whatever later text gives.
    bound = kl["value"] + kl["standard_error"]
    found = validate_path(made.folder, runtimes=["llama.cpp"], gates=Gates(max_kl=bound))
    before, after = made.manifest["evaluation"]["sequences"], found["evaluation"]["sequences"]
    assert after in (2 * before, 4 * before)
    (check,) = [check for check in found["checks"] if check["name"] == "KL"]
    scores = found["runtimes"][0]["scores"]["kl"]
    assert check["undecided"] == (abs(scores["value"] - bound) <= 2 * scores["standard_error"])
    assert scores["standard_error"] < kl["standard_error"]


def test_the_head_of_a_text_is_judged_by_the_first_runtime_alone():
    gates = Gates(max_kl=0.05)
    assert [check.name for check in checks(gates, to_first=(0.001, 0.0001), tokens=64)] == ["KL to another"]
    assert [check.name for check in checks(gates, tokens=64)] == ["KL"]
