"""What a configuration leaves open, chosen for the data and the model; and the start of the model."""

from __future__ import annotations

import os
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

import ebflow_plugin as ebf
from ebflow_examples.config import LOSS_OPTIONS, TrainConfig
from ebflow_examples.console import first_process, note
from ebflow_examples.data import NAMES
from ebflow_examples.runs import LARGE, Run
from ebflow_examples.streams import drawing_from
from ebflow_plugin.errors import InputError, SingularError
from ebflow_plugin.plan.inputs import integer, positive

__all__ = ["check", "objective_of", "settle", "start_rows"]

STEPS = {True: 1000, False: 500}  # of images, and of other rows, whose models are deeper
CALIBRATION_ROWS = 20  # the fewest that EBFlow.calibrate takes: it holds out a tenth, and judges by two rows at least
CONV_ROWS = 2000  # images from which a conv is fitted: each has as many patches as pixels, and kernels few numbers


def check(config: TrainConfig) -> None:
    """Refuses numbers that cannot be, and options that would do nothing, before any work.

    Raises:
        InputError: For the first of them.
    """
    if config.lr is not None:
        positive("lr", config.lr)
    for name in ("batch_size", "steps", "epochs", "threads", "evaluate_every"):
        if getattr(config, name) is not None:
            integer(name, getattr(config, name))
    for name, loss in LOSS_OPTIONS.items():
        if getattr(config, name) is not None and config.loss != loss:
            having = "the loss that is chosen without --loss" if config.loss is None else f"loss {config.loss}"
            raise InputError(f"{name} is an option of {loss}, and does nothing with {having}; leave it out")


def settle(run: Run, started: tuple[bool, bool] | None = None) -> Run:
    """Chooses what the configuration left open, and starts the model: in closed form where wanted and possible.

    Arguments:
        run: The model and its data.
        started: Whether the model was started already by whitening, and by Gaussianising: no start follows.
    """
    check(run.config)
    config, levels = run.config, run.data.levels is not None
    needed = CALIBRATION_ROWS * int(os.environ.get("WORLD_SIZE", "1"))  # each process has its share of the rows
    few = len(run.data.train) < needed
    if few and config.calibration is not None:
        raise InputError(
            f"a calibration needs at least {needed} training rows, and {config.data} has {len(run.data.train)}: have "
            "more rows, or leave calibrate out, which does without"
        )
    images = levels or run.config.data.startswith("textures")
    chosen: dict[str, Any] = {}
    if config.data_root is not None:  # the file is read from other folders too
        chosen["data_root"] = str(Path(config.data_root).expanduser().absolute())
    if config.data not in NAMES:
        chosen["data"] = str(Path(config.data).expanduser().absolute())
    if started is not None or config.whiten is not False or config.gaussianize:
        chosen["whiten"], chosen["gaussianize"] = _started(run) if started is None else started
    closed_form = chosen.get("whiten", config.whiten)
    if not closed_form and started is None:
        with drawing_from(config.seed, "start"):  # ActNorms, so that the NLL of the start is known
            run.model.initialize(run.split("train")[:1000])
    if config.loss is None:
        chosen["loss"], log_det = usual_loss(run)
        chosen["log_det"] = log_det if config.log_det is None else config.log_det
    loss = chosen.get("loss", config.loss)
    if config.lr is None:
        chosen["lr"] = 3e-3 if not closed_form else 1e-4 if levels else 1e-3
        if chosen.get("gaussianize") and config.model == "deep":
            chosen["lr"] = 1e-5 if levels else 1e-4  # so near to the optimum larger steps are noise
        elif config.model == "conv":
            chosen["lr"] = 1e-3  # of some hundred parameters, which every pixel informs
    if config.batch_size is None:
        usual = (200 if config.model == "deep" else 100) if images else 500
        chosen["batch_size"] = min(usual, len(run.data.train))
    if config.steps is None and config.epochs is None:
        chosen["steps"] = STEPS[images]
    if config.calibrate is None:
        chosen["calibrate"] = "full" if (levels or closed_form) and not few else "none"
        if few and (levels or closed_form) and first_process():
            note(_few_rows(run, needed))
    if config.clip_norm is None and not images:
        chosen["clip_norm"] = 10.0
    if config.sigma is None and loss == "dsm":
        chosen["sigma"] = (1.0 if run.data.levels == 256 else 0.2) if images else 0.1
    if config.eps is None and loss == "fdssm":
        chosen["eps"] = 1.0 if images else 0.1
    return replace(run, config=replace(config, **chosen))


def _few_rows(run: Run, needed: int) -> str:
    data = run.data
    return (
        f"few rows: {len(data.train)} to train on, {len(data.validation)} to choose the best weights by, "
        f"{len(data.test)} to test; too few to calibrate, which needs {needed} to train on and is left out"
    )


def usual_loss(run: Run) -> tuple[str, str | None]:
    """A loss that makes the model better, by validation NLL, from the start that it has, and its ``log_det``.

    Score matching pays where linear layers are large and the start is poor. A Gaussianised ``fc`` is better than what
    DSM or SSM lead it to (its own likelihood is what is left to improve), and small layers have cheap determinants.
    """
    if run.config.model == "conv":
        return "ml", "auto"
    if run.config.model in ("fc", "deep"):
        return "ml", "relative" if run.config.linear == "full" and prod(run.data.event_shape) >= LARGE else None
    return "ml" if run.data.own_rows else "dsm", None


def objective_of(model: ebf.EBFlow, config: TrainConfig) -> ebf.objectives.Objective:
    """The objective of a configuration."""
    assert config.loss is not None
    options: dict[str, Any] = {}
    if config.loss not in ("ml", "sml"):
        options["energy_weight"] = config.energy_weight
    for name, loss in LOSS_OPTIONS.items():
        value = getattr(config, name)
        if config.loss == loss and value is not None:
            options[name] = value
    return ebf.make_objective(config.loss, model, **options)


def start_rows(run: Run) -> Tensor:
    """The training rows that a start in closed form is fitted to."""
    rows = run.split("train")
    return rows[:CONV_ROWS] if run.config.model == "conv" else rows


def _started(run: Run) -> tuple[bool, bool]:
    """Runs the start that is asked for, or the best that the model allows: whether it whitens, and bends."""
    config = run.config
    asked = bool(config.whiten or config.gaussianize)
    if not asked and run.data.truth is not None:  # points of the plane, and the like: far from any Gaussian
        return False, False
    for gaussianize in (True, False):
        if config.gaussianize not in (None, gaussianize):
            continue
        try:
            with drawing_from(config.seed, "start"):
                run.model.initialize(start_rows(run), whiten=True, gaussianize=gaussianize)
        except (InputError, SingularError):  # the model does not allow it, or there are too few rows
            if config.gaussianize or (asked and not gaussianize):
                raise
        else:
            return True, gaussianize
    return False, False
