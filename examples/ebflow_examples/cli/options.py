"""Arguments and options that more than one command takes, and the flags of ``ebflow train``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ebflow_examples.config import CHOICES, settings

Target = Annotated[
    str,
    typer.Argument(
        help="package.module:name or file.py:name, an object or a function without arguments; or a built-in model: "
        "deep, fc, cnn, glow, realnvp, maf, nsf.",
        show_default=False,
    ),
]
Folder = Annotated[Path, typer.Argument(help="Folder of a run, as `ebflow train --out` wrote it.", show_default=False)]
Weights = Annotated[str, typer.Option(help="best (by NLL), last, or average (the last moving average).")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, or auto.")]
Seed = Annotated[int, typer.Option(help="Where all randomness comes from.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Picture = Annotated[Path | None, typer.Option(help="Where the picture goes.", show_default="in the run folder")]
Header = Annotated[
    bool | None,
    typer.Option(
        "--header/--no-header",
        help="The first line of a .csv file holds names, or is data.",
        show_default="as it looks, which is said",
    ),
]
DataRoot = Annotated[str | None, typer.Option(help="Folder that holds MNIST and other data sets.")]
Data = Annotated[
    str | None, typer.Option(help="Data set or file; a built-in model is built for it.", show_default=False)
]
Shape = Annotated[
    str | None,
    typer.Option(help="Shape of one data point: 784, or 1,28,28.", show_default="as the model tells, or MNIST's"),
]
Linear = Annotated[str, typer.Option(help="Linear layers of a built-in model: full, lu, lower, upper, qr or svd.")]


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command one flag for each field of the configuration, in the place of its ``**flags``."""
    signature = inspect.signature(command, eval_str=True)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    flags = []
    for name, setting in settings().items():
        text, kind, default = setting.help, setting.kind, setting.default
        if name in CHOICES:
            text += f" One of {', '.join(CHOICES[name])}."
        shown = setting.auto if default is None else str(default)
        spelled = name.replace("_", "-")
        names = [f"--{spelled}/--no-{spelled}"] if kind is bool else [f"--{spelled}"]
        if kind is bool and default is not None:
            shown = names[0].split("/")[not default].removeprefix("--")
        option = typer.Option(*names, help=text, show_default=shown, rich_help_panel=setting.panel)
        annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
        flags.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own] + flags
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command
