"""``tieq runtimes``: what can be validated on here; ``setup`` and ``remove`` for what lives in the user's cache."""

from __future__ import annotations

from typing import Annotated

import typer

from tieq.cli.app import JsonOption, app, emit

group = typer.Typer(
    help="List what can be validated on here, and how to get the rest.",
    invoke_without_command=True,
    rich_markup_mode=None,
)
app.add_typer(group, name="runtimes")

NamesArgument = Annotated[list[str], typer.Argument(metavar="NAME...", help="Runtimes by name, or `all`.")]


@group.callback()
def runtimes(context: typer.Context, as_json: JsonOption = False) -> None:
    """List what can be validated on here, and how to get the rest."""
    if context.invoked_subcommand is not None:
        return
    from tieq.cli.show import show_runtimes
    from tieq.runtimes import runtimes as known

    rows = []
    for name, adapter in known().items():
        state = adapter.availability()
        rows.append(
            {
                "name": name,
                "purpose": adapter.purpose,
                "files": " ".join(adapter.suffixes),
                "platform": adapter.platform,
                "default": adapter.default,
                "ready": state.ready,
                "state": state.state,
                "version": state.version,
                "how": state.how,
            }
        )
    emit({"runtimes": rows}) if as_json else show_runtimes(rows)


@group.command()
def setup(names: NamesArgument) -> None:
    """Fetch what a runtime needs into the user's cache, pinned and checked; nothing else is touched."""
    from tieq.runtimes import setup_names
    from tieq.runtimes.install import set_up

    for name in setup_names(names):
        set_up(name)
        typer.echo(f"{name}: ready")


@group.command()
def remove(names: NamesArgument) -> None:
    """Delete what `setup` fetched, but for what other runtimes use."""
    from tieq.runtimes import setup_names
    from tieq.runtimes.install import remove as run

    for name in setup_names(names):
        for folder in run(name):
            typer.echo(f"{name}: removed {folder}")
