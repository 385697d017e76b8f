"""Fig. 4: images drawn from a Glow that was trained by score matching, beside the same Glow by likelihood."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ebflow_plugin as ebf
from ebflow_examples import plots
from ebflow_examples.config import TrainConfig
from ebflow_examples.defaults import objective_of, settle
from ebflow_examples.reproduce import paper
from ebflow_examples.reproduce.common import Cell, CellResult, Options, workplace
from ebflow_examples.reproduce.output import Grid, Report, beside, column, grouped
from ebflow_examples.reproduce.timed import step_seconds
from ebflow_examples.runs import Run, build, likelihood
from ebflow_examples.streams import drawing_from
from ebflow_examples.training import Outcome, run_trainer
from ebflow_plugin.training.files import latest, read_first

MINUTES = 9.0
COUNT, COLUMNS = 64, 8
TEMPERATURES = {"warm": 1.0, "cool": 0.7}
CALIBRATION, TEST = 10_000, 2000  # rows
EVALUATIONS = 8  # with a checkpoint each: a stop loses an eighth of a run
# Each objective's stages: what of the recipe is its own, and its share of the time.
STAGES: dict[str, list[tuple[dict[str, Any], float]]] = {
    "ml": [({"loss": "ml", "lr": 1e-3}, 1.0)],
    "dsm": [({"loss": "dsm", "sigma": 0.1, "lr": 3e-4}, 1.0)],
}
ENERGY = 0.1  # the weight of the mean energy, for each pixel, in score matching
WORDS = {"ml": "likelihood", "dsm": "DSM"}


def cells(options: Options) -> list[Cell]:
    """One for each objective: a picture needs one seed."""
    inside = {"blocks": 1, "hidden": 8} if options.quick else {"blocks": 8, "hidden": 48}
    common = {"data": options.data, "seed": 0, "quick": options.quick, **inside}
    return [Cell("fig4", f"glow-{name}-seed0", {"objective": name, **common}) for name in STAGES]


def recipe(cell: Cell, data_root: str | None) -> TrainConfig:
    """The authors' Glow at a width that a CPU can train, and a rate for the thousands of steps that there are.

    Theirs: 16 blocks a level, 512 wide, Adam 1e-5 for 80 epochs. As theirs: 1 × 1 convolutions, split prior, bounded
    log-scales, LeakyReLU 0.1, the margin of 1e-6, clipping at 500.
    """
    told = {name: value for name, value in cell.settings.items() if name not in ("quick", "objective")}
    return TrainConfig(
        data_root=data_root, model="glow", activation="leaky_relu", device="cpu", clip_norm=500.0,
        batch_size=20 if cell.settings["quick"] else 32, limit=200 if cell.settings["quick"] else None, alpha=1e-6,
        whiten=False, calibrate="none", ema_decay=0.995, loss="ml", **told,
    )  # fmt: skip


def compute(cell: Cell, folder: Path, data_root: str | None) -> dict[str, Any]:
    """Trains, calibrates and draws images of the averaged weights."""
    quick = cell.settings["quick"]
    run = settle(build(recipe(cell, data_root)))
    began = workplace(cell, folder)
    seconds, steps, curve = 0.0, 0, []
    for place, (own, share) in enumerate(STAGES[cell.settings["objective"]]):
        assert run.image_shape is not None
        weight = 0.0 if own["loss"] == "ml" else ENERGY * prod(run.image_shape[1:])
        stage = replace(run, config=run.config.updated({**own, "energy_weight": weight}))
        found, taken = _train(stage, share * cell.seconds, began / f"stage{place}", 50 if quick else 1000)
        curve += [(steps + each["step"], each["nll"]) for each in found.history]
        steps, seconds = steps + found.steps, seconds + taken
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
    return {
        "raw_nll": raw.nll,
        "nll": calibrated.nll,
        "nll_error": calibrated.nll_error,
        "bits_per_dim": calibrated.bits_per_dim,
        "steps": steps,
        "seconds": seconds,
        "curve": curve,
        "recipe": run.config.to_dict(),
    }


def _train(run: Run, seconds: float, folder: Path, validation: int) -> tuple[Outcome, float]:
    """Trains for about so many seconds of the processor, whatever else it does; a run that was stopped goes on.

    The number of steps is settled by timing a few, and kept in the folder, so that the schedule of a run that goes on
    is that of the run that was begun. The model is left with the averaged weights that validation data like best: a
    score-matching loss can fall while they become less likely. Returns the seconds that it took, evaluations included;
    for a run that went on, those of its last part over the share of that part.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settled = folder / "steps.txt"
    if not settled.is_file():
        step = step_seconds(run)
        settled.write_text(f"{max(2, round(seconds / step))}\n", encoding="utf-8")
    steps = int(settled.read_text(encoding="utf-8"))
    run = replace(run, config=replace(run.config, steps=steps))
    files = latest(folder)
    left, began = steps - (int(read_first(files)["global_step"]) if files else 0), time.process_time()
    result = run_trainer(
        run,
        objective_of(run.model, run.config),
        folder,
        resume=True,
        progress=False,
        validation=run.data.validation[:validation],
        evaluate_every=-(-steps // EVALUATIONS),
    )
    lasted = folder / "seconds.txt"
    if left > 0:
        lasted.write_text(f"{(time.process_time() - began) * steps / left:.2f}\n", encoding="utf-8")
    ebf.load_best(run.model, folder)
    return result, float(lasted.read_text(encoding="utf-8"))


def report(options: Options, found: Sequence[CellResult], path: Path) -> Report:
    """NLL, and grids of images for each objective, beside the data."""
    lines, rows, panels = [], [], {}
    for (objective,), group in grouped(found, "objective").items():
        nll, raw, steps, seconds = (column(group, key) for key in ("nll", "raw_nll", "steps", "seconds"))
        theirs = paper.GLOW if options.data == "mnist" and objective == "dsm" else None
        lines.append([WORDS[objective], raw.text(1), beside(nll.text(1), theirs, 0), f"{steps.value:.0f}",
                      f"{seconds.value:.0f} s"])  # fmt: skip
        rows.append({"objective": objective, "raw_nll": raw, "nll": nll, "steps": steps, "seconds": seconds,
                     "paper": theirs})  # fmt: skip
        name = group[0].cell.name
        panels["test data"] = f"{name}-data.npy"
        for kind, temperature in TEMPERATURES.items():
            panels[f"by {WORDS[objective]}, temperature {temperature:g}"] = f"{name}-{kind}.npy"
    with plots.figure(path, 3.2 * max(1, len(panels)), 3.5) as figure:
        for place, (title, file) in enumerate(panels.items(), start=1):
            images = torch.from_numpy(np.load(options.folder / file))
            plots.images(figure.add_subplot(1, len(panels), place), images, COLUMNS, title)
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
