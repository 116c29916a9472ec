"""The command that runs many exports: ``sweep``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tieq.cli.app import JsonOption, app, emit


@app.command()
def sweep(
    models: Annotated[Path, typer.Argument(metavar="MODELS", help="YAML list of models.")],
    recipes: Annotated[list[str], typer.Argument(metavar="RECIPES...", help="Recipe files, or names of shipped ones.")],
    runtime: Annotated[
        list[str] | None, typer.Option(help="Runtime to validate in; repeatable. [default: those of an export]")
    ] = None,
    formats: Annotated[
        list[str] | None, typer.Option("--format", help="Container to write; repeatable. [default: onnx and gguf]")
    ] = None,
    effort: Annotated[
        str | None, typer.Option(help="quick, standard or best, over the effort of every recipe.")
    ] = None,
    text: Annotated[list[Path] | None, typer.Option(help="Text file to evaluate on; repeatable.")] = None,
    calibration: Annotated[
        list[str] | None,
        typer.Option(help="Text file to calibrate on, or `samples` for text that the model writes; repeatable."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the sweep; an earlier run is gone on with.")] = Path(
        "artifacts/sweep"
    ),
    engine: Annotated[str, typer.Option(help="local (one cell after another) or ray (a cluster).")] = "local",
    address: Annotated[
        str | None, typer.Option(metavar="ADDR", help="Ray cluster: auto, HOST:PORT. [default: Ray on this machine]")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Ray: cells at once. [default: one a machine]")] = None,
    collect: Annotated[
        bool, typer.Option("--collect", help="Ray: fetch artifacts as bytes, where --out is not on shared storage.")
    ] = False,
    retries: Annotated[int, typer.Option(min=0, help="Runs more for a cell whose process or worker died.")] = 1,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="Stop a cell that takes longer.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Export and measure every model with every recipe; run it again to go on with what is not done."""
    from tieq.cli.options import check_effort, check_formats
    from tieq.cli.show_sweep import show_sweep
    from tieq.errors import TieqError
    from tieq.sweep import exit_code
    from tieq.sweep import sweep as run
    from tieq.sweep.engines import make_engine

    if timeout is not None and not 0 < timeout < float("inf"):
        raise TieqError(f"--timeout {timeout:g} is no time.", todo="Give seconds, more than 0.")
    found = run(
        models,
        recipes,
        out,
        formats=check_formats(formats),
        runtimes=runtime or (),
        texts=text or (),
        calibration=calibration or (),
        effort=None if effort is None else check_effort(effort),
        engine=make_engine(engine, address=address, workers=workers, retries=retries, timeout=timeout, collect=collect),
    )
    emit(found) if as_json else show_sweep(found)
    raise typer.Exit(exit_code(found))
