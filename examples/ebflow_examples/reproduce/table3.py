"""Table 3 and Fig. 3: what averaging the weights (EMA) and matching after preprocessing (MaP) do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from ebflow_examples import plots
from ebflow_examples.console import Grid
from ebflow_examples.reproduce import paper, table2
from ebflow_examples.reproduce.common import Cell, CellResult, Options
from ebflow_examples.reproduce.output import Report, beside, column, grouped
from ebflow_examples.reproduce.table2_report import MODELS
from ebflow_examples.reproduce.timed import train_for
from ebflow_examples.runs import build, likelihood

MINUTES = 30.0
LOSSES = ("ssm", "dsm", "fdssm")
RECORDS = 40  # of the norm of the gradient
# Without MaP the noise of DSM and the finite difference of FDSSM are added to pixels in [0, 1], and what they push out
# of it has no logit. A margin of 0.05, and noise of 0.01 a pixel, keep all of them inside.
MARGIN, NOISE = 0.05, 0.01
Groups = dict[tuple[Any, ...], list[CellResult]]


def cells(options: Options) -> list[Cell]:
    """One for each model, objective, MaP and seed. EMA needs no run of its own: the same run has both weights."""
    return [
        Cell(
            "table3",
            f"{model}-{loss}-{'map' if after else 'pixels'}-seed{seed}",
            {"data": options.data, "model": model, "way": "paper", "loss": loss, "map": after, "seed": seed,
             "quick": options.quick, "margin": options.margin},
        )
        for seed in range(options.seeds)
        for model in MODELS
        for loss in LOSSES
        for after in (False, True)
    ]  # fmt: skip


def compute(cell: Cell, folder: Path, data_root: str | None) -> dict[str, Any]:
    """Trains the paper's way, and gives the NLL of the last weights and of their average."""
    settings = cell.settings
    config = replace(table2.recipe(cell, data_root), map=settings["map"])
    if not settings["map"] and settings["loss"] != "ssm":
        side = 8 if settings["data"] == "digits" else 28
        dsm = settings["loss"] == "dsm"
        config = replace(config, alpha=MARGIN, sigma=NOISE if dsm else None, eps=None if dsm else NOISE * side)
    run = build(config)
    trained = train_for(run, cell.seconds, evaluations=1, validation=None)
    test = run.data.test[:100] if settings["quick"] else run.data.test
    last = likelihood(run.model, test, config.seed).nll
    assert trained.result.ema is not None
    with trained.result.ema.applied():
        average = likelihood(run.model, test, config.seed).nll
    history = trained.result.history
    norms = [(record["step"], record["grad_norm"]) for record in history[:: -(-len(history) // RECORDS)]]
    return {"nll": average, "nll_last": last, "gradient_norms": norms, **trained.facts()}


def report(options: Options, found: Sequence[CellResult], path: Path) -> Report:
    """NLL with and without either, beside the paper's, a table for each model; the norm of the gradient of SSM."""
    groups = grouped(found, "model", "loss", "map")
    models = [model for model in MODELS if any(key[0] == model for key in groups)]
    tables = [table_of(options, model, groups) for model in models]
    draw(options, models, groups, path)
    notes = [
        "The paper's way in all else: its start, RMSProp, no calibration; its numbers are of converged models. With "
        "and without EMA is the same run: its last weights, and their average.",
        "Without MaP, DSM and FDSSM add noise to pixels in [0, 1], and the logit of what leaves the interval does not "
        f"exist. They have a margin of {MARGIN} and noise of {NOISE} a pixel there, against 1e-6 "
        "and the noise of Table 2 (in logits) with MaP. The paper does not say what it does about this.",
    ]
    return Report([grid for grid, _ in tables], [row for _, rows in tables for row in rows], notes, [path])


def table_of(options: Options, model: str, groups: Groups) -> tuple[Grid, list[dict[str, Any]]]:
    """A line for each of the four ways; the paper's numbers are those of MNIST."""
    lines, rows = [], []
    for after, averaged in product((False, True), repeat=2):
        line = ["yes" if averaged else "no", "yes" if after else "no"]
        way = "_".join(["ema"] * averaged + ["map"] * after) or "neither"
        for loss in LOSSES:
            group = groups.get((model, loss, after))
            theirs = paper.ABLATION[model].get(way, {}).get(loss) if options.data == "mnist" else None
            ours = None if group is None else column(group, "nll" if averaged else "nll_last")
            line.append("" if ours is None else beside(ours.text(1), theirs, 1))
            rows.append({"model": model, "ema": averaged, "map": after, "loss": loss, "nll": ours, "paper": theirs})
        lines.append(line)
    head = ("EMA", "MaP", *map(str.upper, LOSSES))
    return Grid(f"NLL of test data, {model} on {options.data} (the paper's)", head, lines, 2), rows


def draw(options: Options, models: Sequence[str], groups: Groups, path: Path) -> None:
    """The norm of the gradient of SSM with and without MaP, beside each other for the models."""
    colours = {"without MaP": plots.COLOURS["ml"], "with MaP": plots.COLOURS["score"]}
    with plots.figure(path, 6.6 * max(1, len(models)), 3.6) as figure:
        for place, model in enumerate(models, start=1):
            axes = figure.add_subplot(1, len(models), place)
            norms = {
                name: [each["gradient_norms"] for each in groups.get((model, "ssm", name == "with MaP"), ())]
                for name in colours
            }
            axes.set_yscale("log")
            plots.curves(axes, norms, lambda name, end: f"{name}  {end:.3g}", colours=colours)
            axes.set(title=f"SSM, {model} on {options.data}: norm of the gradient", xlabel="steps", ylabel="norm")
