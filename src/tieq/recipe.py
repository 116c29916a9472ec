"""Recipes: what precision is wished for, by role, and the gates that the result must hold. Reads no weights."""

from __future__ import annotations

import difflib
import json
import math
import re
from io import StringIO
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from tieq.errors import TieqError

SchemeName = Literal[
    "q2_0", "q4_0", "q8_0", "f16", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq2_xxs",
    "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_nl", "iq4_xs", "iq1_s", "iq1_m", "bf16", "tq1_0", "tq2_0", "mxfp4",
    "q1_0", "int4_g64", "int4_g128",
]  # fmt: skip
# Schemes by bits; those that only GGUF holds are refused for ONNX when the plan is made.
BITS: dict[int, SchemeName] = {2: "q2_0", 3: "q3_k", 4: "q4_0", 5: "q5_0", 6: "q6_k", 8: "q8_0"}
# Bounds on KL that only a broken export exceeds: SmolLM2-135M and Gemma-3-270M are under 0.3 at 4 bits. A recipe of
# one's own sets the bound that a product needs.
_SANE_KL: dict[int, float | None] = {2: None, 3: None, 4: 1.0, 5: 0.5, 6: 0.25, 8: 0.1}
# Residuals of row bands are in schemes that ONNX operators read.
BandScheme = Literal["q2_0", "q4_0", "q8_0"]
Effort = Literal["quick", "standard", "best"]
Solver = Literal["nearest", "scale-search", "hessian"]
# The user's words for how hard to try: no calibration; a weight a column; the whole quadratic cost.
SOLVER_BY_EFFORT: dict[Effort, Solver] = {"quick": "scale-search", "standard": "scale-search", "best": "hessian"}
# Sequences of calibration text: a matrix of 576 columns needs more of them than its diagonal.
_CALIBRATION_SEQUENCES: dict[Effort, int] = {"quick": 16, "standard": 16, "best": 64}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BandWish(_Strict):
    """Rows that get more bits: their share of the table's rows, and the scheme of their residuals."""

    share: float = Field(gt=0, le=1, strict=True, allow_inf_nan=False, description="of the table's rows")
    scheme: BandScheme = Field("q4_0", description="of what is added to these rows")


class Precision(_Strict):
    """The scheme of one role, the solver that rounds to it where it is not the effort's, and a table's row bands."""

    scheme: SchemeName = Field("q4_0", description="a ggml type, or int4 in groups; ONNX and LiteRT hold some of them")
    solver: Solver | None = Field(None, description="who rounds to it; by default as the effort wants")
    bands: tuple[BandWish, ...] = Field(
        (), description="rows with more bits, the most costly first; a table's, in ONNX"
    )

    @field_validator("bands")
    @classmethod
    def _at_most_all_rows(cls, bands: tuple[BandWish, ...]) -> tuple[BandWish, ...]:
        # Decimal shares that add up to one may miss it by a rounding.
        if math.fsum(band.share for band in bands) > 1 + 1e-9:
            raise ValueError("the shares add up to more than 1")
        return bands


class Sampling(_Strict):
    """How much text is run: sequences and tokens in each."""

    sequences: int = Field(8, ge=2, le=4096, strict=True, description="passages of the text")
    length: int = Field(256, ge=8, le=8192, strict=True, description="tokens in each, at most the model's context")


class Gates(_Strict):
    """Bounds on what a runtime measures; None leaves a bound out. The table's copies are always checked."""

    max_kl: float | None = Field(
        None, gt=0, strict=True, allow_inf_nan=False, description="mean KL to the reference, nats per token"
    )
    min_top1: float | None = Field(
        None, ge=0, le=1, strict=True, allow_inf_nan=False, description="share of positions with the same best token"
    )
    max_perplexity_ratio: float | None = Field(
        None, gt=0, strict=True, allow_inf_nan=False, description="perplexity over that of the reference"
    )
    max_bytes: int | None = Field(
        None, gt=0, strict=True, description="bytes of a container, its external data included"
    )
    max_runtime_kl: float | None = Field(
        0.02,
        gt=0,
        strict=True,
        description="mean KL between two runtimes of the same quantized weights, nats per token",
    )
    undecided: Literal["fail", "pass", "value"] = Field(
        "fail",
        description="where a bound lies within two standard errors even on four times the text: fail, pass, or decide "
        "by the value itself",
    )


class OnnxOptions(_Strict):
    """What only the ONNX container knows."""

    accuracy_level: int = Field(
        4, ge=0, le=4, strict=True, description="MatMulNBits' attribute: 4 multiplies int8 activations, 0 float ones"
    )


class GgufOptions(_Strict):
    """What only the GGUF container knows."""

    pre_tokenizer: str | None = Field(None, description="llama.cpp's name of it, where it is not recognized")


class LitertOptions(_Strict):
    """What only the LiteRT container knows."""

    activations: Literal["float", "int8"] = Field(
        "float",
        description="int8: products of 4-bit matrices read the codes themselves, faster; all containers then hold "
        "codes of positive scales",
    )


