from __future__ import annotations

import json

import pytest

from tieq.codecs import ggml
from tieq.codecs.schemes import SCHEMES
from tieq.errors import RefusedError
from tieq.plan import Plan, make_plan
from tieq.recipe import BandWish, Precision, Recipe, recipe_for_bits
from tieq.records import Decision, Matrix, Role, RoleUse, TieGraph, Verdict
from tieq.source.reference import Inventory

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
GGUF, BOTH = ("gguf",), ("onnx", "gguf")


def graph(*, tied: bool, columns: int = 256) -> TieGraph:
    return TieGraph(
        verdict=Verdict.SHARED if tied else Verdict.DIFFERENT,
        lookup=RoleUse(Role.LOOKUP, TABLE),
        logits=RoleUse(Role.LOGITS, None if tied else HEAD),
        rows=320,
        columns=columns,
        flag=tied,
        flag_default=False,
        tied=tied,
    )


def inventory(*body: Matrix, columns: int = 256) -> Inventory:
    shapes = {TABLE: (320, columns), HEAD: (320, columns)}
    return Inventory(shapes, TABLE, HEAD, tuple(body), True, 0)


def plan(recipe: Recipe, *, tied: bool = True, columns: int = 256, formats: tuple[str, ...] = GGUF) -> Plan:
    body = Matrix("layers.0.up", 64, columns)
    return make_plan(inventory(body, columns=columns), graph(tied=tied, columns=columns), recipe, formats, TABLE)


def test_a_tied_model_has_one_table_and_an_untied_one_two() -> None:
    recipe = Recipe(table=Precision(scheme="q8_0"), logits=Precision(scheme="q4_0"))
    tied, untied = plan(recipe), plan(recipe, tied=False)
    assert [(d.name, d.role, d.scheme) for d in tied.tables] == [(TABLE, "table", "q8_0")]
    assert [(d.name, d.role, d.scheme) for d in untied.tables] == [(TABLE, "lookup", "q8_0"), (HEAD, "logits", "q4_0")]
    assert [d.role for d in tied.decisions] == ["table", "body"]
    assert [d.role for d in untied.decisions] == ["lookup", "logits", "body"]


def test_a_tied_table_never_takes_the_precision_of_a_single_role() -> None:
    recipe = Recipe(table=Precision(scheme="q8_0"), lookup=Precision(scheme="q2_0"), logits=Precision(scheme="q2_0"))
    assert [d.scheme for d in plan(recipe).tables] == ["q8_0"]


def test_a_table_stored_under_the_heads_name_is_planned_under_its_own() -> None:
    made = make_plan(inventory(), graph(tied=True), Recipe(), GGUF, HEAD)
    assert [(d.name, d.stored) for d in made.tables] == [(TABLE, HEAD)]


# What is chosen where the block does not divide the columns, with the bits that are really stored: bits of the codes
# plus scales (and minima) over the block.
@pytest.mark.parametrize(
    ("scheme", "columns", "chosen", "bits"),
    [
        ("q4_0", 64, "q4_0", 4.5),
        ("q4_0", 72, "f16", 16.0),
        ("q4_0", 96, "q4_0", 4.5),
        ("q4_0", 576, "q4_0", 4.5),
        ("q8_0", 72, "f16", 16.0),
        ("q8_0", 96, "q8_0", 8.5),
        ("q2_0", 72, "f16", 16.0),
        ("q2_0", 96, "q4_0", 4.5),
        ("q2_0", 576, "q2_0", 2.25),
        ("q3_k", 72, "f16", 16.0),
        ("q3_k", 96, "q4_0", 4.5),
        ("q3_k", 576, "q4_0", 4.5),
        ("q3_k", 512, "q3_k", 3.4375),
        ("q4_k", 576, "q5_0", 5.5),
        ("q5_k", 576, "q5_1", 6.0),
        ("q6_k", 72, "f16", 16.0),
        ("q6_k", 96, "q8_0", 8.5),
        ("q6_k", 576, "q8_0", 8.5),
        ("q6_k", 768, "q6_k", 6.5625),
        ("iq2_xxs", 576, "iq4_nl", 4.5),
        ("iq2_xxs", 72, "f16", 16.0),
        ("q1_0", 576, "q4_0", 4.5),
        ("q1_0", 640, "q1_0", 1.125),
        ("q5_0", 72, "f16", 16.0),
        ("mxfp4", 72, "f16", 16.0),
        ("f16", 72, "f16", 16.0),
        ("bf16", 71, "bf16", 16.0),
    ],
)
def test_a_block_that_does_not_divide_the_columns_falls_back(
    scheme: str, columns: int, chosen: str, bits: float
) -> None:
    precision = Precision(scheme=scheme)
    made = plan(Recipe(table=precision, body=precision), columns=columns)
    for decision in made.decisions:
        assert (decision.scheme, decision.bits_per_weight) == (chosen, bits)
        assert decision.bits_per_weight == ggml.bits_per_weight(decision.scheme)
        assert columns % ggml.block_size(decision.scheme) == 0
        if chosen == scheme:
            assert decision.reason == "recipe"
        else:
            assert decision.reason == (
                f"fallback from {scheme}: {columns} columns are not divisible by {ggml.block_size(scheme)}"
            )


