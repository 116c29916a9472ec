"""``tieq validate``: prove and run an artifact folder or a container file that anybody may have written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from tieq import text
from tieq.artifact import export_manifest, read_json
from tieq.errors import TieqError
from tieq.inspection import artifact_files
from tieq.progress import say, stage
from tieq.recipe import Gates, Sampling, load_recipe
from tieq.records import Check, TieGraph
from tieq.report.manifest import file_entries
from tieq.runtimes import ALL, check_ready, runtime
from tieq.sampled import allowed_ids, describe_sequences, make_sequences
from tieq.source.base import ModelSource
from tieq.source.locate import open_source
from tieq.source.reference import load_model
from tieq.source.tie import table_name, tie_graph
from tieq.source.tokenizer import TextTokenizer
from tieq.validate.baseline import refuse_baseline, refuse_rate, regression_checks
from tieq.validate.measure import Reference
from tieq.validate.run import Validation, machine, validate
from tieq.validate.structure import prove


def validate_path(
    path: Path,
    *,
    runtimes: list[str] | None = None,
    texts: list[Path] | None = None,
    gates: Gates | None = None,
    reference: str | None = None,
    sampling: Sampling | None = None,
    baseline: Path | None = None,
    evaluate: bool = True,
    decode: bool = False,
    least_rate: float | None = None,
) -> dict[str, Any]:
    """Validate an artifact folder, an ``.onnx`` or a ``.gguf`` file, by its gates and against an earlier manifest.

    Args:
        path: what to validate.
        runtimes: runtime names, None for those that take the files.
        texts: text files to run instead of the default text.
        gates: bounds that replace those of the artifact's recipe.
        reference: model to compare with; an artifact knows its own.
        sampling: sequences and length instead of the recipe's.
        baseline: an earlier ``manifest.json``, whose numbers may not become worse by more than their noise.
        evaluate: whether anything is run; else the structure is proved.
        decode: whether the decode rate is measured too.
        least_rate: share of the baseline's decode rate that has to be reached.

    Returns:
        The document that ``checks.json`` holds, with the text that was used.

    Raises:
        TieqError: if the path is no such thing or the reference is another than the artifact was made from.
    """
    # A wrong name, or a runtime that is missing, is said before the reference model is loaded.
    named = [runtime(name).name for name in runtimes or [] if name != ALL]
    if evaluate:
        check_ready(named)
    earlier = None if baseline is None else read_json(baseline)
    if least_rate is not None and earlier is None:
        raise TieqError("--min-decode-ratio compares with a baseline.", todo="Name one with --baseline.")
    if earlier is not None:
        refuse_baseline(earlier, export_manifest(path)["source"]["fingerprint"] if path.is_dir() else None)
        if sampling is None:
            # An export may have run more text than its recipe says, where a bound was close.
            used = earlier["evaluation"]
            sampling = Sampling(sequences=used["sequences"], length=used["length"])
        if least_rate is not None:
            refuse_rate(earlier, machine())
    if not evaluate:
        if earlier is not None:
            raise TieqError("--baseline compares what is measured.", todo="Leave --no-evaluation out.")
        return _prove(path, gates)
    run = _Run(runtimes, texts, gates, reference, sampling, decode or least_rate is not None, earlier is None)
    found = _validate_artifact(path, run) if path.is_dir() else _validate_file(path, run)
    if earlier is None:
        return found
    worse = [dataclasses.asdict(check) for check in regression_checks(found, found["evaluation"], earlier, least_rate)]
    passed = found["passed"] and all(check["passed"] for check in worse)
    return {**found, "passed": passed, "checks": [*found["checks"], *worse]}


def _prove(path: Path, gates: Gates | None) -> dict[str, Any]:
    """The structure and size of an artifact's files or of one file, running nothing."""
    tied: bool | None = None
    more: tuple[Check, ...] = ()
    files, kept = [path], None
    if path.is_dir():
        manifest = export_manifest(path)
        tied, more = bool(manifest["tied"]), (_files_check(path, manifest),)
        files, gates = artifact_files(path), gates or load_recipe(path / "recipe.yaml").gates
        if manifest.get("body") == "kept":
            kept = open_source(manifest["source"]["model"], gguf=True).path
    found = validate(
        files,
        sequences=None,
        allowed=None,
        reference=None,
        gates=gates or Gates(),
        expect_tied=tied,
        input_file=kept,
    )
    found = dataclasses.replace(found, checks=(*more, *found.checks))
    return {**json.loads(json.dumps(found.to_json())), "evaluation": {"description": "none"}}


@dataclasses.dataclass(frozen=True)
class _Run:
    """How something is validated; see :func:`validate_path`. ``extend``: more text where noise leaves a bound open."""

    runtimes: list[str] | None
    texts: list[Path] | None
    gates: Gates | None
    reference: str | None
    sampling: Sampling | None
    decode: bool
    extend: bool


