from __future__ import annotations

import random
import typing
from pathlib import Path

import pytest
from pydantic import ValidationError

from tieq.codecs import ggml
from tieq.codecs.schemes import SCHEMES
from tieq.errors import TieqError
from tieq.recipe import (
    BITS,
    BandWish,
    Gates,
    Precision,
    Recipe,
    Sampling,
    SchemeName,
    dump_recipe,
    load_recipe,
    recipe_for_bits,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "recipe.yaml"


def refusal(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TieqError) as caught:
        load_recipe(path)
    assert str(caught.value).startswith(str(path))
    return str(caught.value)


def test_a_recipe_says_what_its_keys_mean(path: Path) -> None:
    path.write_text(
        "name: mixed\ntable: {scheme: q8_0}\nbody: {scheme: q4_0, solver: nearest}\n"
        "gates: {max_kl: 0.1, min_top1: 0.9}\nevaluation: {sequences: 4, length: 64}\n"
    )
    recipe = load_recipe(path)
    assert recipe.precision("table") == Precision(scheme="q8_0", solver=None)
    assert recipe.precision("body") == Precision(scheme="q4_0", solver="nearest")
    assert (recipe.gates.max_kl, recipe.gates.min_top1, recipe.gates.max_perplexity_ratio) == (0.1, 0.9, None)
    assert recipe.evaluation == Sampling(sequences=4, length=64)
    assert recipe.calibration == Recipe().calibration


def test_lookup_and_logits_follow_the_table_unless_they_say_otherwise() -> None:
    recipe = Recipe(table=Precision(scheme="q8_0"), logits=Precision(scheme="q4_0"))
    assert recipe.precision("lookup").scheme == "q8_0"
    assert recipe.precision("logits").scheme == "q4_0"
    assert recipe.precision("table").scheme == "q8_0"


def test_every_problem_is_reported_at_once(path: Path) -> None:
    message = refusal(
        path,
        "nmae: x\ntable: {scheme: q9_0, solvr: nearest}\nevaluation: {sequences: 1, length: 9000}\n"
        "gates: {max_kl: -1, min_top1: 2}\neffort: extreme\nonnx: {accuracy_level: 7}\n",
    )
    for key in (
        "nmae", "table.scheme", "table.solvr", "evaluation.sequences", "evaluation.length", "gates.max_kl",
        "gates.min_top1", "effort", "onnx.accuracy_level",
    ):  # fmt: skip
        assert f" {key}: " in message, key
    assert message.count(";") == 8
    assert message.endswith("Correct these keys.")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("calibraton: {sequences: 8}", "calibraton: is no key (did you mean calibration?)"),
        ("gates: {min_top: 0.5}", "gates.min_top: is no key (did you mean min_top1?)"),
        ("lookup: {schema: q4_0}", "lookup.schema: is no key (did you mean scheme?)"),
        ("table: {bands: [{share: 0.1, shceme: q4_0}]}", "table.bands.0.shceme: is no key (did you mean scheme?)"),
        ("evaluation: {zzz: 1}", "evaluation.zzz: is no key (sequences, length)"),
    ],
)
def test_an_unknown_key_is_told_which_one_it_is_near_to(content: str, said: str, path: Path) -> None:
    assert said in refusal(path, content)


@pytest.mark.parametrize("content", ["- a\n- b\n", "just text", "3", "", "# only a comment\n", "null", "[]", "---\n"])
def test_yaml_that_is_no_mapping_is_refused(content: str, path: Path) -> None:
    assert "is no mapping of recipe keys" in refusal(path, content)


@pytest.mark.parametrize(
    "content",
    [
        "a: [", "a: b: c", "\tname: x", "name: 'x", "name: x\nname: y", "name: !!python/object:os.system x",
        "name: !unknown x", "name: *missing", b"name: \xff", b"\x00\x01", "name: a\n---\nname: b", "%YAML 9.9\n---\nx",
    ],
)  # fmt: skip
def test_what_is_no_yaml_is_refused(content: str | bytes, path: Path) -> None:
    message = refusal(path, content)
    assert "cannot be read as YAML" in message or "is no mapping" in message


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.yaml", tmp_path):
        with pytest.raises(TieqError, match="cannot be read as YAML"):
            load_recipe(path)


@pytest.mark.parametrize(
    "content",
    ["name: 2024-13-45", "name: " + "[" * 500, "calibration: {sequences: " + "9" * 5000 + "}"],
    ids=["impossible date", "deep nesting", "huge number"],
)
def test_yaml_that_breaks_its_parser_is_refused(content: str, path: Path) -> None:
    refusal(path, content)


@pytest.mark.parametrize(
    "content",
    ["name: 3", "table: q4_0", "table:", "gates: 0.1", "calibration: {length: 8.5}", "gates: {max_kl: .nan}",
     "gates: {max_kl: small}", "1: 2", "table: {scheme: [q4_0]}", "name: &a [*a]"],
)  # fmt: skip
def test_values_of_another_type_are_refused(content: str, path: Path) -> None:
    assert "Correct these keys" in refusal(path, content)


