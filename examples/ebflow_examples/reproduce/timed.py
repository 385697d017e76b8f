"""Training for so many seconds, with the exact NLL beside it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, optim
from torch.optim.lr_scheduler import LambdaLR

import ebflow_plugin as ebf
from ebflow_examples.bench.contenders import training_step
from ebflow_examples.defaults import objective_of, settle
from ebflow_examples.runs import Run
from ebflow_examples.streams import drawing_from
from ebflow_examples.training import SCHEDULES, optimizer_for
from ebflow_plugin.training.fitting import FitResult
from ebflow_plugin.training.loop import Event

__all__ = ["Trained", "train_for"]

NO_END = 10**9  # steps; the clock ends a run
PROBE_SECONDS = 0.3  # to see how long a step takes, unless a single one takes longer
LEAST_SHARE = 0.25  # of the time is left for training, whatever the start takes


@dataclass(frozen=True)
class Trained:
    """What came out of a run of so many seconds. The model has its last weights.

    Attributes:
        run: The model and its data.
        result: What :func:`ebflow_plugin.fit` gave.
        curve: Seconds and validation NLL, from the start on; of averaged and calibrated weights, if there are such.
        start: Seconds that the whitening start took, and one calibration; they count as training.
    """

    run: Run
    result: FitResult
    curve: list[tuple[float, float]]
    start: float

    @property
    def seconds(self) -> float:
        """What start and steps took; evaluations are not counted."""
        return self.start + float(self.result.history[-1]["seconds"])

    def facts(self) -> dict[str, Any]:
        """What every cell tells: seconds, steps, the best step, steps per second, the curve, the recipe."""
        taken = self.result.history[-1]["seconds"]
        return {
            "seconds": self.seconds,
            "steps": self.result.steps,
            "best_step": self.result.best_step,
            "steps_per_second": self.result.steps / taken if taken else 0.0,
            "start_seconds": self.start,
            "curve": self.curve,
            "recipe": self.run.config.to_dict(),
        }


class Clock:
    """Tells what share of the time for training is used up, without the evaluations. A callback of fit.

    Example:
        >>> 0.0 <= Clock(1000.0).share() < 1.0
        True
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._before = 0.0
        self._since: float | None = None

    def share(self) -> float:
        """How much of the time is used up; 1 and more at the end. The first call starts the clock."""
        if self._since is None:
            self._since = time.monotonic()
        return (self._before + time.monotonic() - self._since) / self.seconds

    def __call__(self, event: Event) -> bool:
        """Stops the clock for an evaluation, which is over now; True if the time is up."""
        self._before, self._since = float(event.record["seconds"]), time.monotonic()
        return self._before >= self.seconds


def train_for(run: Run, seconds: float, *, evaluations: int = 10, validation: int | None = 2000) -> Trained:
    """Trains a model for so many seconds, by the recipe of its configuration.

    The learning rate follows the clock. The whitening start and one calibration are counted, evaluations are not.

    Arguments:
        run: The model with its data. The configuration's ``steps`` and ``epochs`` have no meaning here.
        seconds: How long.
        evaluations: How many, about.
        validation: How many validation rows they use; None for no NLL.
    """
    began = time.monotonic()
    run = settle(run)
    config, model = run.config, run.model
    start = time.monotonic() - began
    rows = None if validation is None else run.data.validation[:validation]
    if rows is not None:
        start += calibration_seconds(run)
    left = max(LEAST_SHARE * seconds, seconds - start)
    pace, clock = step_seconds(run), Clock(left)
    assert config.lr is not None
    assert config.batch_size is not None
    schedule = SCHEDULES[config.schedule]

    def scheduler(made: optim.Optimizer) -> LambdaLR:
        return LambdaLR(made, lambda step: schedule(clock.share() if step else 0.0))

    result = ebf.fit(
        objective_of(model, config),
        run.data.train,
        optimizer=optimizer_for(run),
        scheduler=scheduler,
        steps=NO_END,
        batch_size=config.batch_size,
        validation=rows,
        evaluate_every=max(1, round(left / evaluations / pace)),
        ema=ebf.EMA(model, decay=config.ema_decay) if config.ema else None,
        clip_norm=config.clip_norm,
        callbacks=[clock],
        calibrate=None if rows is None else config.calibration,
        progress=False,
        seed=config.seed,
    )
    curve = []
    if rows is not None:
        assert result.start_nll is not None  # every ActNorm is started: fit has looked at the model before its steps
        curve = [(start, result.start_nll), *((start + each["seconds"], each["nll"]) for each in result.history)]
    return Trained(run, result, curve, start)


def calibration_seconds(run: Run) -> float:
    """How long a calibration takes, of a copy of the model; nothing if its evaluations have none."""
    kind = run.config.calibration
    if kind is None:
        return 0.0
    probe = copy.deepcopy(run.model)
    with drawing_from(run.config.seed, "probe"):
        return _seconds(lambda: probe.calibrate(run.split("train"), kind))


def step_seconds(run: Run) -> float:
    """About how long a step takes: the best of up to three of a copy of the model."""
    probe = copy.deepcopy(run.model)
    batch: Tensor = run.split("train")[: run.config.batch_size]
    with drawing_from(run.config.seed, "probe"):
        step = training_step(probe, objective_of(probe, run.config), batch)
        step()
        taken = [_seconds(step)]
        while len(taken) < 3 and sum(taken) < PROBE_SECONDS:
            taken.append(_seconds(step))
        return min(taken)


def _seconds(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began