def _validate_file(path: Path, run: _Run) -> dict[str, Any]:
    if not path.is_file():
        raise TieqError("does not exist.", where=str(path), todo="Give an artifact folder, an .onnx or a .gguf file.")
    structure = prove(path)
    source = None if run.reference is None else open_source(run.reference)
    tokenizer = _tokenizer(path, source)
    chosen = run.sampling or Sampling()
    corpus = text.file_corpus(run.texts) if run.texts else text.default_corpus(text.EVALUATION)

    def cut(count: int) -> text.Sequences:
        return text.cut_sequences(corpus, tokenizer, count, chosen.length)

    if source is None:
        say("note: no --reference is named, so KL and top-1 are not measured")
    found = validate(
        [path],
        sequences=cut(chosen.sequences),
        allowed=allowed_ids(tokenizer, structure.rows),
        reference=_reference(source),
        gates=run.gates or Gates(),
        wanted=run.runtimes,
        more=cut if run.extend else None,
        decode=run.decode,
    )
    return _document(found, corpus)


def _document(found: Validation, corpus: text.Corpus) -> dict[str, Any]:
    assert found.sequences is not None
    return {**json.loads(json.dumps(found.to_json())), "evaluation": describe_sequences(found.sequences, corpus)}


def _validate_artifact(folder: Path, run: _Run) -> dict[str, Any]:
    manifest = export_manifest(folder)
    recipe = load_recipe(folder / "recipe.yaml")
    kept = manifest.get("body") == "kept"
    try:
        source = open_source(run.reference or manifest["source"]["model"], gguf=kept)
    except TieqError as error:
        raise TieqError(
            f"the model it was made from cannot be opened ({error.what})",
            where=str(folder),
            todo="Name it with --reference.",
        ) from error
    if source.fingerprint() != manifest["source"]["fingerprint"]:
        raise TieqError(
            f"'{source.label}' has other weights than the artifact was made from.",
            where=str(folder),
            todo="Name the original with --reference.",
        )
    # Copies that were shared make another reference than copies kept apart.
    graph = tie_graph(source, tie=bool(manifest["tied"]) or None)
    source.config["vocab_size"] = graph.rows
    files = artifact_files(folder)
    tokenizer_folder = source.tokenizer_folder()
    tokenizer = None if tokenizer_folder is None else TextTokenizer(tokenizer_folder, str(source.path))
    corpus = text.file_corpus(run.texts) if run.texts else text.default_corpus(text.EVALUATION)
    chosen = run.sampling or recipe.evaluation or Sampling()

    def cut(count: int) -> text.Sequences:
        sampling = Sampling(sequences=count, length=chosen.length)
        return make_sequences(source, tokenizer, graph.rows, corpus, sampling)

    found = validate(
        files,
        sequences=cut(chosen.sequences),
        allowed=allowed_ids(tokenizer, graph.rows),
        reference=_load(source, graph),
        gates=run.gates or recipe.gates,
        wanted=run.runtimes,
        expect_tied=bool(manifest["tied"]),
        input_file=source.path if kept else None,
        more=cut if run.extend else None,
        decode=run.decode,
    )
    return _document(dataclasses.replace(found, checks=(_files_check(folder, manifest), *found.checks)), corpus)


def _files_check(folder: Path, manifest: dict[str, Any]) -> Check:
    """Whether every file is the one that the manifest lists, by SHA-256."""
    now = {entry["path"]: entry["sha256"] for entry in file_entries(folder)}
    changed = [entry["path"] for entry in manifest["files"] if now.get(entry["path"]) != entry["sha256"]]
    value = "unchanged" if not changed else f"{len(changed)} changed"
    return Check("files", "manifest.json", value, "unchanged", not changed, ", ".join(changed))


def _reference(source: ModelSource | None) -> Reference | None:
    if source is None:
        return None
    return _load(source, tie_graph(source))


def _load(source: ModelSource, graph: TieGraph) -> Reference:
    with stage("reference model"):
        return load_model(source, tied=graph.tied, table=table_name(source, graph)).logits


def _tokenizer(path: Path, source: ModelSource | None) -> TextTokenizer:
    """The reference's tokenizer, else the one in or beside the file."""
    if source is not None:
        return TextTokenizer(source.tokenizer_folder(), str(source.path))
    if path.suffix == ".gguf":
        from tieq.source.gguf_source import GgufSource

        own = GgufSource(path)
        return TextTokenizer(own.tokenizer_folder(), str(path))
    folder = path.parent if (path.parent / "tokenizer.json").exists() else None
    return TextTokenizer(folder, str(path))