class Recipe(_Strict):
    """A recipe file. ``table`` is the shared table; ``lookup`` and ``logits`` serve models that are untied."""

    name: str = Field("custom", description="what reports and the default folder call it")
    description: str = Field("", description="one sentence")
    effort: Effort = Field(
        "standard", description="quick: no calibration; standard: a weight a column; best: the whole quadratic cost"
    )
    table: Precision = Field(Precision(), description="the shared table; for untied models, both of theirs")
    lookup: Precision | None = Field(None, description="an untied model's lookup table, where it is not as `table`")
    logits: Precision | None = Field(None, description="an untied model's logits matrix, where it is not as `table`")
    body: Precision = Field(Precision(), description="all other matrices")
    calibration: Sampling | None = Field(None, description="text to calibrate on; by default as the effort wants")
    evaluation: Sampling | None = Field(
        Sampling(sequences=8, length=256), description="text to run beside the float model; null to run nothing"
    )
    gates: Gates = Field(Gates(), description="bounds that the result must hold")
    onnx: OnnxOptions = Field(OnnxOptions(), description="what only ONNX knows")
    gguf: GgufOptions = Field(GgufOptions(), description="what only GGUF knows")
    litert: LitertOptions = Field(LitertOptions(), description="what only LiteRT knows")

    @property
    def calibration_sampling(self) -> Sampling:
        """How much text to calibrate on."""
        return self.calibration or Sampling(sequences=_CALIBRATION_SEQUENCES[self.effort], length=256)

    @field_validator("body")
    @classmethod
    def _no_bands(cls, body: Precision) -> Precision:
        if body.bands:
            raise ValueError("row bands are for vocabulary tables, not for the body")
        return body

    def precision(self, role: str) -> Precision:
        """Precision of a role: ``table``, ``lookup``, ``logits`` or ``body``.

        An untied model's tables follow the shared table's precision where they have none of their own, without its row
        bands, which are read by both roles.
        """
        own: Precision | None = getattr(self, role)
        return self.table.model_copy(update={"bands": ()}) if own is None else own


def recipe_for_bits(bits: int, *, keep_body: bool = False) -> Recipe:
    """The built-in recipe of ``--bits``: one scheme for table and body, or for the table where the body is kept.

    Raises:
        TieqError: for a number of bits that no scheme has.
    """
    if bits not in BITS:
        raise TieqError(f"--bits {bits} has no scheme.", todo=f"Use one of {', '.join(map(str, BITS))}.")
    precision = Precision(scheme=BITS[bits])
    return Recipe(
        name=f"{bits}-bit",
        description=f"{BITS[bits]} for the table" + (", the body kept" if keep_body else " and the body"),
        table=precision,
        body=precision,
        # A bound on what is broken, not on noise.
        gates=Gates(max_kl=_SANE_KL[bits], undecided="value"),
    )


def load_recipe(path: Path) -> Recipe:
    """Read a recipe file; every problem is reported at once.

    Raises:
        TieqError: if the file is no YAML mapping, has unknown keys or values out of range.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        content = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, YAMLError) as error:
        raise TieqError(f"cannot be read as YAML ({error}).", where=str(path)) from error
    if not isinstance(content, dict):
        raise TieqError("is no mapping of recipe keys.", where=str(path))
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        problems = "; ".join(map(_problem, error.errors()))
        raise TieqError(f"{problems}.", where=str(path), todo="Correct these keys.") from error


def _problem(item: Any) -> str:
    """One of pydantic's errors in words, with the key that an unknown one is near to, or all there are."""
    place = ".".join(map(str, item["loc"]))
    if item["type"] == "literal_error":
        near = difflib.get_close_matches(str(item["input"]), re.findall(r"'([^']*)'", item["msg"]), n=1)
        return f"{place}: '{item['input']}': {item['msg']}" + (f" (did you mean {near[0]}?)" if near else "")
    if item["type"] == "model_type":
        return f"{place}: is no mapping of keys ({', '.join(_keys_at(item['loc']))})"
    if item["type"] != "extra_forbidden":
        return f"{place}: {item['msg'].removeprefix('Value error, ')}"
    known = _keys_at(item["loc"][:-1])
    near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1)
    return f"{place}: is no key" + (f" (did you mean {near[0]}?)" if near else f" ({', '.join(known)})")


def _keys_at(place: tuple[str | int, ...]) -> list[str]:
    """The keys of a recipe, or of one of its sections."""
    section: dict[str, Any] = Recipe.model_json_schema()
    known = section["$defs"]
    for step in place:
        section = section["properties"][step] if isinstance(step, str) else section["items"]
        options = [section, *section.get("anyOf", [])]
        names = [option["$ref"] for option in options if "$ref" in option]
        section = known[names[0].rpartition("/")[2]] if names else section
    return list(section["properties"])


def shipped_recipes() -> dict[str, Path]:
    """The recipes that are installed with tieq, by name."""
    return {path.stem: path for path in sorted((Path(__file__).parent / "recipes").glob("*.yaml"))}


def find_recipe(wanted: str | Path) -> Recipe:
    """The recipe of a file that exists, else the shipped one of this name.

    Raises:
        TieqError: if it is neither, with the known names, or the file is no recipe.
    """
    path, known = Path(wanted), shipped_recipes()
    if path.is_file():
        return load_recipe(path)
    if str(wanted) in known:
        return load_recipe(known[str(wanted)])
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        return load_recipe(path)  # which says why it cannot be read
    near = difflib.get_close_matches(str(wanted), known, n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise TieqError(
        "is no file and no shipped recipe.", where=f"recipe '{wanted}'", todo=f"{hint}Known: {', '.join(known)}."
    )


def recipe_schema() -> str:
    """JSON schema of a recipe file, for editors, as text."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema()}
    return json.dumps(schema, indent=2) + "\n"


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML, every key spelled out."""
    from ruamel.yaml import YAML

    stream = StringIO()
    content: dict[str, Any] = recipe.model_dump(mode="json")
    YAML().dump(content, stream)
    return stream.getvalue()
