"""Fig. 4: images drawn from a Glow that was trained by score matching, beside the same Glow by likelihood."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ebflow_examples import plots
from ebflow_examples.config import TrainConfig
from ebflow_examples.console import Grid
from ebflow_examples.reproduce import paper
from ebflow_examples.reproduce.common import Cell, CellResult, Options
from ebflow_examples.reproduce.output import Report, beside, columns, grouped
from ebflow_examples.reproduce.timed import train_for
from ebflow_examples.runs import build, likelihood
from ebflow_examples.streams import drawing_from

MINUTES = 9.0
COUNT, COLUMNS = 64, 8
TEMPERATURES = {"warm": 1.0, "cool": 0.7}
CALIBRATION, TEST = 10_000, 2000  # rows
EVALUATIONS = 8
# What of the recipe is each objective's own.
OWN: dict[str, dict[str, Any]] = {"ml": {"loss": "ml", "lr": 1e-3}, "dsm": {"loss": "dsm", "sigma": 0.1, "lr": 3e-4}}
ENERGY = 0.1  # the weight of the mean energy, for each pixel, in score matching
WORDS = {"ml": "likelihood", "dsm": "DSM"}


def cells(options: Options) -> list[Cell]:
    """One for each objective: a picture needs one seed."""
    inside = {"blocks": 1, "hidden": 8} if options.quick else {"blocks": 8, "hidden": 48}
    common = {"data": options.data, "seed": 0, "quick": options.quick, **inside}
    return [Cell("fig4", f"glow-{name}-seed0", {"objective": name, **common}) for name in OWN]


def recipe(cell: Cell, data_root: str | None) -> TrainConfig:
    """The authors' Glow at a width that a CPU can train, and a rate for the thousands of steps that there are.

    Theirs: 16 blocks a level, 512 wide, Adam 1e-5 for 80 epochs. As theirs: 1 × 1 convolutions, split prior, bounded
    log-scales, LeakyReLU 0.1, the margin of 1e-6, clipping at 500.
    """
    told = {name: value for name, value in cell.settings.items() if name not in ("quick", "objective")}
    return TrainConfig(
        data_root=data_root, model="glow", activation="leaky_relu", device="cpu", clip_norm=500.0,
        batch_size=20 if cell.settings["quick"] else 32, limit=200 if cell.settings["quick"] else None, alpha=1e-6,
        whiten=False, calibrate="none", ema_decay=0.995, **OWN[cell.settings["objective"]], **told,
    )  # fmt: skip


def compute(cell: Cell, folder: Path, data_root: str | None) -> dict[str, Any]:
    """Trains, calibrates and draws images of the averaged weights that validation data like best.

    A score-matching loss can fall while the weights become less likely.
    """
    quick = cell.settings["quick"]
    run = build(recipe(cell, data_root))
    if run.config.loss == "dsm":
        weight = ENERGY * prod(run.data.event_shape[1:])
        run = replace(run, config=replace(run.config, energy_weight=weight))
    trained = train_for(run, cell.seconds, evaluations=EVALUATIONS, validation=50 if quick else 1000)
    run = trained.run
    trained.result.load_best(run.model)
    rows = run.data.test[: 50 if quick else TEST]
    raw = likelihood(run.model, rows, run.config.seed)
    with drawing_from(run.config.seed, "calibration"):
        run.model.calibrate(run.split("train")[:CALIBRATION], "full")
    calibrated = likelihood(run.model, rows, run.config.seed)
    count = 16 if quick else COUNT
    for name, temperature in TEMPERATURES.items():
        drawn = run.model.sample(
            count, temperature=temperature, generator=run.generator(run.config.seed, "samples"), batch_size=COUNT
        )
        np.save(folder / f"{cell.name}-{name}.npy", run.as_images(drawn).numpy())
    np.save(folder / f"{cell.name}-data.npy", run.as_images(run.data.test[:count]).numpy())
    return {"raw_nll": raw.nll, **calibrated.to_dict(), **trained.facts()}


def report(options: Options, found: Sequence[CellResult], path: Path) -> Report:
    """NLL, and grids of images for each objective, beside the data."""
    lines, rows, panels = [], [], {}
    for (objective,), group in grouped(found, "objective").items():
        means = columns(group, "raw_nll", "nll", "steps", "seconds")
        theirs = paper.GLOW if options.data == "mnist" and objective == "dsm" else None
        nlls = [means["raw_nll"].text(1), beside(means["nll"].text(1), theirs, 0)]
        lines.append([WORDS[objective], *nlls, f"{means['steps'].mean:.0f}", f"{means['seconds'].mean:.0f} s"])
        rows.append({"objective": objective, **means, "paper": theirs})
        name = group[0].cell.name
        panels["test data"] = f"{name}-data.npy"
        for kind, temperature in TEMPERATURES.items():
            panels[f"by {WORDS[objective]}, temperature {temperature:g}"] = f"{name}-{kind}.npy"
    plots.save_panels(path, {title: options.folder / file for title, file in panels.items()}, COLUMNS, 3.2)
    head = ("objective", "NLL", "calibrated (the paper's)", "steps", "training")
    return Report([Grid(f"Glow on {options.data}", head, lines)], rows, _notes(found), [path] if panels else [])


def _notes(found: Sequence[CellResult]) -> list[str]:
    sizes = {(each["blocks"], each["hidden"]) for each in found}
    built = "".join(f"Two levels of {blocks} blocks, networks {width} wide (the authors: 16 and 512). "
                    for blocks, width in sizes)  # fmt: skip
    return [
        built + "ActNorm, 1 x 1 convolution, affine coupling with log-scales within ±2; half of the channels are split "
        "off between the levels with a normal prior given the other half. Margin 1e-6; Adam with a cosine, 1e-3 "
        "for likelihood, 3e-4 for DSM, which has the authors' σ = 0.1, and the mean energy with their weight, "
        f"{ENERGY:g} for each pixel; the averaged weights with the best validation NLL, calibrated by "
        f"{CALIBRATION:,} training images; NLL of {TEST:,} test images. Samples by the inverse. The paper "
        "trains 80 epochs on a GPU.",
    ]