def test_each_matrix_falls_back_by_its_own_columns() -> None:
    parts = inventory(Matrix("a", 8, 576), Matrix("b", 576, 1536), Matrix("c", 8, 72))
    made = make_plan(parts, graph(tied=True), recipe_for_bits(6), GGUF, TABLE)
    assert [d.scheme for d in made.decisions] == ["q6_k", "q8_0", "q6_k", "f16"]


@pytest.mark.parametrize(("columns", "scheme"), [(256, "int4_g128"), (576, "int4_g64"), (96, "q4_0"), (72, "f16")])
def test_groups_that_do_not_divide_the_columns_become_smaller_ones(columns: int, scheme: str) -> None:
    made = make_plan(
        inventory(Matrix("a", 8, columns)), graph(tied=True), Recipe(body=Precision(scheme="int4_g128")), BOTH, TABLE
    )
    assert made["a"].scheme == scheme
    assert made["a"].reason.startswith("recipe" if columns == 256 else "fallback from int4_g128")


@pytest.mark.parametrize("scheme", ["q3_k", "q4_k", "q6_k", "q4_1", "q5_0", "q5_1", "iq4_xs", "mxfp4", "bf16", "q1_0"])
@pytest.mark.parametrize("formats", [("onnx",), BOTH, ("ort",)])
def test_a_scheme_that_only_gguf_holds_is_refused_for_onnx(scheme: str, formats: tuple[str, ...]) -> None:
    held = "q4_0, q8_0, q2_0, int4_g64, int4_g128, f16"
    match = rf"ONNX operators cannot hold {scheme}\. Use one of {held} .*`--format gguf` only"
    with pytest.raises(RefusedError, match=f"^{TABLE}: {match}"):
        plan(Recipe(table=Precision(scheme=scheme)), formats=formats)
    with pytest.raises(RefusedError, match=r"^layers\.0\.up: " + match):
        plan(Recipe(body=Precision(scheme=scheme)), formats=formats)


@pytest.mark.parametrize("scheme", ["q2_0", "q4_0", "q8_0", "int4_g64", "int4_g128", "f16"])
def test_schemes_that_both_containers_hold_are_planned_for_both(scheme: str) -> None:
    made = plan(Recipe(table=Precision(scheme=scheme), body=Precision(scheme=scheme)), formats=BOTH)
    assert {d.scheme for d in made.decisions} == {scheme}
    assert made.formats == BOTH


def test_a_fallback_that_onnx_cannot_hold_is_refused_too() -> None:
    with pytest.raises(RefusedError, match="cannot hold q5_0"):
        plan(Recipe(table=Precision(scheme="q4_k")), columns=576, formats=BOTH)


@pytest.mark.parametrize(
    ("scheme", "solver"),
    [("q4_0", "nearest"), ("q2_0", "nearest"), ("q4_k", "ggml"), ("f16", "cast"), ("bf16", "ggml")],
)
def test_the_solver_of_a_recipe_is_for_the_integer_schemes(scheme: str, solver: str) -> None:
    made = plan(Recipe(table=Precision(scheme=scheme, solver="nearest")))
    assert made[TABLE].solver == solver


@pytest.mark.parametrize(
    ("scheme", "solver"),
    [
        ("q4_0", "hessian"), ("q5_0", "hessian"), ("q4_1", "hessian"), ("q3_k", "hessian"), ("q6_k", "hessian"),
        ("iq4_nl", "hessian"), ("iq3_s", "ggml"), ("mxfp4", "ggml"), ("f16", "cast"),
    ],
)  # fmt: skip
def test_best_effort_solves_every_scheme_whose_codes_can_be_exchanged(scheme: str, solver: str) -> None:
    precision = Precision(scheme=scheme)
    made = plan(Recipe(table=precision, body=precision, effort="best"))
    assert {decision.solver for decision in made.decisions} == {solver}
    expected = {"hessian": "scale-search" if scheme in SCHEMES else "ggml"}.get(solver, solver)
    for effort in ("quick", "standard"):
        made = plan(Recipe(table=precision, body=precision, effort=effort))
        assert {decision.solver for decision in made.decisions} == {expected}


@pytest.mark.parametrize("role", ["lookup", "logits"])
def test_a_shared_table_does_not_follow_a_recipe_for_two(role: str) -> None:
    own = {role: Precision(scheme="q8_0")}
    with pytest.raises(RefusedError, match="one table plays both roles here"):
        plan(Recipe(**own))
    assert plan(Recipe(table=Precision(scheme="q4_0"), **own))[TABLE].scheme == "q4_0"


@pytest.mark.parametrize("role", ["table", "body"])
def test_a_scheme_that_needs_importance_is_refused_where_none_will_be_measured(role: str) -> None:
    parts, recipe = inventory(Matrix("up", 64, 256)), Recipe(**{role: Precision(scheme="iq2_xxs")})
    assert make_plan(parts, graph(tied=True), recipe, GGUF, TABLE, calibrated=True).recipe == "custom"
    with pytest.raises(RefusedError, match=r"iq2_xxs only with importance weights, and none will be measured\. Use"):
        make_plan(parts, graph(tied=True), recipe, GGUF, TABLE, calibrated=False)


