"""The only place where a precision is decided: recipe, roles and geometry in, one decision a matrix out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tieq.bands import decide_bands
from tieq.codecs import ggml
from tieq.codecs.k_quants import LAYOUTS
from tieq.codecs.schemes import SCHEMES
from tieq.errors import RefusedError
from tieq.recipe import SOLVER_BY_EFFORT, Precision, Recipe, Solver
from tieq.records import BandDecision, Decision, TieGraph
from tieq.source.reference import Inventory

# What takes a scheme's place where its block does not divide the columns (ggml's as in llama.cpp), and the last resort.
_FALLBACK = {
    "q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0", "iq4_xs": "iq4_nl",
    "iq3_s": "iq4_nl", "iq3_xxs": "iq4_nl", "iq2_s": "iq4_nl", "iq2_xs": "iq4_nl", "iq2_xxs": "iq4_nl",
    "iq1_s": "iq4_nl", "iq1_m": "iq4_nl", "tq1_0": "q4_0", "tq2_0": "q4_0", "q1_0": "q4_0", "q2_0": "q4_0",
    "int4_g128": "int4_g64", "int4_g64": "q4_0",
}  # fmt: skip
_LAST_RESORT = "f16"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Decisions in the model's order: vocabulary tables first, then the body."""

    decisions: tuple[Decision, ...]
    formats: tuple[str, ...]
    recipe: str

    def __getitem__(self, name: str) -> Decision:
        return next(decision for decision in self.decisions if decision.name == name)

    @property
    def tables(self) -> tuple[Decision, ...]:
        """Decisions of the vocabulary tables: one when shared, two when not."""
        return tuple(decision for decision in self.decisions if decision.role != "body")

    def packed_bytes(self) -> int:
        """Bytes of all planned matrices and row bands in the quantized checkpoint, with their fp16 scales."""
        matrices = sum(int(d.rows * d.columns * d.bits_per_weight / 8) for d in self.decisions)
        return matrices + sum(band.nbytes for decision in self.decisions for band in decision.bands)

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary for ``plan.json``."""
        decisions = [_decision_json(decision) for decision in self.decisions]
        return {**dataclasses.asdict(self), "decisions": decisions, "packed_bytes": self.packed_bytes()}


def _decision_json(decision: Decision) -> dict[str, Any]:
    plain = dataclasses.asdict(decision)
    if not decision.positive:
        del plain["positive"]
    if not decision.bands:
        del plain["bands"]
        return plain
    # ONNX stores beside each band the row map of the lookup and the columns of the logits.
    added = 8 * sum(band.onnx_bytes for band in decision.bands) / (decision.rows * decision.columns)
    return {
        **plain,
        "total_bits_per_weight": decision.total_bits_per_weight,
        "onnx_bits_per_weight": decision.bits_per_weight + added,
    }


def make_plan(
    parts: Inventory,
    graph: TieGraph,
    recipe: Recipe,
    formats: tuple[str, ...],
    table: str,
    *,
    calibrated: bool = True,
    choices: Mapping[str, Precision] | None = None,
) -> Plan:
    """Decide the scheme of every matrix.

    Args:
        parts: the model's matrices.
        graph: which tables are shared.
        recipe: what is wished for.
        formats: containers that will be written, of ``onnx``, ``ort``, ``gguf`` and ``litert``.
        table: source tensor that holds the shared table.
        calibrated: whether second moments can be measured, where the recipe's effort wants them.
        choices: precisions by matrix name, over the recipe's; what a budget has chosen.

    Raises:
        RefusedError: if a choice is for no matrix of the model, a container cannot hold a wished scheme, or a scheme
            needs importance weights that will not be there; the message names what can be done.
    """
    decisions = []
    if graph.tied:
        _refuse_roles_alone(parts, recipe)
        made = _decide(parts.lookup, "table", graph.rows, graph.columns, recipe.precision("table"), recipe, formats)
        bands = decide_bands(recipe.precision("table").bands, made.name, made.rows, made.columns, made.scheme)
        decisions.append(dataclasses.replace(made, stored=table, bands=bands))
    else:
        _refuse_bands(parts, recipe)
        for name, role in ((parts.lookup, "lookup"), (parts.logits, "logits")):
            decisions.append(_decide(name, role, graph.rows, graph.columns, recipe.precision(role), recipe, formats))
    for matrix in parts.body:
        made = _decide(matrix.name, "body", matrix.rows, matrix.columns, recipe.precision("body"), recipe, formats)
        decisions.append(dataclasses.replace(made, transposed=matrix.transposed))
    known = {decision.name for decision in decisions}
    for name in choices or {}:
        if name not in known:
            raise RefusedError("is no matrix of this model.", where=name, todo="Plan for this model again.")
    decisions = [decide(d, choices[d.name], recipe, formats) if choices and d.name in choices else d for d in decisions]
    for decision in decisions:
        _check_bands(decision.name, decision.bands, calibrated and recipe.effort != "quick")
        _check_importance(decision, calibrated and recipe.effort != "quick")
    return Plan(tuple(decisions), formats, recipe.name)


def decide(decision: Decision, wish: Precision, recipe: Recipe, formats: tuple[str, ...]) -> Decision:
    """The same matrix in another precision.

    Raises:
        RefusedError: if a container cannot hold it.
    """
    made = _decide(decision.name, decision.role, decision.rows, decision.columns, wish, recipe, formats)
    bands = decide_bands(wish.bands, made.name, made.rows, made.columns, made.scheme)
    own = dataclasses.asdict(made) | {"stored": decision.stored, "transposed": decision.transposed}
    return Decision(**{**own, "reason": "budget" if made.reason == "recipe" else made.reason, "bands": bands})


def _decide(
    name: str, role: str, rows: int, columns: int, wish: Precision, recipe: Recipe, formats: tuple[str, ...]
) -> Decision:
    scheme, reason = wish.scheme, "recipe"
    chain: list[str] = [scheme]
    while columns % _block(chain[-1]):
        chain.append(_FALLBACK.get(chain[-1], _LAST_RESORT))
    chosen = chain[-1]
    if len(chain) > 1:
        why = f"{columns} columns are not divisible by {_block(scheme)}"
        reason = f"fallback from {scheme}: {why}"
    _check_formats(name, chosen, formats)
    bits = SCHEMES[chosen].bits_per_weight if chosen in SCHEMES else ggml.bits_per_weight(chosen)
    solver = _solver(chosen, wish.solver or SOLVER_BY_EFFORT[recipe.effort])
    integer = "litert" in formats and recipe.litert.activations == "int8"
    positive = integer and chosen in SCHEMES and SCHEMES[chosen].int4
    return Decision(name, name, role, rows, columns, chosen, solver, bits, reason, positive=positive)


def _solver(scheme: str, wish: Solver) -> str:
    """Who rounds: the wished solver where it can, else ggml's own encoder."""
    if scheme == "f16":
        return "cast"
    # Under ggml's compressed scales, only the full cost has more to say than ggml's encoder.
    return wish if scheme in SCHEMES or (scheme in LAYOUTS and wish == "hessian") else "ggml"


