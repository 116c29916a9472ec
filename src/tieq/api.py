"""The Python API: what the commands do, with plain arguments. Heavy modules are imported inside the calls."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tieq.pipeline import ExportResult
    from tieq.recipe import Effort, Recipe

__all__ = ["compare", "export", "inspect", "plan", "probe", "validate"]


def inspect(model: str | Path) -> dict[str, Any]:
    """Describe what is tied in a model, a container file or an artifact folder.

    Raises:
        TieqError: if it cannot be found or read.
    """
    from tieq.inspection import inspect as run

    return run(str(model))


def export(
    model: str | Path,
    out: str | Path,
    *,
    bits: int = 4,
    recipe: str | Path | Recipe | None = None,
    formats: tuple[str, ...] | None = None,
    tie: bool | None = None,
    keep_body: bool = False,
    calibration: Iterable[str | Path] = (),
    cache: bool = True,
    plan_file: str | Path | None = None,
) -> ExportResult:
    """Quantize a model once, write its containers into the folder ``out`` and validate them.

    Args:
        model: alias, hub id, checkpoint folder or ``.gguf`` file.
        out: artifact folder.
        bits: 2, 4 or 8, and for GGUF alone 3, 5, 6; unused with a recipe.
        recipe: recipe file, name of a shipped recipe, or record.
        formats: containers, of ``onnx``, ``ort``, ``gguf`` and ``litert``; None for ONNX and GGUF, or GGUF where the
            body is kept.
        calibration: text files, and ``samples`` for text that the model writes itself, instead of the default mixture.
        cache: reuse calibration statistics of an earlier call, and keep them for later ones.
        plan_file: a ``plan.json`` of :func:`plan`, whose precisions go before the recipe's.
        tie: share equal tables that the flag calls untied (True), or do not (False).
        keep_body: re-solve a GGUF file's vocabulary tables alone; every other tensor and all metadata stay byte for
            byte, and a matrix that is stored twice is shared again.

    Returns:
        The folder, its manifest and its checks; ``passed`` tells whether every gate holds.

    Raises:
        TieqError: on bad input, before anything is written.
    """
    from tieq.pipeline import export as run
    from tieq.recipe import Recipe, find_recipe, recipe_for_bits

    if recipe is None:
        recipe = recipe_for_bits(bits, keep_body=keep_body)
    elif not isinstance(recipe, Recipe):
        recipe = find_recipe(recipe)
    choices = None
    if plan_file is not None:
        from tieq.planning import read_choices

        choices = read_choices(Path(plan_file))
    return run(
        str(model),
        recipe,
        Path(out),
        formats,
        tie=tie,
        keep_body=keep_body,
        calibration=calibration,
        cache=cache,
        choices=choices,
    )


def plan(
    model: str | Path,
    out: str | Path | None = None,
    *,
    target_size: int | None = None,
    max_kl: float | None = None,
    effort: Effort = "standard",
    formats: tuple[str, ...] | None = None,
    measured: bool = True,
) -> dict[str, Any]:
    """Choose the precision of every matrix for a size or a quality; the document that ``plan.json`` holds.

    Args:
        model: alias, hub id, checkpoint folder or ``.gguf`` file.
        out: folder for the document and its picture; None writes nothing.
        target_size: bytes that no container may exceed.
        max_kl: mean KL in nats per token, of which the smallest file is wanted; unused with a size.
        effort: ``standard`` or ``best``, as for an export.
        formats: containers, of ``onnx``, ``ort``, ``gguf`` and ``litert``.
        measured: quantize the choice, measure it in the float model and correct it.

    Raises:
        TieqError: on bad input, or if no plan meets the bound.
    """
    from tieq.budget import Budget
    from tieq.planning import plan as run
    from tieq.recipe import Recipe

    budget = Budget(target_size, None if target_size is not None else max_kl)
    folder = None if out is None else Path(out)
    return run(str(model), Recipe(effort=effort), budget, formats, out=folder, measured=measured)


def validate(path: str | Path, *, reference: str | None = None, runtimes: list[str] | None = None) -> dict[str, Any]:
    """Prove and measure an artifact folder or a container file; the document that ``--json`` prints.

    Raises:
        TieqError: if the path is no such thing.
    """
    from tieq.revalidate import validate_path

    return validate_path(Path(path), reference=reference, runtimes=runtimes)


def probe(
    model: str | Path,
    out: str | Path | None = None,
    *,
    bits: Iterable[int] = (2, 3, 4, 5, 6, 8),
    schemes: Iterable[str] = (),
    effort: Effort = "standard",
) -> dict[str, Any]:
    """Measure what quantizing the table costs by role; the document that ``probe.json`` holds.

    Args:
        model: alias, hub id, checkpoint folder or ``.gguf`` file.
        out: folder for the document and its pictures; None writes nothing.
        bits: widths, as for :func:`export`.
        schemes: further schemes by name.
        effort: ``quick``, ``standard`` or ``best``, as for an export.

    Raises:
        TieqError: on bad input, before the model is run.
    """
    from tieq.probing import probe as run

    return run(str(model), bits, schemes, effort=effort, out=None if out is None else Path(out))


def compare(
    model: str | Path,
    out: str | Path | None = None,
    *,
    bits: Iterable[int] = (2, 3, 4, 5, 6, 8),
    effort: Effort = "best",
) -> dict[str, Any]:
    """Compare one shared quantized table with two; the document that ``compare.json`` holds.

    Arguments are those of :func:`probe`.

    Raises:
        TieqError: on bad input, before the model is run.
    """
    from tieq.comparing import compare as run

    return run(str(model), bits, effort=effort, out=None if out is None else Path(out))
