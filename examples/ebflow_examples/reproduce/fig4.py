"""Fig. 4: images drawn by the inverse of a Glow that was trained by score matching."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ebflow_examples import plots
from ebflow_examples.config import TrainConfig
from ebflow_examples.reproduce import paper
from ebflow_examples.reproduce.common import Cell, Found, Options
from ebflow_examples.reproduce.output import Grid, Report, beside, column, grouped
from ebflow_examples.reproduce.timed import train_for
from ebflow_examples.runs import build, likelihood

MINUTES = 30.0
LOSSES = ("ssm", "dsm")
COUNT, COLUMNS = 64, 8


def cells(options: Options) -> list[Cell]:
    """One for each objective: a picture needs one seed."""
    return [
        Cell("fig4", f"glow-{loss}-seed0", {"data": options.data, "loss": loss, "seed": 0, "quick": options.quick})
        for loss in LOSSES
    ]


def recipe(cell: Cell, data_root: str | None) -> TrainConfig:
    """The paper's batch size and clipping; a larger learning rate, for the few steps that there are."""
    settings = cell.settings
    return TrainConfig(
        data=settings["data"], data_root=data_root, model="glow", loss=settings["loss"], seed=settings["seed"],
        device="cpu", lr=1e-3, clip_norm=500.0, batch_size=100,
    )  # fmt: skip


def compute(cell: Cell, folder: Path, data_root: str | None) -> dict[str, Any]:
    """Trains, and draws images of the best weights."""
    quick, config = cell.settings["quick"], recipe(cell, data_root)
    if quick:
        config = replace(config, limit=200, batch_size=20)
    run = build(config)
    trained = train_for(run, cell.seconds, evaluations=1 if quick else 6, validation=50 if quick else 1000)
    trained.result.load_best(run.model)
    drawn = run.model.sample(16 if quick else COUNT, generator=run.generator(config.seed), batch_size=COUNT)
    np.save(folder / f"{cell.name}.npy", run.as_images(drawn).numpy())
    found = likelihood(run.model, run.data.test[: 50 if quick else 2000], config.seed)
    return {"nll": found.nll, "nll_error": found.nll_error, "bits_per_dim": found.bits_per_dim, **trained.facts()}


def report(options: Options, found: Sequence[Found], path: Path) -> Report:
    """NLL, and a grid of images for each objective."""
    groups = grouped(found, "loss")
    lines, rows = [], []
    for (loss,), group in groups.items():
        nll, steps, seconds = (column(group, key) for key in ("nll", "steps", "seconds"))
        theirs = paper.GLOW if options.data == "mnist" and loss == "ssm" else None
        lines.append([loss.upper(), beside(nll.text(1), theirs, 0), f"{steps.value:.0f}", f"{seconds.value:.0f} s"])
        rows.append({"loss": loss, "nll": nll, "steps": steps, "seconds": seconds, "paper": theirs})
    with plots.figure(path, 4.4 * max(1, len(groups)), 4.7) as figure:
        for place, ((loss,), group) in enumerate(groups.items(), start=1):
            axes = figure.add_subplot(1, len(groups), place)
            images = torch.from_numpy(np.load(options.folder / f"{group[0].cell.name}.npy"))
            title = f"Glow by {loss.upper()}, NLL {group[0]['nll']:.0f}: samples"
            plots.images(axes, images, COLUMNS, title)
    notes = [
        "Samples by the inverse, at temperature 1. Sixteen blocks as in the paper, with networks of 32 channels (the "
        "paper does not say how wide its are), calibrated, the best weights by validation NLL; NLL of 2,000 test "
        "images. The paper trains for tens of epochs on a GPU."
    ]
    head = ("objective", "NLL (the paper's)", "steps", "training")
    return Report([Grid(f"Glow on {options.data}", head, lines)], rows, notes, [path])
