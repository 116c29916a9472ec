"""The tie graph: which stored tensors play lookup and logits. Bytes decide first, the flag second."""

from __future__ import annotations

import numpy as np

from tieq.codecs import ggml
from tieq.errors import RefusedError
from tieq.records import CopyDifference, Role, TensorInfo, TieArithmetic, TieGraph, Verdict
from tieq.source.base import ModelSource
from tieq.source.reference import default_tie
from tieq.source.tokenizer import count_ids

# Two copies of one matrix in different storage types are as far apart as the coarser type's own rounding of the finer
# copy, give or take the importance weights that its writer may have used.
_ROUNDING_SLACK = 1.5
_SAMPLE_ROWS = 1024
_CHUNK_ROWS = 8192


def tie_graph(source: ModelSource, *, tie: bool | None = None, retie: bool = False) -> TieGraph:
    """Find the roles of a model's vocabulary tables.

    Args:
        source: the model.
        tie: True asks to share the table, False not to, None to follow bytes and flag.
        retie: with ``tie`` None, share a matrix that is stored twice whatever the flag says.

    Raises:
        RefusedError: if no table exists, the shapes disagree, sharing was asked for and the copies differ, or not
            sharing was and there is one.
    """
    lookup, logits = source.role_tensors()
    flag = source.config.get("tie_word_embeddings")
    default = default_tie(str(source.config["model_type"]))
    effective = default if flag is None else bool(flag)
    table = lookup or logits
    if table is None:
        raise RefusedError(
            f"neither '{source.family.lookup_name}' nor '{source.family.logits_name}' is stored.",
            where=str(source.path),
            todo="Use a causal language model's checkpoint.",
        )
    _check_shapes(source, lookup, logits)
    notes = []
    difference = None
    if lookup is not None and logits is not None:
        difference = compare_copies(source, lookup, logits)
        verdict = _verdict_of_copies(source, difference, lookup, logits)
        tied = verdict is Verdict.EQUAL_COPIES and effective
        if tie is not None and verdict is not Verdict.DIFFERENT:
            tied = tie
        elif retie:
            tied = verdict is not Verdict.DIFFERENT
        notes += _copy_notes(verdict, difference, effective, tied, lookup, logits)
        if tie and verdict is Verdict.DIFFERENT:
            raise RefusedError(
                f"lookup and logits were to share one table, but {_differ(difference)}.",
                where=str(source.path),
                todo="Export without --tie; the two tables are then kept apart.",
            )
    else:
        if effective and tie is False:
            raise RefusedError(
                "one table is stored for both roles, and --no-tie would only write it twice.",
                where=str(source.path),
                todo="Leave --no-tie out.",
            )
        verdict = Verdict.SHARED if effective else _missing(lookup)
        tied = effective
        if effective and lookup is None:
            notes.append(f"only the head '{table.name}' is stored; it plays both roles.")
        if not effective:
            notes.append(_missing_note(flag, lookup))
    if flag is None:
        notes.append(f"tie_word_embeddings is absent; the architecture assumes {str(default).lower()}.")
    if table.shape[0] != source.config.get("vocab_size", table.shape[0]):
        notes.append(
            f"the configuration says {source.config['vocab_size']} rows, the table has {table.shape[0]}; "
            "the table is right."
        )
    return TieGraph(
        verdict=verdict,
        lookup=source.family.use(Role.LOOKUP, lookup.name if lookup else None, source.config),
        logits=source.family.use(Role.LOGITS, logits.name if logits else None, source.config),
        rows=table.shape[0],
        columns=table.shape[1],
        flag=None if flag is None else bool(flag),
        flag_default=default,
        tied=tied,
        difference=difference,
        tokenizer_ids=_tokenizer_ids(source),
        notes=tuple(notes),
    )


def table_name(source: ModelSource, graph: TieGraph) -> str:
    """Canonical name of the tensor to take the shared table from: the copy that is stored with more bytes."""
    lookup, logits = source.role_tensors()
    if lookup is None or (logits is not None and graph.tied and logits.nbytes > lookup.nbytes):
        return source.family.logits_name
    return source.family.lookup_name


def refuse_unexportable(source: ModelSource, graph: TieGraph) -> None:
    """Refuse a model in which a role has no tensor of its own and may not share the other's.

    Raises:
        RefusedError: saying which tensor is missing.
    """
    if graph.verdict in (Verdict.HEAD_MISSING, Verdict.LOOKUP_MISSING):
        missing = "logits head" if graph.verdict is Verdict.HEAD_MISSING else "lookup table"
        raise RefusedError(
            f"the model is untied and its {missing} is not stored; a random one is never exported.",
            where=str(source.path),
            todo="Set tie_word_embeddings to true in config.json if the model is tied, or complete the checkpoint.",
        )


def arithmetic(source: ModelSource, graph: TieGraph) -> TieArithmetic:
    """Parameters in the table and in the body, from the stored tensors."""
    table = graph.rows * graph.columns
    copies = sum(info is not None for info in source.role_tensors())
    return TieArithmetic(table, source.parameters() - copies * table)


