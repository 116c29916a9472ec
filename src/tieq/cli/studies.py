"""The commands that measure and write no model: ``probe`` and ``compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tieq.cli.app import FormatsOption, JsonOption, MaxKlOption, TargetSizeOption, app, emit

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="Alias, hub id, checkpoint folder or .gguf file.")]
BitsOption = Annotated[str | None, typer.Option(metavar="N,N,...", help="Widths. [default: 2,3,4,5,6,8]")]
CalibrationOption = Annotated[
    list[str] | None,
    typer.Option(help="Text file to calibrate on, or `samples` for text that the model writes; repeatable."),
]
NoCacheOption = Annotated[
    bool, typer.Option("--no-cache", help="Calibrate again, and keep nothing. [env var: TIEQ_NO_CACHE]")
]
TextOption = Annotated[list[Path] | None, typer.Option(help="Text file to measure on; repeatable.")]
EffortOption = Annotated[
    str, typer.Option(help="quick (no calibration), standard (a weight a column) or best (full cost; minutes).")
]


@app.command()
def probe(
    model: ModelArgument,
    bits: BitsOption = None,
    scheme: Annotated[list[str] | None, typer.Option(help="Scheme to try by name; repeatable.")] = None,
    effort: EffortOption = "standard",
    calibration: CalibrationOption = None,
    text: TextOption = None,
    no_cache: NoCacheOption = False,
    out: Annotated[Path | None, typer.Option(help="Folder. [default: artifacts/MODEL-probe]")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure what quantizing the table costs in each of its roles."""
    from tieq.cli.options import check_effort, parse_bits, study_out
    from tieq.cli.show_studies import show_probe
    from tieq.probing import probe as run

    found = run(
        model,
        () if bits is None and scheme else parse_bits(bits),
        scheme or (),
        effort=check_effort(effort),
        out=out or study_out(model, "probe"),
        calibration=calibration or (),
        evaluation=text,
        cache=not no_cache,
    )
    emit(found) if as_json else show_probe(found)


@app.command()
def compare(
    model: ModelArgument,
    bits: BitsOption = None,
    effort: EffortOption = "best",
    calibration: CalibrationOption = None,
    text: TextOption = None,
    no_cache: NoCacheOption = False,
    out: Annotated[Path | None, typer.Option(help="Folder. [default: artifacts/MODEL-compare]")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare one shared quantized table with two, at equal bits and at equal bytes."""
    from tieq.cli.options import check_effort, parse_bits, study_out
    from tieq.cli.show_studies import show_compare
    from tieq.comparing import compare as run

    found = run(
        model,
        parse_bits(bits),
        effort=check_effort(effort),
        out=out or study_out(model, "compare"),
        calibration=calibration or (),
        evaluation=text,
        cache=not no_cache,
    )
    emit(found) if as_json else show_compare(found)


@app.command()
def plan(
    model: ModelArgument,
    bits: Annotated[int | None, typer.Option(help="Price the plan of these bits instead of looking for one.")] = None,
    recipe: Annotated[str | None, typer.Option(help="Recipe file, or the name of a shipped one.")] = None,
    target_size: TargetSizeOption = None,
    max_kl: MaxKlOption = None,
    effort: Annotated[str | None, typer.Option(help="standard or best: how the export will round.")] = None,
    formats: FormatsOption = None,
    pre_tokenizer: Annotated[
        str | None, typer.Option(help="llama.cpp pre-tokenizer, where it is not recognized.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Quantize the choice, measure it by role, and correct it.")
    ] = True,
    calibration: CalibrationOption = None,
    text: TextOption = None,
    no_cache: NoCacheOption = False,
    out: Annotated[Path | None, typer.Option(help="Folder. [default: artifacts/MODEL-plan]")] = None,
    as_json: JsonOption = False,
) -> None:
    """Choose precisions for a size or a quality; `tieq export --plan` follows them.

    Without --target-size and --max-kl, price those of --bits or --recipe, 4 bits where neither is given.
    """
    from tieq.cli.options import build_budget, build_recipe, check_formats, study_out
    from tieq.cli.show_plan import show_plan
    from tieq.planning import plan as run

    budget = build_budget(target_size, max_kl, {"--bits": bits is not None})
    found = run(
        model,
        build_recipe(bits, effort, recipe, pre_tokenizer, keep_body=False),
        budget,
        check_formats(formats),
        out=out or study_out(model, "plan"),
        calibration=calibration or (),
        evaluation=text,
        cache=not no_cache,
        measured=measure,
    )
    emit(found) if as_json else show_plan(found)
