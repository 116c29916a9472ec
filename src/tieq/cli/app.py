"""Commands and their options; exit codes 0 done, 1 a gate failed, 2 bad input, 3 a runtime is missing."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tieq.errors import TieqError

app = typer.Typer(
    name="tieq",
    help="Quantize a shared embedding table once, well, and carry it through ONNX and GGUF, with proof.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # the coloured help alone takes longer than all the rest of `tieq --help`
)

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="Alias, hub id, checkpoint folder, .gguf or .onnx file, artifact folder.")
]
FormatsOption = Annotated[
    list[str] | None,
    typer.Option("--format", help="onnx, gguf, ort, litert; repeatable. [default: onnx and gguf]"),
]
TargetSizeOption = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Best quality in a file of at most 80MB, 76MiB, ...")
]
MaxKlOption = Annotated[float | None, typer.Option(help="Smallest file with at most this mean KL, nats per token.")]
DecodeOption = Annotated[
    bool, typer.Option("--decode-rate", help="Also measure tokens a second; needs an idle machine.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on stdout.")]


@app.command()
def inspect(model: ModelArgument, as_json: JsonOption = False) -> None:
    """Show what is tied, what it weighs, and what contradicts it."""
    from tieq.cli.show import show_inspection
    from tieq.inspection import inspect as run

    found = run(model)
    emit(found) if as_json else show_inspection(found)


@app.command()
def export(
    model: Annotated[str, typer.Option("--model", help="Alias, hub id, checkpoint folder or .gguf file.")],
    bits: Annotated[int | None, typer.Option(help="2, 4 or 8; for GGUF alone also 3, 5, 6. [default: 4]")] = None,
    effort: Annotated[
        str | None,
        typer.Option(help="quick (no calibration), standard (a weight a column) or best (full cost; minutes)."),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="Recipe file or the name of a shipped one (`tieq recipes`) instead of --bits.")
    ] = None,
    target_size: TargetSizeOption = None,
    max_kl: MaxKlOption = None,
    plan: Annotated[Path | None, typer.Option(help="A plan.json of `tieq plan`, instead of --bits.")] = None,
    formats: FormatsOption = None,
    out: Annotated[Path | None, typer.Option(help="Artifact folder. [default: artifacts/MODEL-RECIPE]")] = None,
    tie: Annotated[
        bool | None, typer.Option("--tie/--no-tie", help="Share equal tables that the flag calls untied, or do not.")
    ] = None,
    keep_body: Annotated[
        bool, typer.Option("--keep-body", help="GGUF alone: re-solve the table, keep every other byte.")
    ] = False,
    calibration: Annotated[
        list[str] | None,
        typer.Option(help="Text file to calibrate on, or `samples` for text that the model writes; repeatable."),
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Calibrate again, and keep nothing. [env var: TIEQ_NO_CACHE]")
    ] = False,
    text: Annotated[list[Path] | None, typer.Option(help="Text file to evaluate on; repeatable.")] = None,
    no_evaluation: Annotated[
        bool, typer.Option("--no-evaluation", help="Prove the files' structure and run nothing.")
    ] = False,
    decode_rate: DecodeOption = False,
    pre_tokenizer: Annotated[
        str | None, typer.Option(help="llama.cpp pre-tokenizer, where it is not recognized.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Quantize once, write the containers, validate them."""
    from tieq.budget import Budget
    from tieq.cli.options import (
        budget_recipe,
        build_budget,
        build_recipe,
        check_formats,
        default_out,
        without_evaluation,
    )
    from tieq.cli.show import show_export
    from tieq.pipeline import export as run
    from tieq.planning import export_choices, read_plan

    if keep_body and (target_size or max_kl is not None or plan):
        raise TieqError(
            "--keep-body changes the table alone, so there is nothing to plan.", todo="Give --bits instead."
        )
    budget = build_budget(target_size, max_kl, {"--plan": plan is not None, "--bits": bits is not None})
    containers = check_formats(formats)
    if plan is not None:
        planned = read_plan(plan)
        budget, containers = Budget(**planned["budget"]), containers or tuple(planned["formats"])
    chosen = budget_recipe(build_recipe(bits, effort, recipe, pre_tokenizer, keep_body), budget)
    if no_evaluation:
        chosen = without_evaluation(chosen, budget, texts=bool(text))
    where = out or default_out(model, chosen, keep_body)
    choices = export_choices(
        model,
        chosen,
        budget,
        plan,
        where,
        containers,
        tie=tie,
        calibration=calibration or (),
        evaluation=text,
        cache=not no_cache,
    )
    result = run(
        model,
        chosen,
        where,
        containers,
        choices=choices,
        tie=tie,
        keep_body=keep_body,
        calibration=calibration or (),
        evaluation=text,
        cache=not no_cache,
        decode=decode_rate,
    )
    if as_json:
        emit({"folder": str(result.folder), "manifest": result.manifest, "checks": result.checks})
    else:
        show_export(result)
    raise typer.Exit(0 if result.passed else 1)


