"""The stages in order, from a prepared job to a validated artifact folder."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tieq import artifact, text
from tieq.prepare import Job, prepare
from tieq.progress import say, stage
from tieq.quantize import BodyRun, QuantizedCheckpoint, quantize
from tieq.recipe import Precision, Recipe, dump_recipe
from tieq.records import TieGraph
from tieq.report.folder import write_report
from tieq.report.manifest import container_entries, file_entries, versions
from tieq.sampled import (
    allowed_ids,
    calibrate_job,
    calibration_request,
    describe_sequences,
    make_sequences,
    more_sequences,
)
from tieq.source.base import ModelSource
from tieq.source.reference import ReferenceModel, load_model
from tieq.source.tie import arithmetic
from tieq.source.tokenizer import TOKENIZER_FILES
from tieq.validate.baseline import measured_entries
from tieq.validate.run import Validation, validate

NOTHING_RUN = "nothing was run: the structure is proved, KL and what else a runtime measures are not known."
_UNUSED_TEXT = "the calibration text is not used: effort quick and models without a tokenizer measure nothing."
# Calibration tokens that the body is solved on: more of them gained nothing in a model of 135 M parameters.
BODY_TOKENS = 8192


@dataclasses.dataclass(frozen=True)
class ExportResult:
    """What an export made: the folder, its manifest and its checks as they stand in the files."""

    folder: Path
    manifest: dict[str, Any]
    checks: dict[str, Any]

    @property
    def passed(self) -> bool:
        """Whether every gate holds."""
        return bool(self.checks["passed"])


def export(
    model: str,
    recipe: Recipe,
    out: Path,
    formats: tuple[str, ...] | None = None,
    *,
    tie: bool | None = None,
    keep_body: bool = False,
    calibration: Iterable[str | Path] = (),
    evaluation: list[Path] | None = None,
    cache: bool = True,
    choices: Mapping[str, Precision] | None = None,
    decode: bool = False,
) -> ExportResult:
    """Quantize a model once, write its containers, validate them, and put the folder in place.

    Args:
        model: alias, hub id, folder or ``.gguf`` file.
        recipe: precision, sampling and gates.
        out: artifact folder; an earlier one of tieq's is replaced as a whole at the end.
        formats: containers to write, of onnx, ort, gguf, litert; None for the usual ones: onnx and gguf, or gguf where
            the body is kept.
        tie: see :func:`tieq.source.tie.tie_graph`.
        keep_body: re-solve a GGUF file's vocabulary tables alone and keep every other byte of tensors and metadata.
        calibration: text instead of the default one, see :func:`tieq.text.calibration_corpus`.
        evaluation: text files instead of the default evaluation text.
        cache: take statistics of the same model and text from the user's cache, and keep them there.
        choices: precisions by matrix name, over the recipe's; see :mod:`tieq.planning`.
        decode: whether the decode rate is measured too; it needs an idle machine.

    Raises:
        TieqError: on bad input, before anything is written to ``out``.
    """
    artifact.check_target(out)
    calibration = tuple(calibration)
    calibration_text = text.calibration_corpus(calibration)
    evaluation_text = text.file_corpus(evaluation) if evaluation else text.default_corpus(text.EVALUATION)
    job = prepare(model, recipe, formats, tie=tie, keep_body=keep_body, choices=choices)
    artifact.check_source(out, job.source.path)
    wanted = calibration_request(job, calibration_text)
    # Loaded where something is run: an export without calibration and evaluation never holds the float model.
    reference = Deferred(lambda: load_model(job.source, tied=job.graph.tied, table=job.table))
    evaluated = None
    if recipe.evaluation is not None:
        evaluated = make_sequences(job.source, job.tokenizer, job.graph.rows, evaluation_text, recipe.evaluation)
    job = _noted(job, unused_text=bool(calibration) and wanted is None)
    with artifact.staged(out) as folder:
        found = (
            None
            if wanted is None
            else calibrate_job(job, wanted, reference.get, full=None if choices is None else True, cache=cache)
        )
        if found is not None:
            about = {"text_sha256": calibration_text.sha256, "tokens_sha256": found.sequences.sha256}
            found.statistics.save(folder / "calibration.safetensors", about)
            job = dataclasses.replace(job, notes=job.notes + found.notes)
        _write_documents(job, folder)
        checkpoint_path = folder / "quantized.safetensors"
        statistics = None if found is None else found.statistics
        in_order = found is not None and recipe.effort == "best"
        body = BodyRun(reference.get(), found.sequences.spread(BODY_TOKENS)) if found is not None and in_order else None
        quantize(job.source, job.plan, job.floats, checkpoint_path, statistics, job.parts.logits, body)
        checkpoint_path.chmod(0o644)
        files, onnx_graph = _write_containers(job, reference.get, QuantizedCheckpoint(checkpoint_path), folder)
        validation = validate(
            files,
            sequences=evaluated,
            allowed=allowed_ids(job.tokenizer, job.graph.rows),
            reference=lambda ids: reference.get().logits(ids),
            gates=recipe.gates,
            expect_tied=job.graph.tied,
            input_file=None if job.kept is None else job.kept.path,
            more=lambda count: more_sequences(job, evaluation_text, count),
            decode=decode,
        )
        evaluated = validation.sequences
        calibrated = None if found is None else describe_sequences(found.sequences, calibration_text)
        used = {
            "calibration": calibrated or {"description": "none"},
            "evaluation": (
                {"description": "none"} if evaluated is None else describe_sequences(evaluated, evaluation_text)
            ),
        }
        manifest, checks = _finish(job, folder, validation, used, onnx_graph)
    return ExportResult(out, manifest, checks)


class Deferred:
    """The float model, loaded when it is first asked for."""

    def __init__(self, load: Callable[[], ReferenceModel]) -> None:
        self._load = load
        self._model: ReferenceModel | None = None

    def get(self) -> ReferenceModel:
        """The model."""
        if self._model is None:
            with stage("reference model"):
                self._model = self._load()
        return self._model


def _noted(job: Job, *, unused_text: bool) -> Job:
    """The job with notes on what it leaves out, which are said as well."""
    notes = [_UNUSED_TEXT] if unused_text else []
    if job.recipe.evaluation is None:
        notes.append(NOTHING_RUN)
    for note in notes:
        say(f"note: {note}")
    return dataclasses.replace(job, notes=(*job.notes, *notes))


def _write_documents(job: Job, folder: Path) -> None:
    (folder / "recipe.yaml").write_text(dump_recipe(job.recipe), encoding="utf-8")
    artifact.write_json(folder / "tie_graph.json", graph_json(job.source, job.graph))
    artifact.write_json(folder / "plan.json", job.plan.to_json())


def graph_json(source: ModelSource, graph: TieGraph) -> dict[str, Any]:
    """The tie graph with its arithmetic."""
    found = arithmetic(source, graph)
    derived = {
        "table": found.table,
        "body": found.body,
        "tied_total": found.tied_total,
        "untied_total": found.untied_total,
        "saved_share": found.saved_share,
    }
    return {**graph.to_json(), "arithmetic": derived}


def _write_containers(
    job: Job, load: Callable[[], ReferenceModel], checkpoint: QuantizedCheckpoint, folder: Path
) -> tuple[list[Path], str | None]:
    from tieq.export.gguf import write_gguf
    from tieq.export.gguf_keep import write_kept_gguf
    from tieq.export.litert import write_litert
    from tieq.export.onnx import write_onnx
    from tieq.export.ort import write_ort

    files, graph = [], None
    if {"onnx", "ort"} & set(job.plan.formats):
        (folder / "onnx").mkdir()
        onnx_file, graph = write_onnx(
            load,
            job.source.config,
            checkpoint,
            folder / "onnx",
            lookup=job.parts.lookup,
            logits=job.parts.logits,
            tied=job.graph.tied,
            accuracy_level=job.recipe.onnx.accuracy_level,
            generation=_own_generation(job),
        )
        files.append(onnx_file)
    if "ort" in job.plan.formats:
        (folder / "ort").mkdir()
        artifact.copy_files(folder / "onnx", folder / "ort", ("config.json", "generation_config.json"))
        files.append(write_ort(onnx_file, folder / "ort"))
    if "onnx" not in job.plan.formats and files:
        # The .ort file is made from the ONNX one, which nobody asked for.
        shutil.rmtree(folder / "onnx")
        files.remove(onnx_file)
    if job.layout is not None:
        (folder / "gguf").mkdir()
        if job.kept is not None:
            files.append(write_kept_gguf(checkpoint, job.layout, job.kept, folder / "gguf"))
        else:
            body = next((d.scheme for d in job.plan.decisions if d.role == "body"), "f16")
            files.append(write_gguf(checkpoint, job.layout, folder / "gguf", body))
    if "litert" in job.plan.formats:
        (folder / "litert").mkdir()
        roles = {"lookup": job.parts.lookup, "logits": job.parts.logits}
        integer = job.recipe.litert.activations == "int8"
        target = folder / "litert"
        files.append(write_litert(job.source.config, checkpoint, target, tied=job.graph.tied, integer=integer, **roles))
    for name in ("onnx", "ort", "litert"):
        if (folder / name).exists() and job.tokenizer is not None:
            artifact.copy_files(job.tokenizer.folder, folder / name, TOKENIZER_FILES)
    return files, graph


def _own_generation(job: Job) -> dict[str, Any] | None:
    """The model's own ``generation_config.json``, where there is one."""
    file = None if job.tokenizer is None else job.tokenizer.folder / "generation_config.json"
    return artifact.read_json(file) if file is not None and file.exists() else None


