"""Uniform and smooth noise between the grey levels: which of the two pays in equal time, by model and objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from ebflow_examples.config import CHOICES
from ebflow_examples.console import Grid
from ebflow_examples.plots import objective_name
from ebflow_examples.reproduce import table2
from ebflow_examples.reproduce.common import Cell, CellResult, Options
from ebflow_examples.reproduce.output import Mean, Report, columns, grouped, mean
from ebflow_examples.reproduce.table2_report import STOCHASTIC, draw

MINUTES = 40.0
compute = table2.compute  # as in Table 2
NOISES = CHOICES["dequantize"]
LOSSES = {"fc": ("ml", "ssm", "dsm"), "cnn": (STOCHASTIC, "ssm", "dsm")}


def cells(options: Options) -> list[Cell]:
    """For each noise those of Table 2, ours: one for each model, objective and seed, and those that find rates."""
    chosen = [
        table2.cell_of(options, "dequantization", "ours", model, loss, seed)
        for seed in range(options.seeds)
        for model, losses in LOSSES.items()
        for loss in losses
    ]
    return [_with_noise(cell, noise) for noise in NOISES for cell in table2.searched(options, chosen)]


def _with_noise(cell: Cell, noise: str) -> Cell:
    return replace(
        cell,
        name=f"{cell.name}-{noise}",
        settings={**cell.settings, "dequantize": noise},
        best_of=tuple(f"{name}-{noise}" for name in cell.best_of),
    )


def report(options: Options, found: Sequence[CellResult], path: Path) -> Report:
    """The bounds of both noises at the start and at the end, and their difference, paired by seed; curves."""
    groups = grouped(found, "model", "loss", "dequantize")
    lines, rows = [], []
    asked = {(each["model"], each["loss"]) for each in found}
    in_order = [(model, loss) for model, losses in LOSSES.items() for loss in losses if (model, loss) in asked]
    for (model, loss), noise in product(in_order, NOISES):
        group = groups.get((model, loss, noise))
        line = [model, objective_name(loss), noise]
        if group is None:
            lines.append([*line, "", "", "", "", "failed", ""])
            continue
        start = mean(each.result["curve"][0][1] for each in group)
        means = columns(group, "raw_nll", "nll", "steps")
        rate = group[0].result["recipe"]["lr"]
        apart = _paired(groups.get((model, loss, NOISES[0]), ()), group) if noise != NOISES[0] else None
        told = {"model": model, "loss": loss, "noise": noise, "lr": rate}
        rows.append({**told, "start_nll": start, **means, "difference": apart})
        nlls = [means["raw_nll"].text(1), means["nll"].text(1), apart.text(1) if apart else ""]
        lines.append([*line, f"{rate:g}", f"{means['steps'].mean:.0f}", f"{start.mean:.1f}", *nlls])
    head = (
        "model", "objective", "noise", "rate", "steps", "NLL of the start", "NLL, raw", "NLL, calibrated",
        "smooth − uniform, calibrated",
    )  # fmt: skip
    draw(options, found, path, "dequantize", {noise: f"{noise} noise, a bound" for noise in NOISES})
    grid = Grid(f"{options.data}, test data: bounds on the NLL of the grey levels", head, lines, 3)
    return Report([grid], rows, _notes(), [path])


def _paired(uniform: Sequence[CellResult], smooth: Sequence[CellResult]) -> Mean | None:
    """The mean over seeds of what smooth noise adds to the calibrated NLL; None without a seed of both."""
    before = {each["seed"]: each.result["nll"] for each in uniform}
    both = [each.result["nll"] - before[each["seed"]] for each in smooth if each["seed"] in before]
    return mean(both) if both else None


def _notes() -> list[str]:
    return [
        "Each NLL is the bound under the noise that the model was trained with, on the same quantity: the NLL of the "
        "integers. Uniform noise has the tighter bound, and a density that jumps at every level, which biases SSM. All "
        "is as in Table 2, ours: the start, each objective at the best rate of the grid for its noise, Adam, EMA, the "
        "best weights by validation NLL, one calibration in the time. The start is of validation data, calibrated. "
        "Differences are paired by seed."
    ]