def _check_bands(name: str, bands: tuple[BandDecision, ...], calibrated: bool) -> None:
    if bands and not calibrated:
        raise RefusedError(
            "row bands take the rows that calibration finds most costly, and nothing will be measured.",
            where=name,
            todo="Use `effort: standard` or `best` and a model with a tokenizer, or leave `bands` out.",
        )


def _refuse_roles_alone(parts: Inventory, recipe: Recipe) -> None:
    """A recipe that gives the two roles a precision and the shared table none would be followed in nothing."""
    if (recipe.lookup or recipe.logits) and "table" not in recipe.model_fields_set:
        raise RefusedError(
            "one table plays both roles here, and the recipe's `lookup` and `logits` are for a table of each role.",
            where=parts.lookup,
            todo="Give `table` a precision.",
        )


def _refuse_bands(parts: Inventory, recipe: Recipe) -> None:
    """Row bands rank rows by both roles and are read by both, so they need one table for both."""
    for name, role in ((parts.lookup, "lookup"), (parts.logits, "logits")):
        if recipe.precision(role).bands:
            raise RefusedError(
                "row bands refine a shared table, and this model has a table for each role.",
                where=name,
                todo="Leave `bands` out.",
            )


def _check_importance(decision: Decision, calibrated: bool) -> None:
    # The lookup of an untied model multiplies nothing, so it has no inputs whose second moments could be measured.
    measured = calibrated and decision.role != "lookup"
    if decision.scheme not in SCHEMES and not measured and ggml.requires_importance(decision.scheme):
        raise RefusedError(
            f"ggml encodes {decision.scheme} only with importance weights, and none will be measured.",
            where=decision.name,
            todo="Use `--effort standard` and a model with a tokenizer, or another scheme.",
        )


def _block(scheme: str) -> int:
    return SCHEMES[scheme].block if scheme in SCHEMES else ggml.block_size(scheme)


def _check_formats(name: str, scheme: str, formats: tuple[str, ...]) -> None:
    held = [*(name for name, geometry in SCHEMES.items() if geometry.onnx), "f16"]
    if {"onnx", "ort", "litert"} & set(formats) and scheme not in held:
        exact = ", ".join(held)
        holder = "ONNX" if {"onnx", "ort"} & set(formats) else "LiteRT"
        raise RefusedError(
            f"{holder} operators cannot hold {scheme}.",
            where=name,
            todo=f"Use one of {exact} (bits 2, 4, 8), or export with `--format gguf` only.",
        )
