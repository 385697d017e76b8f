"""Table 3 and Fig. 3: what averaging the weights (EMA) and matching after preprocessing (MaP) do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ebflow_examples import plots
from ebflow_examples.reproduce import paper, table2
from ebflow_examples.reproduce.common import Cell, Found, Options
from ebflow_examples.reproduce.curves import bands
from ebflow_examples.reproduce.output import Grid, Report, beside, column, grouped
from ebflow_examples.reproduce.timed import train_for
from ebflow_examples.runs import build, likelihood

MINUTES = 30.0
LOSSES = ("ssm", "dsm", "fdssm")
RECORDS = 40  # of the norm of the gradient
# Without MaP the noise of DSM and the finite difference of FDSSM are added to pixels in [0, 1], and what they push out
# of it has no logit. A margin of 0.05, and noise of 0.01 a pixel, keep all of them inside.
MARGIN, NOISE = 0.05, 0.01


def cells(options: Options) -> list[Cell]:
    """One for each objective, MaP and seed. EMA needs no run of its own: the same run has both weights."""
    return [
        Cell(
            "table3",
            f"fc-{loss}-{'map' if after else 'pixels'}-seed{seed}",
            {"data": options.data, "model": "fc", "way": "paper", "loss": loss, "map": after, "seed": seed,
             "quick": options.quick},
        )
        for seed in range(options.seeds)
        for loss in LOSSES
        for after in (False, True)
    ]  # fmt: skip


def compute(cell: Cell, folder: Path, data_root: str | None) -> dict[str, Any]:
    """Trains the paper's way, and gives the NLL of the last weights and of their average."""
    settings, quick = cell.settings, cell.settings["quick"]
    config = replace(table2.recipe(cell, data_root), map=settings["map"])
    if not settings["map"] and settings["loss"] != "ssm":
        side = 8 if settings["data"] == "digits" else 28
        config = replace(config, alpha=MARGIN, sigma=NOISE, eps=NOISE * side)
    run = build(config)
    trained = train_for(run, cell.seconds, evaluations=2 if quick else RECORDS, validation=None)
    test = run.data.test[:100] if quick else run.data.test
    last = likelihood(run.model, test, config.seed).nll
    assert trained.result.ema is not None
    with trained.result.ema.applied():
        average = likelihood(run.model, test, config.seed).nll
    norms = [(record["step"], record["grad_norm"]) for record in trained.result.history]
    return {"nll": average, "nll_last": last, "gradient_norms": norms, **trained.facts()}


def report(options: Options, found: Sequence[Found], path: Path) -> Report:
    """NLL with and without either, beside the paper's; the norm of the gradient of SSM."""
    groups = grouped(found, "loss", "map")
    known = options.data == "mnist"
    lines, rows = [], []
    for after in (False, True):
        for averaged in (False, True):
            line = ["yes" if averaged else "no", "yes" if after else "no"]
            for loss in LOSSES:
                group = groups.get((loss, after))
                theirs = paper.ABLATION.get((averaged, after), {}).get(loss) if known else None
                ours = None if group is None else column(group, "nll" if averaged else "nll_last")
                line.append("" if ours is None else beside(ours.text(1), theirs, 1))
                rows.append({"ema": averaged, "map": after, "loss": loss, "nll": ours, "paper": theirs})
            lines.append(line)
    norms = {
        f"{'with' if after else 'without'} MaP": (
            plots.COLOURS["score" if after else "ml"],
            [each.result["gradient_norms"] for each in groups["ssm", after]],
        )
        for after in (False, True)
        if ("ssm", after) in groups
    }
    pictures = []
    if norms:
        with plots.figure(path, 5.6, 3.6) as figure:
            bands(
                figure.subplots(), norms, f"SSM, fc on {options.data}: norm of the gradient", "steps", "norm", log=True
            )
        pictures.append(path)
    head = ("EMA", "MaP", *map(str.upper, LOSSES))
    notes = [
        "The paper's way in all else: its start, RMSProp, no calibration; its numbers are of converged models. With "
        "and without EMA is the same run: its last weights, and their average.",
        "Without MaP, DSM and FDSSM add noise to pixels in [0, 1], and the logit of what leaves the interval does not "
        f"exist. They have a margin of {MARGIN} and noise of {NOISE} a pixel there, against 1e-6 "
        "and 1 (in logits) with MaP. The paper does not say what it does about this.",
    ]
    return Report(
        [Grid(f"NLL of test data, fc on {options.data} (the paper's)", head, lines, 2)], rows, notes, pictures
    )
