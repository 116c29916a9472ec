from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny

from tieq.calibrate import Statistics, measure
from tieq.candidates import body_choices, bytes_of, table_choices
from tieq.codecs.schemes import SCHEMES
from tieq.plan import Plan, make_plan
from tieq.recipe import Recipe
from tieq.records import Decision, Role, RoleUse, TieGraph, Verdict
from tieq.source.reference import ReferenceModel, inventory
from tieq.text import Sequences

RECIPE = Recipe(effort="best")
IDS = np.random.default_rng(0).integers(2, tiny.ROWS, (12, 24))


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.model("llama")


@pytest.fixture(scope="module")
def statistics(model: Any) -> Statistics:
    return measure(ReferenceModel(model), Sequences(IDS, ("d",) * len(IDS), False), full=True)


def planned(model: Any, *formats: str) -> Plan:
    parts = inventory(model.config.to_dict())
    graph = TieGraph(
        Verdict.HEAD_MISSING,
        RoleUse(Role.LOOKUP, parts.lookup),
        RoleUse(Role.LOGITS, None),
        tiny.ROWS,
        64,
        True,
        True,
        True,
    )
    return make_plan(parts, graph, RECIPE, formats, parts.lookup)


def weights(model: Any, name: str) -> np.ndarray:
    return np.ascontiguousarray(model.state_dict()[name].numpy())


def test_more_bits_cost_less_in_both_roles(model: Any, statistics: Statistics) -> None:
    decision = planned(model, "gguf").tables[0]
    cost = statistics.importance(decision.name, "table", "lm_head.weight")
    made = table_choices(decision, weights(model, decision.name), statistics, cost, RECIPE, ("gguf",))
    by_label = {candidate.label: candidate for candidate in made.item.candidates}
    assert set(by_label) == {"q4_0", "q4_1", "q5_0", "q5_1", "q8_0"}  # no K-quant has blocks of 64 columns
    for role in ("lookup", "logits"):
        assert by_label["q4_0"].costs[role] > by_label["q5_0"].costs[role] > by_label["q8_0"].costs[role] > 0
    assert by_label["q4_0"].nbytes == 320 * 64 * 4.5 / 8
    assert by_label["q5_1"].nbytes == 320 * 64 * 6 / 8


def test_bands_are_offered_where_onnx_is_written_and_pay(model: Any, statistics: Statistics) -> None:
    decision = planned(model, "onnx").tables[0]
    cost = statistics.importance(decision.name, "table", "lm_head.weight")
    made = table_choices(decision, weights(model, decision.name), statistics, cost, RECIPE, ("onnx",))
    by_label = {candidate.label: candidate for candidate in made.item.candidates}
    plain, banded = by_label["q4_0"], by_label["q4_0 + 4 % q4_0"]
    assert banded.nbytes > plain.nbytes
    for role in ("lookup", "logits"):
        assert banded.costs[role] < plain.costs[role]
    assert plain.nbytes == 320 * 64 * 4.5 / 8
    assert by_label["q8_0"].nbytes > banded.nbytes
    assert made.precisions["q4_0 + 4 % q4_0"].bands[0].share == 0.04


def test_a_body_matrix_costs_less_with_more_bits(model: Any, statistics: Statistics) -> None:
    plan = planned(model, "gguf")
    for decision in plan.decisions[1:4]:
        made = body_choices(decision, weights(model, decision.name), statistics, None, RECIPE, ("gguf",))
        costs = {candidate.label: candidate.costs["body"] for candidate in made.item.candidates}
        assert costs["q4_0"] > costs["q5_0"] > costs["q8_0"] > 0


@pytest.mark.parametrize("formats", [("gguf",), ("onnx",), ("onnx", "gguf")])
def test_bytes_are_the_same_in_every_container(model: Any, formats: tuple[str, ...]) -> None:
    decision = planned(model, *formats).tables[0]
    scheme = SCHEMES[decision.scheme]
    blocks = decision.rows * decision.columns // scheme.block
    assert bytes_of(decision, formats) == blocks * (scheme.block * scheme.bits // 8 + 2)


@pytest.mark.parametrize("scheme", ["q4_0", "int4_g64", "int4_g128", "q2_0", "f16"])
def test_a_matrix_weighs_what_the_container_that_needs_most_stores(scheme: str) -> None:
    bits = SCHEMES[scheme].bits_per_weight if scheme in SCHEMES else 16.0
    made = Decision("a", "a", "body", 96, 256, scheme, "scale-search", bits, "recipe")
    assert bytes_of(made, ("onnx", "litert")) == 96 * 256 * bits / 8
    # GGUF has no groups: blocks of Q4_0, 18 bytes for 32 weights.
    expected = 96 * 256 / 32 * 18 if scheme.startswith("int4") else 96 * 256 * bits / 8
    assert bytes_of(made, ("gguf",)) == bytes_of(made, ("onnx", "gguf")) == expected
