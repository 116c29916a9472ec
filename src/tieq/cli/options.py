"""Options to records: recipes, gates, formats, default folders."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from pydantic import BaseModel, ValidationError

from tieq.budget import Budget
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


def budget_recipe(recipe: Recipe, budget: Budget) -> Recipe:
    """The recipe with the budget as a gate, named after it; without a budget as it is."""
    if budget == Budget():
        return recipe
    gates = recipe.gates.model_dump()
    name = recipe.name
    if budget.size is not None:
        name, gates["max_bytes"] = f"{budget.size / 1e6:g}MB", budget.size
    if budget.kl is not None:
        name, gates["max_kl"] = f"kl-{budget.kl:g}", budget.kl
        # The smallest file within a bound lies close to it, mostly closer than the noise.
        gates["undecided"] = "value"
    return _checked(Recipe, {**recipe.model_dump(), "name": name, "description": "", "gates": gates})


def without_evaluation(recipe: Recipe, budget: Budget, *, texts: bool) -> Recipe:
    """The recipe with nothing to run.

    Raises:
        TieqError: if something else on the command line asks for a run.
    """
    if texts or budget.kl is not None:
        raise TieqError(
            f"--no-evaluation and {'--text' if texts else '--max-kl'} exclude each other.", todo="Give one of them."
        )
    return recipe.model_copy(update={"evaluation": None})


def build_budget(target_size: str | None, max_kl: float | None, others: dict[str, bool]) -> Budget:
    """The budget of the command line.

    Raises:
        TieqError: if it names two, or something that excludes a budget.
    """
    given = [name for name, is_given in (("--target-size", target_size), ("--max-kl", max_kl)) if is_given is not None]
    given += [name for name, is_given in others.items() if is_given]
    if len(given) > 1:
        raise TieqError(f"{given[0]} and {given[1]} exclude each other.", todo="Give one of them.")
    if max_kl is not None and not 0 < max_kl < math.inf:
        raise TieqError(f"--max-kl {max_kl:g} is no bound.", todo="Give nats per token, more than 0.")
    size = None if target_size is None else parse_size(target_size)
    if size == 0:
        raise TieqError(f"--target-size {target_size} is no size.", todo="Give more than 0.")
    return Budget(size, max_kl)


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


def parse_size(size: str, option: str = "--target-size") -> int:
    """Bytes of a size like ``80MB``, ``76MiB``, ``1.2GB`` or a plain number of at least a million.

    Raises:
        TieqError: for anything else; a small plain number has lost its unit.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMG]?)(i?)[bB]?\s*", size)
    if found is None or (found[3] and not found[2]):
        raise TieqError(f"{option} '{size}' is no size.", todo="Write it as 80MB or 76MiB.")
    power = {"": 0, "k": 1, "m": 2, "g": 3}[found[2].lower()]
    if size.strip().isdigit() and 0 < int(size) < 1_000_000:
        raise TieqError(f"{option} '{size}' has no unit.", todo=f"Write it as {size.strip()}MB or {size.strip()}MiB.")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


def check_effort(effort: str) -> Effort:
    """The effort by name.

    Raises:
        TieqError: for a name that is none.
    """
    known = get_args(Effort)
    if effort not in known:
        raise TieqError(f"--effort '{effort}' is no effort.", todo=f"Use one of {', '.join(known)}.")
    return cast(Effort, effort)


def refuse_unmeasured(no_evaluation: bool, *bounds: float | None) -> None:
    """Refuse a bound on what nothing would measure.

    Raises:
        TieqError: if there is one.
    """
    if no_evaluation and any(bound is not None for bound in bounds):
        raise TieqError("--no-evaluation measures nothing that a bound could hold for.", todo="Leave one of them out.")


def check_outputs(*paths: Path | None) -> None:
    """Refuse files that cannot be written, before anything is run.

    Raises:
        TieqError: naming the first.
    """
    for path in paths:
        if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
            raise TieqError("cannot be written: its folder does not exist, or it is one.", where=str(path))


def write_outputs(found: dict[str, Any], junit: Path | None, markdown: Path | None) -> None:
    """Write a validation's JUnit XML, and append its summary to a file, as a job's summary is appended to.

    Raises:
        TieqError: if one cannot be written.
    """
    from tieq.report.outputs import job_summary, junit_xml

    try:
        if junit is not None:
            junit.write_text(junit_xml(found), encoding="utf-8")
        if markdown is not None:
            with markdown.open("a", encoding="utf-8") as file:
                file.write(job_summary(found))
    except OSError as error:
        raise TieqError(f"cannot be written ({error}).", where=str(error.filename)) from error


def build_gates(
    path: Path,
    *,
    max_kl: float | None,
    min_top1: float | None,
    max_perplexity_ratio: float | None,
    max_size: str | None,
    undecided: str | None,
) -> Gates | None:
    """Gates of the command line over those of the artifact's recipe; None where the command line names none."""
    given = {
        "max_kl": max_kl,
        "min_top1": min_top1,
        "max_perplexity_ratio": max_perplexity_ratio,
        "max_bytes": None if max_size is None else parse_size(max_size, "--max-size"),
        "undecided": undecided,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return None
    own = path / "recipe.yaml"
    base = load_recipe(own).gates.model_dump() if own.exists() else {}
    # The recipe says how its own bounds are judged.
    return _checked(Gates, {**base, "undecided": "fail", **given})


def build_sampling(path: Path, sequences: int | None, length: int | None) -> Sampling | None:
    """Sampling of the command line over the artifact's recipe; None where the command line says nothing."""
    given = {"sequences": sequences, "length": length}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return None
    own = path / "recipe.yaml"
    kept = load_recipe(own).evaluation if own.exists() else None
    base = {} if kept is None else kept.model_dump()
    return _checked(Sampling, {**base, **given})


def _checked(kind: type[Model], values: dict[str, Any]) -> Model:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(f"--{str(item['loc'][-1]).replace('_', '-')}: {item['msg']}" for item in error.errors())
        raise TieqError(f"{problems}.", todo="Correct these options.") from error
