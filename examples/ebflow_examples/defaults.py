"""What a configuration leaves open, chosen for the data and the model; and the start of the model."""

from __future__ import annotations

import os
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from torch import Generator, Tensor

import ebflow_plugin as ebf
from ebflow_examples.config import LOSS_OPTIONS, NOISED, TrainConfig
from ebflow_examples.console import first_process, note
from ebflow_examples.data import NAMES, DataSet
from ebflow_examples.runs import LARGE, Run
from ebflow_examples.streams import drawing_from
from ebflow_examples.synthetic import PLANE, SMOOTHING
from ebflow_plugin.errors import InputError, SingularError
from ebflow_plugin.objectives.base import DrawnObjective
from ebflow_plugin.objectives.schedule import AddedNoise
from ebflow_plugin.options import integer, positive
from ebflow_plugin.plan.plan import Plan

STEPS = {True: 1000, False: 500}  # of images, and of other rows, whose models are deeper
CALIBRATION_ROWS = 20  # the fewest that EBFlow.calibrate takes: it holds out a tenth, and judges by two rows at least
SHRINKING_SHARE = 0.6  # of a run: the share in which noise shrinks to its last value
SHRINKING_STEPS, SHRINKING_BATCH, SHRINKING_RATE, LATENT_WEIGHT = 8000, 256, 2e-3, 1.0  # of the two-dimensional sets
# Gradients of second derivatives have heavy tails: without a little likelihood mass leaks in spite of the noise.
ML_WEIGHTS = {"ssm": 0.1, "fdssm": 0.1}
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
    for name, losses in LOSS_OPTIONS.items():
        if getattr(config, name) is not None and config.loss not in losses:
            having = "the loss that is chosen without --loss" if config.loss is None else f"loss {config.loss}"
            raise InputError(
                f"{name} is an option of {', '.join(losses)}, and does nothing with {having}; leave it out"
            )
    if config.ml_weight is not None and not 0 <= config.ml_weight <= 1:
        raise InputError(f"ml_weight is a share of the loss, from 0 to 1, got {config.ml_weight:g}")
    if config.shrink is not None and config.shrink < 0:
        raise InputError(f"shrink must be at least 0, got {config.shrink}")
    if config.shrink and config.loss != "dsm" and config.sigma is None and config.data not in PLANE:
        raise InputError("shrink needs a sigma, to which the noise shrinks")


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
    shrinks = config.data in PLANE and loss in NOISED and config.shrink != 0 and (config.sigma is None or config.shrink)
    rate = (SHRINKING_RATE if shrinks else 3e-3) if not closed_form else 1e-4 if levels else 1e-3
    if chosen.get("gaussianize") and config.model == "deep":
        rate = 1e-5 if levels else 1e-4  # so near to the optimum larger steps are noise
    elif config.model == "conv":
        rate = 1e-3  # of some hundred parameters, which every pixel informs
    rows = (200 if config.model == "deep" else 100) if images else SHRINKING_BATCH if shrinks else 500
    sigma = (1.0 if run.data.levels == 256 else 0.2) if images else SMOOTHING if config.data in PLANE else 0.1
    usual = {
        "lr": rate,
        "batch_size": min(rows, len(run.data.train)),
        "steps": None if config.epochs is not None else SHRINKING_STEPS if shrinks else STEPS[images],
        "calibrate": "full" if (levels or closed_form) and not few else "none",
        "clip_norm": None if images else 10.0,
        "sigma": sigma if shrinks or loss == "dsm" else None,
        "eps": (1.0 if images else 0.1) if loss == "fdssm" else None,
        "latent_weight": LATENT_WEIGHT if shrinks else None,
        "ml_weight": ML_WEIGHTS.get(str(loss)) if shrinks else None,
    }
    chosen |= {name: value for name, value in usual.items() if getattr(config, name) is None}
    if few and config.calibrate is None and (levels or closed_form) and first_process():
        data = run.data
        note(
            f"few rows: {len(data.train)} to train on, {len(data.validation)} to choose the best weights by, "
            f"{len(data.test)} to test; too few to calibrate, which needs {needed} to train on and is left out"
        )
    config = replace(config, **chosen)
    if shrinks and config.shrink is None:
        config = replace(config, shrink=max(1, round(SHRINKING_SHARE * length(config, len(run.data.train)))))
    return replace(run, config=config, data=_noised_by(config, run.data))


def _noised_by(config: TrainConfig, data: DataSet) -> DataSet:
    """The points before their noise, if the objective adds this very noise: new in each step, as the authors do it."""
    if data.clean is None or config.sigma != SMOOTHING:
        return data
    return replace(data, train=data.clean)


def length(config: TrainConfig, rows: int) -> int:
    """The number of steps of a settled configuration, with so many training rows; the processes share them."""
    if config.steps is not None:
        return config.steps
    assert config.batch_size is not None
    assert config.epochs is not None
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return config.epochs * max(1, rows // (min(config.batch_size, rows) * world))


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
    told = {name: getattr(config, name) for name, losses in LOSS_OPTIONS.items() if config.loss in losses}
    options: dict[str, Any] = {name: value for name, value in told.items() if value is not None}
    if config.loss not in ("ml", "sml"):
        options["energy_weight"] = config.energy_weight
    if steps := options.pop("shrink", 0):
        options["sigma"] = ebf.objectives.NoiseSchedule(end=options["sigma"], steps=steps)
    weight = options.pop("ml_weight", 0.0)
    objective = ebf.make_objective(config.loss, model, **options)
    return (1 - weight) * objective + weight * NoisedML(model, options.get("sigma")) if weight else objective


class NoisedML(DrawnObjective):
    """The exact NLL of data with the noise that the score matching beside it adds, for a part of a sum.

    Arguments:
        model: A wrapped flow.
        sigma: The noise, a number or a schedule; None for none.
    """

    def __init__(self, model: ebf.EBFlow, sigma: float | ebf.objectives.NoiseSchedule | None) -> None:
        super().__init__(model)
        self.noise = None if sigma is None else AddedNoise(sigma)

    def draw(self, plan: Plan, u: Tensor, context: Tensor | None, generator: Generator | None) -> tuple[Tensor, ...]:
        """The matched variable with noise."""
        return (u if self.noise is None else self.noise.add(u, generator),)

    def value(self, plan: Plan, u: Tensor, context: Tensor | None, drawn: tuple[Tensor, ...]) -> Tensor:
        """-log p of each row."""
        energy = plan.energy(drawn[0], context)
        return energy + plan.log_z(tuple(u.shape[1:]), energy)

    def extra_repr(self) -> str:
        """Describes the noise."""
        return "" if self.noise is None else str(self.noise)


def start_rows(run: Run) -> Tensor:
    """The training rows that a start in closed form is fitted to."""
    return run.split("train")[: CONV_ROWS if run.config.model == "conv" else None]


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
