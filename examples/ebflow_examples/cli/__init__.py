"""The commands of ``ebflow``. They read what was typed, and call functions that are imported when they are needed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated

import typer

from ebflow_examples.cli import measure, runs, start
from ebflow_examples.console import Commands, say

__all__ = ["app"]

app = typer.Typer(
    name="ebflow",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 fine, 1 a run that failed, 2 bad input, 130 stopped by Ctrl-C.",
)


def _version(wanted: bool) -> None:
    if wanted:
        say(f"ebflow {version('ebflow-plugin')}")
        raise typer.Exit


@app.callback()
def main(
    traceback: Annotated[bool, typer.Option("--traceback", help="Show the traceback of an error.")] = False,
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Train normalizing flows by energy instead of likelihood.

    Wraps the flows of nflows, normflows and zuko, skips the determinants of their linear layers, and trains them by
    score matching. Begin with **ebflow demo**.
    """


COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Start here": {"demo": start.demo, "inspect": start.inspect_target, "train": start.train},
    "On a run folder": {
        "eval": runs.evaluate,
        "sample": runs.sample,
        "impute": runs.impute,
        "density": runs.density,
    },
    "Measure": {"profile": measure.profile, "bench": measure.bench, "reproduce": measure.reproduce},
}
for panel, commands in COMMANDS.items():
    for name, command in commands.items():
        app.command(name, rich_help_panel=panel)(command)
