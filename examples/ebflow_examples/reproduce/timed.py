"""Training for so many seconds of CPU time, with the exact NLL beside it."""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import isnan, nan
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import ebflow_plugin as ebf
from ebflow_examples import clock
from ebflow_examples.defaults import objective_of, settle
from ebflow_examples.runs import Run
from ebflow_examples.streams import drawing_from, stream
from ebflow_examples.training import optimizer_for
from ebflow_plugin.errors import TrainingError
from ebflow_plugin.objectives.evaluation import Likelihood, LikelihoodSum, calibrated
from ebflow_plugin.training import FitResult
from ebflow_plugin.training.files import write_weights

__all__ = ["Judge", "Trained", "train_for"]

LEAST_SHARE = 0.25  # of the time is left for training, whatever the start takes
VALIDATION_BATCH = 250


@dataclass(frozen=True)
class Trained:
    """What came out of a run of so many seconds. The model has its last weights.

    Attributes:
        run: The model and its data.
        result: What :func:`ebflow_plugin.fit` returned, with the best of the weights that were evaluated.
        curve: CPU seconds and validation NLL, from the start on; of averaged and calibrated weights, if there are such.
        raw: The same without the calibration.
        start: CPU seconds that the start in closed form took, and one calibration; they count as training.
        seconds: CPU seconds of start and steps; evaluations are not counted.
    """

    run: Run
    result: FitResult
    curve: list[tuple[float, float]]
    raw: list[tuple[float, float]]
    start: float
    seconds: float

    def facts(self) -> dict[str, Any]:
        """What every cell tells: seconds, steps, the best step, steps per second, the curves, the recipe."""
        taken = self.seconds - self.start
        return {
            "seconds": self.seconds,
            "steps": self.result.steps,
            "best_step": self.result.best_step,
            "steps_per_second": self.result.steps / taken if taken else 0.0,
            "start_seconds": self.start,
            "curve": self.curve,
            "raw_curve": self.raw,
            "recipe": self.run.config.to_dict(),
        }


class Judge:
    """The exact NLL of validation data, of averaged and calibrated weights if there are such; keeps the best weights.

    Arguments:
        run: The model and its data.
        ema: The average of the weights, which is evaluated in their place.
        validation: How many validation rows; None for no NLL.
        calibration: How many training rows a calibration takes; None for all.
    """

    def __init__(self, run: Run, ema: ebf.EMA | None, validation: int | None, calibration: int | None) -> None:
        self.run, self.ema = run, ema
        self.rows = None if validation is None else run.split("validation")[:validation]
        self.training = run.split("train")[:calibration]
        self.raw: list[float] = []  # without the calibration
        self.best: tuple[float, int, dict[str, Tensor]] | None = None

    def __call__(self, step: int) -> float:
        """The NLL of the weights of a step."""
        if self.rows is None:
            return nan
        model, config = self.run.model, self.run.config
        with (
            self.ema.applied() if self.ema is not None else nullcontext(),
            drawing_from(config.seed, "calibration"),
            calibrated(model, self.training, config.calibration),
        ):
            nll, _, raw = evaluate(model, self.rows, config.seed)
            if isnan(nll):
                raise TrainingError(f"step {step}: the NLL of the validation data is not a number")
            if self.best is None or nll < self.best[0]:
                self.best = nll, step, {name: value.clone() for name, value in model.state_dict().items()}
        self.raw.append(raw)
        return nll


def evaluate(model: ebf.EBFlow, rows: Tensor, seed: int) -> Likelihood:
    """The exact NLL of validation data, with the same noise each time."""
    total = LikelihoodSum(model, stream(seed, "validation", device=model.like().device))
    for part in rows.split(VALIDATION_BATCH):
        total.add(part, None)
    return total.mean()


def train_for(
    run: Run,
    seconds: float,
    *,
    evaluations: int = 10,
    validation: int | None = 2000,
    calibration: int | None = None,
    start_file: Path | None = None,
) -> Trained:
    """Trains a model for so many seconds of CPU time, by the recipe of its configuration.

    The learning rate follows the clock. The start in closed form and one calibration are counted, evaluations and the
    compiler are not.
    If the start takes longer than that, a quarter of the time is left for training.

    Arguments:
        run: The model with its data. The configuration's ``steps`` and ``epochs`` have no meaning here.
        seconds: How long.
        evaluations: How many, after that of the start.
        validation: How many validation rows they use; None for no NLL.
        calibration: How many training rows they calibrate on; all by default.
        start_file: Where the started weights and their seconds are kept for other objectives of the same model, data
            and seed, which count the same seconds.
    """
    run, start = _started(run, start_file)
    config, model = run.config, run.model
    if validation is not None:
        start += calibration_seconds(run, calibration)
    length = max(LEAST_SHARE * seconds, seconds - start)
    objective = objective_of(model, config)
    if config.compile:
        objective.compile()
        with drawing_from(config.seed, "compile"):
            objective(run.split("train")[: config.batch_size])  # compiles it
    ema = ebf.EMA(model, decay=config.ema_decay) if config.ema else None
    judge = Judge(run, ema, validation, calibration)
    trained = clock.train(
        objective,
        run.data.train,
        length,
        judge,
        optimizer=optimizer_for(run, one_rate=True),
        moments=[(place / evaluations) ** 2 for place in range(1, evaluations + 1)],  # dense where a curve is steep
        schedule=clock.SCHEDULES[config.schedule],
        batch_size=config.batch_size,
        ema=ema,
        clip_norm=config.clip_norm,
        seed=config.seed,
    )
    result, curve, raw = trained.result, [], []
    if judge.best is not None:
        nll, step, state = judge.best
        result = replace(result, start_nll=trained.curve[0][1], best_nll=nll, best_step=step, best_state=state)
        curve = [(start + used, nll) for used, nll in trained.curve]
        raw = [(seconds, nll) for (seconds, _), nll in zip(curve, judge.raw, strict=True)]
    return Trained(run, result, curve, raw, start, start + trained.seconds)


def _started(run: Run, file: Path | None) -> tuple[Run, float]:
    """The run with its model started, and the CPU seconds of that; from a file, if the start is there."""
    if file is not None and file.is_file():
        with safe_open(file, "pt") as content:
            facts = json.loads(content.metadata()["start"])
        write_weights(run.model, load_file(file), str(file))
        return settle(run, (facts["whiten"], facts["gaussianize"])), facts["seconds"]
    began = time.process_time()
    run = settle(run)
    seconds = time.process_time() - began
    if file is not None:
        facts = {"whiten": run.config.whiten, "gaussianize": run.config.gaussianize, "seconds": seconds}
        partial = file.with_suffix(f".{os.getpid()}")  # a run that is stopped while it writes leaves no half of it
        save_file(run.model.state_dict(), partial, {"start": json.dumps(facts)})
        partial.replace(file)
    return run, seconds


def calibration_seconds(run: Run, rows: int | None = None) -> float:
    """How long a calibration takes, of a copy of the model; nothing if its evaluations have none."""
    kind = run.config.calibration
    if kind is None:
        return 0.0
    probe = copy.deepcopy(run.model)
    with drawing_from(run.config.seed, "probe"):
        return _seconds(lambda: probe.calibrate(run.split("train")[:rows], kind))


def _seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began