def compare_copies(source: ModelSource, first: TensorInfo, second: TensorInfo) -> CopyDifference:
    """Compare two stored tables row by row, in chunks."""
    rows, largest, squares, total = 0, 0.0, 0.0, 0.0
    for start in range(0, first.shape[0], _CHUNK_ROWS):
        chunk = slice(start, start + _CHUNK_ROWS)
        left, right = source.read_role(first, chunk), source.read_role(second, chunk)
        # Not a number is equal to itself here: the question is whether the copies hold the same.
        unequal = (left != right) & ~(np.isnan(left) & np.isnan(right))
        gap = np.abs(np.subtract(left, right, where=unequal, out=np.zeros_like(left)))
        rows += int(np.count_nonzero(unequal.any(axis=1)))
        largest = max(largest, float(gap.max(initial=0.0)))
        squares += float(np.square(gap, dtype=np.float64).sum())
        total += float(np.square(left, dtype=np.float64).sum())
    relative = (squares / total) ** 0.5 if squares and total else float(squares > 0)
    return CopyDifference(rows, largest, relative)


def _check_shapes(source: ModelSource, lookup: TensorInfo | None, logits: TensorInfo | None) -> None:
    for info in (lookup, logits):
        if info is not None and len(info.shape) != 2:
            raise RefusedError(f"'{info.name}' is no matrix (shape {list(info.shape)}).", where=str(source.path))
    if lookup and logits and lookup.shape != logits.shape:
        raise RefusedError(
            f"'{lookup.name}' is {list(lookup.shape)} but '{logits.name}' is {list(logits.shape)}.",
            where=str(source.path),
            todo="The checkpoint is inconsistent; resize both together.",
        )


def _verdict_of_copies(source: ModelSource, found: CopyDifference, lookup: TensorInfo, logits: TensorInfo) -> Verdict:
    if found.rows == 0:
        return Verdict.EQUAL_COPIES
    if lookup.dtype != logits.dtype and found.relative_rms < _ROUNDING_SLACK * _rounding(source, lookup, logits):
        return Verdict.TWO_PRECISIONS
    return Verdict.DIFFERENT


def _rounding(source: ModelSource, first: TensorInfo, second: TensorInfo) -> float:
    """Relative RMS error of the finer copy, some rows of it, rounded plainly to the coarser copy's type."""
    fine, coarse = sorted((first, second), key=lambda info: info.nbytes, reverse=True)
    kind = coarse.dtype.lower()
    if kind not in ggml.GGML_TYPES:
        return 0.0
    values = source.read_role(fine, slice(None, None, max(1, fine.shape[0] // _SAMPLE_ROWS)))
    equal = np.ones(values.shape[1], np.float32) if ggml.requires_importance(kind) else None
    gap = ggml.decode(ggml.encode(values, kind, equal), kind) - values
    return float(
        np.sqrt(np.square(gap, dtype=np.float64).sum() / max(np.square(values, dtype=np.float64).sum(), 1e-30))
    )


def _copy_notes(
    verdict: Verdict, found: CopyDifference, effective: bool, tied: bool, lookup: TensorInfo, logits: TensorInfo
) -> list[str]:
    saved = f"{min(lookup.nbytes, logits.nbytes) / 1e6:.1f} MB"
    if verdict is Verdict.EQUAL_COPIES and tied:
        return [f"'{logits.name}' repeats '{lookup.name}'; one table is exported and {saved} are saved."]
    if verdict is Verdict.EQUAL_COPIES:
        flag = "as asked" if effective else "the flag says untied"
        return [f"two equal copies are kept apart ({flag}); --tie shares them and saves {saved}."]
    if verdict is Verdict.TWO_PRECISIONS:
        gain = "the better copy is shared, which" if tied else "--tie keeps the better copy and"
        said = (
            f"'{lookup.name}' ({lookup.dtype}) and '{logits.name}' ({logits.dtype}) hold one matrix in two types, "
            f"{found.relative_rms:.1%} apart; {gain} saves {saved}."
        )
        return [said]
    said = "the flag says tied, but " if effective else ""
    return [f"{said}{_differ(found)}; the two tables are kept apart."]


def _differ(found: CopyDifference) -> str:
    return (
        f"{found.rows} rows differ between the copies (by up to {found.max_abs:.3g}, "
        f"{found.relative_rms:.2%} relative RMS)"
    )


def _missing(lookup: TensorInfo | None) -> Verdict:
    return Verdict.LOOKUP_MISSING if lookup is None else Verdict.HEAD_MISSING


def _missing_note(flag: bool | None, lookup: TensorInfo | None) -> str:
    said = "the flag says untied" if flag is not None else "the architecture is untied by default"
    return f"{said}, but no {'lookup table' if lookup is None else 'logits head'} is stored."


def _tokenizer_ids(source: ModelSource) -> int | None:
    folder = source.tokenizer_folder()
    return None if folder is None else count_ids(folder, str(source.path))