@app.command()
def validate(
    path: Annotated[
        Path, typer.Argument(metavar="DIR_OR_FILE", help="Artifact folder, .onnx, .ort, .gguf or .tflite file.")
    ],
    runtime: Annotated[
        list[str] | None,
        typer.Option(help="Runtime to use (`tieq runtimes`), or `all`; repeatable. [default: onnxruntime, llama.cpp]"),
    ] = None,
    text: Annotated[list[Path] | None, typer.Option(help="Text file to run; repeatable.")] = None,
    reference: Annotated[
        str | None, typer.Option(help="Model to compare a single file with; an artifact knows its own.")
    ] = None,
    sequences: Annotated[int | None, typer.Option(help="Sequences to run. [default: 8, or the recipe's]")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens a sequence. [default: 256, or the recipe's]")] = None,
    max_kl: Annotated[float | None, typer.Option(help="Gate: mean KL, nats per token.")] = None,
    min_top1: Annotated[float | None, typer.Option(help="Gate: share of equal best tokens.")] = None,
    max_perplexity_ratio: Annotated[float | None, typer.Option(help="Gate: perplexity over the reference's.")] = None,
    max_size: Annotated[str | None, typer.Option(metavar="SIZE", help="Gate: a container's size, 80MB.")] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="Gate: an earlier manifest.json, whose numbers may not become worse.")
    ] = None,
    decode_rate: DecodeOption = False,
    min_decode_ratio: Annotated[
        float | None, typer.Option(min=0.01, help="Gate: decode rate as a share of the baseline's, same machine.")
    ] = None,
    undecided: Annotated[
        str | None, typer.Option(help="Where noise leaves a bound open: fail, pass or value. [default: fail]")
    ] = None,
    no_evaluation: Annotated[
        bool, typer.Option("--no-evaluation", help="Prove the files' structure and run nothing.")
    ] = False,
    update_report: Annotated[
        bool,
        typer.Option(
            "--report", help="Show this validation in the folder's report.html and report.md, in place of the export's."
        ),
    ] = False,
    junit: Annotated[Path | None, typer.Option(help="Also write the gates as JUnit XML.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Also append a summary in Markdown.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Prove from the files that the table is single, and measure what quantization cost."""
    from tieq.cli.options import build_gates, build_sampling, check_outputs, refuse_unmeasured, write_outputs
    from tieq.cli.show import show_checks
    from tieq.revalidate import validate_path

    check_outputs(junit, markdown)
    if update_report and (no_evaluation or not path.is_dir()):
        raise TieqError("--report shows what was run of an artifact folder.", where=str(path), todo="Leave it out.")
    if no_evaluation and (runtime or decode_rate):
        raise TieqError("--no-evaluation runs nothing.", todo="Leave --runtime and --decode-rate out.")
    refuse_unmeasured(no_evaluation, max_kl, min_top1, max_perplexity_ratio)
    found = validate_path(
        path,
        runtimes=runtime,
        texts=text,
        gates=build_gates(
            path,
            max_kl=max_kl,
            min_top1=min_top1,
            max_perplexity_ratio=max_perplexity_ratio,
            max_size=max_size,
            undecided=undecided,
        ),
        reference=reference,
        sampling=build_sampling(path, sequences, length),
        baseline=baseline,
        evaluate=not no_evaluation,
        decode=decode_rate,
        least_rate=min_decode_ratio,
    )
    emit(found) if as_json else show_checks(found)
    write_outputs(found, junit, markdown)
    if update_report:
        from tieq.report.folder import keep_validation

        keep_validation(path, found)
    raise typer.Exit(0 if found["passed"] else 1)


@app.command()
def recipes(
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of a recipe file.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the recipes that ship with tieq, for `--recipe NAME`."""
    from tieq.cli.show import show_recipes
    from tieq.recipe import load_recipe, recipe_schema, shipped_recipes

    if schema:
        typer.echo(recipe_schema(), nl=False)
        return
    rows = []
    for name, path in shipped_recipes().items():
        chosen = load_recipe(path)
        rows.append({"name": name, "description": chosen.description, "file": str(path)})
    emit({"recipes": rows}) if as_json else show_recipes(rows)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        from tieq import __version__

        typer.echo(__version__)
        raise typer.Exit()


def emit(document: dict[str, Any]) -> None:
    """Print a document as JSON."""
    from tieq.artifact import json_text

    typer.echo(json_text(document))


def main() -> None:
    """Entry point: errors become one sentence on stderr and their exit code."""
    # What is cancelled cleans up like what is interrupted.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app()
    except TieqError as error:
        print(f"tieq: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        print(f"tieq: {error}; nothing was put in place. Check the disk and its permissions.", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("tieq: interrupted; nothing was put in place", file=sys.stderr)
        sys.exit(130)
