"""``ebflow demo``, ``inspect`` and ``train``: the commands to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ebflow_examples.cli.options import (
    Data,
    DataRoot,
    Header,
    Json,
    Linear,
    Seed,
    Shape,
    Target,
    with_settings,
)
from ebflow_examples.console import REFUSED, say, say_json


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture and the numbers.")] = Path("runs/demo"),
    seed: Seed = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds: shows that all of it works.")] = False,
) -> None:
    """See it at work in about a minute: where training by energy does not pay, and where it does.

    A small model in two lines; then a race on images of known density, D = 3072: exact maximum likelihood, the same
    without determinants, and score matching, ten seconds each, against the least NLL that any model can have. Leaves
    one picture, with curves and samples.

    **Examples**

    ```bash
    ebflow demo
    ebflow demo --out runs/tour --seed 1
    ```
    """
    from ebflow_examples.demo import run_demo

    run_demo(out, seed, quick)


def inspect_target(
    target: Target,
    data: Data = None,
    header: Header = None,
    shape: Shape = None,
    linear: Linear = "full",
    data_root: DataRoot = None,
    as_json: Json = False,
) -> None:
    """Show what wrapping a flow finds: its steps, which are linear, and what training by energy skips.

    Exit code 2 if a step cannot be part of an energy; the table says why.

    **Examples**

    ```bash
    ebflow inspect my_package.models:make_flow
    ebflow inspect model.py:flow --json
    ebflow inspect glow --data swirl
    ```
    """
    from ebflow_examples.targets import find_target, parse_shape

    report = find_target(
        target, data=data, shape=parse_shape(shape), linear=linear, data_root=data_root, header=header
    ).report()
    if as_json:
        say_json(
            {"steps": report.to_dicts(), "base": report.base, "adapter": report.adapter, "summary": report.summary}
        )
    else:
        say(str(report))
    if report.count("refused"):
        raise typer.Exit(REFUSED)


@with_settings
def train(
    config: Annotated[
        Path | None, typer.Option(help="TOML file with the settings below; flags override it.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Run folder.", show_default="runs/DATA-MODEL-LOSS, as far as given"),
    ] = None,
    resume: Annotated[
        bool | None,
        typer.Option("--resume/--fresh", help="Go on with the run in --out, or replace it.", show_default=False),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Train by reverse KL on an energy in place of data: double-well or phi4.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
    **flags: Any,
) -> None:
    """Train a model: exact NLL beside the loss, checkpoints, the best weights by NLL.

    Without flags: scikit-learn's digits, and four full layers that start in closed form. The paper's model: --model fc.
    Data: sine, swirl, checkerboard, autoregressive10, textures, textures16, digits, mnist, kmnist, cifar10,
    cifar10-jpeg, or a file or folder of yours. Models: deep, fc, cnn, glow, realnvp, maf, nsf. The settings go into the
    folder as config.toml.

    **Examples**

    ```bash
    ebflow train
    ebflow train --data swirl --loss ssm --out runs/swirl
    ebflow train --data mnist --data-root ~/data --epochs 5
    ebflow train --out runs/swirl --resume --steps 5000
    ebflow train --config runs/swirl/config.toml --seed 1
    ebflow train --target double-well
    torchrun --nproc-per-node 4 -m ebflow_examples train --data mnist --out runs/mnist
    ```
    """
    from ebflow_examples.console import first_process
    from ebflow_examples.training import configuration, free_folder, report, train
    from ebflow_plugin.errors import InputError

    given = {name: value for name, value in flags.items() if value is not None}
    if target is not None:
        from ebflow_examples import energies

        if config is not None or resume:
            raise InputError("--target runs from its own options, in one go: leave --config and --resume out")
        folder = out or Path("runs") / target
        found = energies.train_on(target, given, folder)
        say_json({"out": str(folder), **found}) if as_json else say(energies.report(found, folder))
        return
    settings = configuration(given, config, out, resume)
    folder = free_folder(settings) if out is None else out
    summary = train(settings, folder, resume=bool(resume))
    if not first_process():
        return
    if as_json:
        say_json({"out": str(folder), **summary})
    else:
        say(report(summary, folder))
