"""Everything that can be known and refused before a weight is touched or a byte written: roles, plan, GGUF layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tieq.codecs.schemes import SCHEMES, ggml_kind
from tieq.errors import RefusedError
from tieq.plan import Plan, make_plan
from tieq.progress import say
from tieq.recipe import Precision, Recipe
from tieq.records import TieGraph
from tieq.source.base import GgufLayout, ModelSource
from tieq.source.gguf_file import GgufFile
from tieq.source.locate import open_source
from tieq.source.reference import Inventory, inventory
from tieq.source.tie import refuse_unexportable, table_name, tie_graph
from tieq.source.tokenizer import TextTokenizer, check_rows

FORMATS = ("onnx", "ort", "gguf", "litert")
DEFAULT_FORMATS = ("onnx", "gguf")
KEPT_FORMATS = ("gguf",)


@dataclasses.dataclass(frozen=True)
class Job:
    """A checked export: everything that is known before any weight is touched.

    ``kept`` is the GGUF file whose body is left as it is, None where the body is quantized; then the plan holds the
    tables alone.
    """

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
    kept: GgufFile | None = None

    @property
    def floats(self) -> list[str]:
        """Tensors that stay float; a tied model's second name for the table is none of them, and no kept body."""
        if self.kept is not None:
            return []
        planned = {decision.name for decision in self.plan.decisions}
        tied_names = {self.parts.lookup, self.parts.logits} if self.graph.tied else set()
        return [name for name in self.parts.shapes if name not in planned | tied_names]


def prepare(
    model: str,
    recipe: Recipe,
    formats: tuple[str, ...] | None = None,
    *,
    tie: bool | None = None,
    keep_body: bool = False,
    choices: Mapping[str, Precision] | None = None,
) -> Job:
    """Open the model, find its roles, plan, and refuse what cannot be exported.

    Args:
        model: alias, hub id, folder or ``.gguf`` file.
        recipe: precision, sampling and gates.
        formats: containers to write; None for the usual ones.
        tie: see :func:`tieq.source.tie.tie_graph`.
        keep_body: plan the tables alone; a GGUF file's other tensors and metadata are to stay as they are.
        choices: precisions by matrix name, over the recipe's.

    Raises:
        RefusedError: with the reason; nothing has been written.
    """
    formats = formats or (KEPT_FORMATS if keep_body else DEFAULT_FORMATS)
    source = open_source(model, gguf=keep_body)
    kept = _kept_file(source, recipe, formats) if keep_body else None
    graph = tie_graph(source, tie=tie, retie=keep_body and source.family.gguf_can_share)
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
    planned = parts if kept is None else dataclasses.replace(parts, body=())
    plan = make_plan(planned, graph, recipe, formats, table, calibrated=tokenizer is not None, choices=choices)
    if "litert" in formats:
        from tieq.export.litert import check_litert

        check_litert(source.config, parts.shapes, plan)
    notes = list(graph.notes)
    if kept is not None:
        notes.append(
            f"the body and all metadata (general.file_type too) are those of {source.path.name}, byte for byte."
        )
    notes += [*_plan_notes(plan), *_recipe_notes(recipe, graph.tied)]
    if "gguf" in formats and any(decision.bands for decision in plan.tables):
        notes.append("GGUF holds one type a tensor; it takes the base table, without the row bands.")
    for note in notes[len(graph.notes) :]:
        say(f"note: {note}")
    if tokenizer is None:
        notes.append("no tokenizer: random token ids are run instead of text, and an export is not calibrated.")
        say(f"note: {notes[-1]}")
    job = Job(model, source, graph, table, parts, plan, recipe, None, tokenizer, tuple(notes), kept)
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


def _kept_file(source: ModelSource, recipe: Recipe, formats: tuple[str, ...]) -> GgufFile:
    """The source's GGUF file, if its body can be kept."""
    from tieq.source.gguf_source import LOOKUP, GgufSource

    if formats != KEPT_FORMATS:
        raise RefusedError(f"--keep-body writes GGUF alone, not {' and '.join(formats)}.", todo="Leave --format out.")
    if not isinstance(source, GgufSource):
        raise RefusedError(
            "is no GGUF file, and --keep-body keeps the quantized body of one.",
            where=str(source.path),
            todo="Name a .gguf file, or leave --keep-body out.",
        )
    if LOOKUP not in source.file.tensors:
        raise RefusedError(
            f"has no '{LOOKUP}', so llama.cpp does not run it.", where=str(source.path), todo="Convert it again."
        )
    if recipe.gguf.pre_tokenizer is not None:
        raise RefusedError(
            "--keep-body keeps the metadata, so no pre-tokenizer can be set.",
            where=str(source.path),
            todo="Leave the pre-tokenizer out.",
        )
    return source.file


def _recipe_notes(recipe: Recipe, tied: bool) -> list[str]:
    """What of a recipe this model has no use for."""
    if tied and (recipe.lookup or recipe.logits):
        return ["one table plays both roles and follows the recipe's `table`; its `lookup` and `logits` go unused."]
    if recipe.table.bands and not tied:
        return ["row bands refine a shared table; this model has a table for each role and takes none."]
    return []


def _plan_notes(plan: Plan) -> list[str]:
    """One note a kind of fallback, with its real bits per weight; and what another container asks of all."""
    groups: dict[str, list[str]] = {}
    for decision in plan.decisions:
        if decision.reason.startswith("fallback"):
            kind = f"{decision.scheme}, {decision.bits_per_weight} bits/weight ({decision.reason})"
            groups.setdefault(kind, []).append(decision.name)
    notes = [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {kind}" for kind, names in groups.items()
    ]
    if any(decision.positive for decision in plan.decisions):
        notes.append("4 bits have no negative scales here, in any container: LiteRT's integer products refuse them.")
    grouped = sorted({d.scheme for d in plan.decisions if d.scheme in SCHEMES and ggml_kind(d.scheme) != d.scheme})
    if grouped and "gguf" in plan.formats:
        kinds = " and ".join(grouped)
        notes.append(f"GGUF holds {kinds} as blocks of 32 that repeat the scale: as large as Q4_0 and less exact.")
    return notes


def _correct_config(source: ModelSource, graph: TieGraph) -> None:
    """Rows of the table are authoritative, and so is the verdict on the tie."""
    source.config["vocab_size"] = graph.rows
    source.config["tie_word_embeddings"] = graph.tied