def _finish(
    job: Job, folder: Path, validation: Validation, used: dict[str, Any], onnx_graph: str | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    checks = json.loads(json.dumps(validation.to_json()))
    artifact.write_json(folder / "checks.json", checks)
    license_id = job.source.license_id()
    with concurrent.futures.ThreadPoolExecutor(1) as beside:
        # Gigabytes are hashed on either side.
        fingerprint = beside.submit(job.source.fingerprint)
        files = file_entries(folder)
    manifest = {
        "format": artifact.FORMAT_VERSION,
        "source": {
            "model": job.model,
            "label": job.source.label,
            "origin": job.source.origin,
            "fingerprint": fingerprint.result(),
            **({} if license_id is None else {"license": license_id}),
        },
        "tied": job.graph.tied,
        "body": "quantized" if job.kept is None else "kept",
        "formats": list(job.plan.formats),
        **({} if onnx_graph is None else {"onnx_graph": onnx_graph}),
        "recipe": {"name": job.recipe.name, "description": job.recipe.description},
        "effort": job.recipe.effort,
        **used,
        "notes": list(job.notes),
        "versions": versions(),
        "containers": container_entries(checks),
        "measured": measured_entries(checks),
        **({"machine": checks["machine"]} if "machine" in checks else {}),
        "files": files,
    }
    artifact.write_json(folder / "manifest.json", manifest)
    write_report(folder)
    return manifest, checks
