"""Options to records: recipes, gates, formats, default folders."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from pydantic import BaseModel, ValidationError

from tieq.errors import TieqError
from tieq.prepare import FORMATS
from tieq.recipe import BITS, Effort, Gates, Recipe, Sampling, find_recipe, load_recipe, recipe_for_bits

_DEFAULT_BITS = 4
Model = TypeVar("Model", bound=BaseModel)


def build_recipe(
    bits: int | None, effort: str | None, path: str | None, pre_tokenizer: str | None, keep_body: bool
) -> Recipe:
    """The recipe of a file, of a name or of ``--bits``, with the command line's changes.

    Raises:
        TieqError: if both are given or a value is not allowed.
    """
    if bits is not None and path is not None:
        raise TieqError("--bits and --recipe exclude each other.", todo="Give one of them.")
    if path is not None:
        recipe = find_recipe(path)
    else:
        recipe = recipe_for_bits(_DEFAULT_BITS if bits is None else bits, keep_body=keep_body)
    changes: dict[str, Any] = {}
    if effort is not None:
        changes["effort"] = effort
    if pre_tokenizer is not None:
        changes["gguf"] = {"pre_tokenizer": pre_tokenizer}
    return _checked(Recipe, {**recipe.model_dump(), **changes})


def check_formats(formats: list[str] | None) -> tuple[str, ...] | None:
    """The wished containers in their fixed order; None where none is named.

    Raises:
        TieqError: for a name that is no container.
    """
    wished = formats or []
    unknown = [name for name in wished if name not in FORMATS]
    if unknown:
        raise TieqError(f"--format '{unknown[0]}' is no container.", todo=f"Use {', '.join(FORMATS)}.")
    return tuple(name for name in FORMATS if name in wished) or None


def default_out(model: str, recipe: Recipe, keep_body: bool) -> Path:
    """``artifacts/MODEL-RECIPE``, ``-table`` behind it where the table alone is quantized.

    A recipe that begins with the model's name says it once.
    """
    stem = Path(model).name if Path(model).exists() else model.rpartition("/")[2]
    stem = (Path(stem).stem if stem.endswith(".gguf") else stem).lower()
    name = recipe.name.lower()
    label = re.sub(r"[^\w.-]+", "-", name if name.startswith(stem) else f"{stem}-{name}")
    return Path("artifacts") / (f"{label}-table" if keep_body else label)


def study_out(model: str, kind: str) -> Path:
    """``artifacts/MODEL-KIND``."""
    return default_out(model, Recipe(name=kind), keep_body=False)


def parse_bits(bits: str | None) -> list[int]:
    """The widths of ``--bits 2,4,8``; all that exist where it is not given.

    Raises:
        TieqError: for anything but whole numbers and commas.
    """
    if bits is None:
        return list(BITS)
    try:
        return [int(part) for part in bits.split(",")]
    except ValueError as error:
        raise TieqError(f"--bits '{bits}' is no list of whole numbers.", todo="Write it as 2,4,8.") from error


def check_effort(effort: str) -> Effort:
    """The effort by name.

    Raises:
        TieqError: for a name that is none.
    """
    known = get_args(Effort)
    if effort not in known:
        raise TieqError(f"--effort '{effort}' is no effort.", todo=f"Use one of {', '.join(known)}.")
    return cast(Effort, effort)


def build_gates(
    path: Path, max_kl: float | None, min_top1: float | None, max_perplexity_ratio: float | None
) -> Gates | None:
    """Gates of the command line over those of the artifact's recipe; None where the command line names none."""
    given = {"max_kl": max_kl, "min_top1": min_top1, "max_perplexity_ratio": max_perplexity_ratio}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return None
    own = path / "recipe.yaml"
    base = load_recipe(own).gates.model_dump() if own.exists() else {}
    return _checked(Gates, {**base, **given})


def build_sampling(path: Path, sequences: int | None, length: int | None) -> Sampling | None:
    """Sampling of the command line over the artifact's recipe; None where the command line says nothing."""
    given = {"sequences": sequences, "length": length}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return None
    own = path / "recipe.yaml"
    base = load_recipe(own).evaluation.model_dump() if own.exists() else {}
    return _checked(Sampling, {**base, **given})


def _checked(kind: type[Model], values: dict[str, Any]) -> Model:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(f"--{str(item['loc'][-1]).replace('_', '-')}: {item['msg']}" for item in error.errors())
        raise TieqError(f"{problems}.", todo="Correct these options.") from error
