"""``tieq inspect``: what is tied, what it weighs, what contradicts it; for a model, a configuration or a container."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tieq.artifact import MANIFEST, read_json
from tieq.errors import TieqError
from tieq.records import Role, TieArithmetic
from tieq.source.families import family


def inspect(model: str) -> dict[str, Any]:
    """Describe the tie of MODEL as a plain dictionary.

    Args:
        model: alias, hub id, checkpoint folder, ``.gguf``, ``.onnx`` or ``.tflite`` file, artifact folder.

    Raises:
        TieqError: if it cannot be found or read.
    """
    path = Path(model).expanduser()
    if path.suffix in (".onnx", ".ort", ".tflite") and path.is_file():
        return {"model": model, "kind": "container", "containers": [_container(path)]}
    if path.is_dir() and (path / MANIFEST).exists():
        files = artifact_files(path)
        return {"model": model, "kind": "artifact", "containers": [_container(file) for file in files]}
    if not path.exists():
        from tieq.source.locate import known_config

        known = known_config(model.lower())
        if known is not None:
            return _from_config(*known)
    return _from_source(model)


def artifact_files(folder: Path) -> list[Path]:
    """The container files of an artifact folder, ONNX first.

    Raises:
        TieqError: if it holds none.
    """
    manifest = read_json(folder / MANIFEST)
    names = {f: f"{f}/model.{f}" for f in ("onnx", "ort", "gguf")} | {"litert": "litert/model.tflite"}
    files = [folder / names[name] for name in manifest.get("formats", []) if name in names]
    missing = [str(file) for file in files if not file.is_file()]
    if missing or not files:
        raise TieqError(
            f"the artifact's files are missing: {', '.join(missing) or 'no container at all'}.",
            where=str(folder),
            todo="Export again.",
        )
    return files


def _container(path: Path) -> dict[str, Any]:
    from tieq.validate.structure import prove

    return prove(path).to_json()


def _from_config(label: str, config: dict[str, Any]) -> dict[str, Any]:
    """Arithmetic of a well-known shape, from its configuration alone."""
    from tieq.source.reference import inventory

    parts = inventory(config)
    rows, columns = parts.shapes[parts.lookup]
    table = rows * columns
    tied = parts.tied_by_default
    found = TieArithmetic(table, parts.parameters - (1 if tied else 2) * table)
    entry = family(str(config["model_type"]))
    lookup, logits = (
        entry.use(role, name, {"hidden_size": columns, **config})
        for role, name in ((Role.LOOKUP, parts.lookup), (Role.LOGITS, parts.logits))
    )
    return {
        "model": label,
        "kind": "configuration",
        "origin": "configuration alone, no weights read",
        "tied": tied,
        "verdict": ("tied" if tied else "untied")
        + (" by the flag" if "tie_word_embeddings" in config else " by default"),
        "rows": rows,
        "columns": columns,
        "flag": config.get("tie_word_embeddings"),
        "tokenizer_ids": None,
        "lookup": _role(lookup),
        "logits": _role(logits),
        "notes": [],
        "arithmetic": _arithmetic(found),
    }


def _from_source(model: str) -> dict[str, Any]:
    from tieq.source.locate import open_source
    from tieq.source.tie import arithmetic, tie_graph

    source = open_source(model)
    graph = tie_graph(source)
    notes = list(graph.notes)
    if graph.tokenizer_ids is not None and graph.tokenizer_ids != graph.rows:
        notes.append(f"the table has {graph.rows} rows, the tokenizer {graph.tokenizer_ids} ids.")
    for info in filter(None, source.role_tensors()):
        bad = source.bad_rows(info)
        if bad:
            shown = ", ".join(map(str, bad[:8])) + (" ..." if len(bad) > 8 else "")
            notes.append(f"{len(bad)} rows of '{info.name}' hold NaN or infinity: {shown}; export refuses them.")
    return {
        "model": model,
        "kind": "model",
        "origin": source.origin,
        "tied": graph.tied,
        "verdict": graph.verdict.value,
        "rows": graph.rows,
        "columns": graph.columns,
        "flag": graph.flag,
        "tokenizer_ids": graph.tokenizer_ids,
        "lookup": _role(graph.lookup),
        "logits": _role(graph.logits),
        "stored": [
            {"name": info.name, "dtype": info.dtype, "bytes": info.nbytes}
            for info in source.role_tensors()
            if info is not None
        ],
        "notes": notes,
        "arithmetic": _arithmetic(arithmetic(source, graph)),
    }


def _role(use: Any) -> dict[str, Any]:
    return {"tensor": use.tensor, "multiplier": use.multiplier, "softcap": use.softcap, "bias": use.bias}


def _arithmetic(found: TieArithmetic) -> dict[str, Any]:
    return {
        "table": found.table,
        "body": found.body,
        "tied_total": found.tied_total,
        "untied_total": found.untied_total,
        "saved_share": found.saved_share,
    }