@pytest.mark.parametrize(
    "content", ['calibration: {length: "8"}', "gates: {max_kl: true}", "calibration: {length: 8.0}"]
)
def test_values_that_only_look_like_numbers_are_refused(content: str, path: Path) -> None:
    refusal(path, content)


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (Sampling, {"sequences": 2, "length": 8}),
        (Sampling, {"sequences": 4096, "length": 8192}),
        (Gates, {"min_top1": 0.0}),
        (Gates, {"min_top1": 1.0, "max_kl": 1e-300}),
    ],
)
def test_the_ends_of_every_range_are_allowed(model: type, values: dict[str, float]) -> None:
    assert model(**values).model_dump().items() >= values.items()


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (Sampling, {"sequences": 1}),
        (Sampling, {"sequences": 4097}),
        (Sampling, {"length": 7}),
        (Sampling, {"length": 8193}),
        (Gates, {"max_kl": 0}),
        (Gates, {"min_top1": -1e-9}),
        (Gates, {"min_top1": 1.0000001}),
        (Gates, {"max_perplexity_ratio": 0}),
        (Gates, {"max_runtime_kl": 0}),
    ],
)
def test_values_just_beyond_a_range_are_refused(model: type, values: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        model(**values)


def test_recipes_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Recipe().name = "other"


HOSTILE = [
    "yes", "null", "~", "1e3", "2024-01-01", "2024-13-45", "0x10", ".inf", "a: b", "# c", "' \" \\", "tab\t", "-",
    "- x", "\n several\nlines ", "é😀", "\x07", "\x00", "\u2028", "{a}", "!tag", "&a", "*a", "|", ">", " around ", "",
    "%", "@", "<<",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_dumping_and_loading_keeps_any_text(text: str, path: Path) -> None:
    recipe = Recipe(name=text, description=text * 3)
    path.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(path) == recipe


@pytest.mark.parametrize("seed", range(20))
def test_dumping_and_loading_is_the_identity(seed: int, path: Path) -> None:
    choose = random.Random(seed)

    def precision() -> Precision:
        return Precision(
            scheme=choose.choice(typing.get_args(SchemeName)), solver=choose.choice(["nearest", "scale-search"])
        )

    recipe = Recipe(
        name=f"r{seed}",
        effort=choose.choice(["quick", "standard"]),
        table=precision(),
        lookup=choose.choice([None, precision()]),
        logits=choose.choice([None, precision()]),
        body=precision(),
        calibration=Sampling(sequences=choose.randrange(2, 4097), length=choose.randrange(8, 8193)),
        gates=Gates(
            max_kl=choose.choice([None, choose.random(), 1e-300]), min_top1=choose.choice([None, choose.random()])
        ),
    )
    path.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(path) == recipe
    # A second dump has the same bytes.
    assert dump_recipe(load_recipe(path)) == path.read_text(encoding="utf-8")


def test_a_dump_spells_out_every_key() -> None:
    text = dump_recipe(Recipe())
    for key in Recipe.model_fields:
        assert f"{key}:" in text


@pytest.mark.parametrize(
    ("bits", "scheme"), [(2, "q2_0"), (3, "q3_k"), (4, "q4_0"), (5, "q5_0"), (6, "q6_k"), (8, "q8_0")]
)
def test_bits_name_one_scheme_for_table_and_body(bits: int, scheme: str) -> None:
    recipe = recipe_for_bits(bits)
    assert (recipe.table.scheme, recipe.body.scheme, recipe.lookup, recipe.logits) == (scheme, scheme, None, None)
    assert recipe.name == f"{bits}-bit"
    # The name's bits are those of the codes: what is stored has the scales on top, under one bit more.
    assert bits <= ggml.bits_per_weight(scheme) < bits + 1


def test_there_is_no_other_number_of_bits() -> None:
    assert set(BITS) == {2, 3, 4, 5, 6, 8}
    for bits in (0, 1, 7, 16, -4):
        with pytest.raises(TieqError, match=rf"--bits {bits} has no scheme\. Use one of 2, 3, 4, 5, 6, 8"):
            recipe_for_bits(bits)


def test_every_scheme_of_a_recipe_is_a_type_that_ggml_has_or_a_geometry_of_ours() -> None:
    names = typing.get_args(SchemeName)
    assert len(names) == len(set(names))
    assert set(names) == (set(ggml.GGML_TYPES) - {"f32"}) | set(SCHEMES)


# Row bands


def test_bands_are_read_in_their_order_and_dumped(path: Path) -> None:
    path.write_text("table: {scheme: q4_0, bands: [{share: 0.02, scheme: q4_0}, {share: 0.06, scheme: q2_0}]}\n")
    recipe = load_recipe(path)
    assert recipe.table.bands == (BandWish(share=0.02, scheme="q4_0"), BandWish(share=0.06, scheme="q2_0"))
    path.write_text(dump_recipe(recipe))
    assert load_recipe(path) == recipe


@pytest.mark.parametrize(
    ("band", "key"),
    [
        ("{share: 0}", "table.bands.0.share"),
        ("{share: -0.1}", "table.bands.0.share"),
        ("{share: 1.5}", "table.bands.0.share"),
        ("{share: .nan}", "table.bands.0.share"),
        ("{share: '0.1'}", "table.bands.0.share"),
        ("{scheme: q4_0}", "table.bands.0.share"),
        ("{share: 0.1, scheme: q4_k}", "table.bands.0.scheme"),
        ("{share: 0.1, rows: 5}", "table.bands.0.rows"),
        ("0.1", "table.bands.0"),
        ("{share: 0.6}, {share: 0.5}", "table.bands: the shares add up to more than 1"),
    ],
)
def test_a_band_out_of_range_is_refused_by_its_key(band: str, key: str, path: Path) -> None:
    assert key in refusal(path, f"table: {{bands: [{band}]}}\n")


def test_decimal_shares_that_add_up_to_one_are_all_rows() -> None:
    shares = [BandWish(share=share) for share in (0.7, 0.2, 0.1, *[1e-17] * 3)]
    assert len(Precision(bands=shares).bands) == 6


def test_the_body_takes_no_bands(path: Path) -> None:
    message = refusal(path, "body: {bands: [{share: 0.1}]}\n")
    assert "body: row bands are for vocabulary tables, not for the body" in message