def test_a_scheme_that_needs_importance_is_refused_for_an_untied_lookup() -> None:
    # The lookup multiplies nothing, so no second moments of its inputs can be measured.
    with pytest.raises(RefusedError, match=f"^{TABLE}: .*importance"):
        plan(Recipe(lookup=Precision(scheme="iq2_xxs")), tied=False)
    assert plan(Recipe(logits=Precision(scheme="iq2_xxs")), tied=False)[HEAD].scheme == "iq2_xxs"


def test_schemes_that_need_no_importance_are_planned_without_calibration() -> None:
    parts = inventory(Matrix("up", 64, 256))
    for scheme in ("q4_0", "q2_0", "q4_k", "iq4_nl", "f16"):
        recipe = Recipe(table=Precision(scheme=scheme), body=Precision(scheme=scheme))
        made = make_plan(parts, graph(tied=True), recipe, GGUF, TABLE, calibrated=False)
        assert {decision.scheme for decision in made.decisions} == {scheme}


def test_a_fallback_from_a_scheme_that_needs_importance_needs_none() -> None:
    parts, recipe = inventory(columns=576), Recipe(table=Precision(scheme="iq2_xxs"))
    made = make_plan(parts, graph(tied=True, columns=576), recipe, GGUF, TABLE, calibrated=False)
    assert made[TABLE].scheme == "iq4_nl"


def test_transposed_matrices_keep_their_mark() -> None:
    parts = inventory(Matrix("conv", 192, 64, transposed=True), Matrix("linear", 64, 64))
    made = make_plan(parts, graph(tied=True), Recipe(), GGUF, TABLE)
    assert (made["conv"].transposed, made["linear"].transposed) == (True, False)
    assert (made["conv"].rows, made["conv"].columns) == (192, 64)


def test_packed_bytes_are_rows_times_columns_times_bits() -> None:
    # Table 320 x 256 at 4.5 bits = 46,080 bytes, body 64 x 256 at 8.5 bits = 17,408.
    made = plan(Recipe(table=Precision(scheme="q4_0"), body=Precision(scheme="q8_0")))
    assert made.packed_bytes() == 46_080 + 17_408


def test_a_plan_becomes_plain_json() -> None:
    made = json.loads(json.dumps(plan(Recipe(name="mine"), tied=False).to_json()))
    assert made["recipe"] == "mine"
    assert [d["role"] for d in made["decisions"]] == ["lookup", "logits", "body"]
    assert made["packed_bytes"] == plan(Recipe(), tied=False).packed_bytes()
    assert Decision(**made["decisions"][0]) == plan(Recipe(name="mine"), tied=False).decisions[0]


# Row bands


BANDED = Precision(scheme="q4_0", bands=(BandWish(share=0.1), BandWish(share=0.2, scheme="q2_0")))


def test_bands_are_planned_for_a_shared_table_with_their_bytes() -> None:
    made = plan(Recipe(table=BANDED), formats=BOTH)
    bands = made[TABLE].bands
    assert [(band.scheme, band.rows) for band in bands] == [("q4_0", 32), ("q2_0", 64)]
    assert made.packed_bytes() == plan(Recipe(), formats=BOTH).packed_bytes() + sum(band.nbytes for band in bands)
    table, body = json.loads(json.dumps(made.to_json()))["decisions"]
    assert [band["rows"] for band in table["bands"]] == [32, 64]
    assert table["bits_per_weight"] == 4.5 < table["total_bits_per_weight"] < table["onnx_bits_per_weight"]
    assert "bands" not in body


@pytest.mark.parametrize("role", ["lookup", "logits"])
def test_bands_are_refused_where_each_role_has_its_own_table(role: str) -> None:
    with pytest.raises(RefusedError, match="row bands refine a shared table, and this model has a table for each role"):
        plan(Recipe(**{role: BANDED}), tied=False)


def test_a_recipe_for_any_model_gives_bands_to_a_shared_table_alone() -> None:
    untied = plan(Recipe(table=BANDED), tied=False)
    assert [(d.scheme, d.bands) for d in untied.tables] == [(BANDED.scheme, ())] * 2
    assert len(plan(Recipe(table=BANDED))[TABLE].bands) == 2


def test_bands_are_refused_where_nothing_is_measured() -> None:
    with pytest.raises(RefusedError, match=f"^{TABLE}: row bands take the rows that calibration finds most costly"):
        plan(Recipe(table=BANDED, effort="quick"))
    with pytest.raises(RefusedError, match="nothing will be measured"):
        make_plan(inventory(), graph(tied=True), Recipe(table=BANDED), GGUF, TABLE, calibrated=False)
    assert len(plan(Recipe(table=BANDED, effort="best"))[TABLE].bands) == 2


def test_a_table_that_falls_back_to_a_cast_takes_no_bands() -> None:
    with pytest.raises(RefusedError, match="not in f16"):
        plan(Recipe(table=BANDED), columns=72)
