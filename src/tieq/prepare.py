"""Everything that can be known and refused before a weight is touched or a byte written: roles, plan, GGUF layout."""

from __future__ import annotations

import dataclasses

from tieq.errors import RefusedError
from tieq.plan import Plan, make_plan
from tieq.progress import say
from tieq.recipe import Recipe
from tieq.records import TieGraph
from tieq.source.base import GgufLayout, ModelSource
from tieq.source.locate import open_source
from tieq.source.reference import Inventory, inventory
from tieq.source.tie import refuse_unexportable, table_name, tie_graph
from tieq.source.tokenizer import TextTokenizer, check_rows

FORMATS = ("onnx", "ort", "gguf")
DEFAULT_FORMATS = ("onnx", "gguf")


@dataclasses.dataclass(frozen=True)
class Job:
    """A checked export: everything that is known before any weight is touched."""

    model: str
    source: ModelSource
    graph: TieGraph
    table: str
    parts: Inventory
    plan: Plan
    recipe: Recipe
    layout: GgufLayout | None
    tokenizer: TextTokenizer | None
    notes: tuple[str, ...]

    @property
    def floats(self) -> list[str]:
        """Tensors that stay float; a tied model's second name for the table is none of them."""
        planned = {decision.name for decision in self.plan.decisions}
        tied_names = {self.parts.lookup, self.parts.logits} if self.graph.tied else set()
        return [name for name in self.parts.shapes if name not in planned | tied_names]


def prepare(model: str, recipe: Recipe, formats: tuple[str, ...] = DEFAULT_FORMATS, *, tie: bool | None = None) -> Job:
    """Open the model, find its roles, plan, and refuse what cannot be exported.

    Raises:
        RefusedError: with the reason; nothing has been written.
    """
    source = open_source(model)
    graph = tie_graph(source, tie=tie)
    for note in graph.notes:
        say(f"note: {note}")
    refuse_unexportable(source, graph)
    _correct_config(source, graph)
    folder = source.tokenizer_folder()
    tokenizer = None if folder is None else TextTokenizer(folder, str(source.path))
    if tokenizer is not None:
        check_rows(tokenizer, graph.rows, str(source.path))
    parts = inventory(source.config)
    table = table_name(source, graph)
    missing = [
        name
        for name in parts.shapes
        if name not in set(source.names()) and not (graph.tied and name in (parts.lookup, parts.logits))
    ]
    if missing:
        raise RefusedError(
            f"{len(missing)} tensors of the model are not stored, first '{missing[0]}'; random ones are never used.",
            where=str(source.path),
            todo="Download the checkpoint again.",
        )
    plan = make_plan(parts, graph, recipe, formats, table, calibrated=tokenizer is not None)
    notes = list(graph.notes)
    notes += _fallback_notes(plan)
    for note in notes[len(graph.notes) :]:
        say(f"note: {note}")
    if tokenizer is None:
        notes.append("no tokenizer: random token ids are run instead of text, and an export is not calibrated.")
        say(f"note: {notes[-1]}")
    job = Job(model, source, graph, table, parts, plan, recipe, None, tokenizer, tuple(notes))
    layout = None
    if "gguf" in formats:
        if graph.tied and not source.family.gguf_can_share:
            raise RefusedError(
                f"llama.cpp cannot share one table in the '{source.family.gguf}' architecture: it insists on a second.",
                where=str(source.path),
                todo="Export with `--format onnx` only.",
            )
        shapes = {decision.name: source.info(decision.stored).shape for decision in plan.decisions}
        shapes.update({name: source.info(name).shape for name in job.floats})
        tables = {decision.name for decision in plan.tables}
        layout = source.gguf_layout(shapes, tables, recipe.gguf.pre_tokenizer)
    return dataclasses.replace(job, layout=layout)


def _fallback_notes(plan: Plan) -> list[str]:
    """One note a kind of fallback, with its real bits per weight."""
    groups: dict[str, list[str]] = {}
    for decision in plan.decisions:
        if decision.reason != "recipe":
            kind = f"{decision.scheme}, {decision.bits_per_weight} bits/weight ({decision.reason})"
            groups.setdefault(kind, []).append(decision.name)
    return [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {kind}" for kind, names in groups.items()
    ]


def _correct_config(source: ModelSource, graph: TieGraph) -> None:
    """Rows of the table are authoritative, and so is the verdict on the tie."""
    source.config["vocab_size"] = graph.rows
    source.config["tie_word_embeddings"] = graph.tied
