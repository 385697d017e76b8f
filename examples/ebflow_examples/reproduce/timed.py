"""Training as a configuration says, in memory: for so many CPU seconds with the exact NLL beside it, or steps."""

from __future__ import annotations

import copy
import json
import time
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save
from torch.optim.lr_scheduler import LambdaLR

import ebflow_plugin as ebf
from ebflow_examples import clock
from ebflow_examples.defaults import length, objective_of, settle
from ebflow_examples.runs import Run
from ebflow_examples.streams import drawing_from, stream_seed
from ebflow_examples.training import optimizer_for
from ebflow_plugin.training import FitResult
from ebflow_plugin.training.batches import Loader
from ebflow_plugin.training.evaluation import Judge
from ebflow_plugin.training.files import atomic_write, write_weights

LEAST_SHARE = 0.25  # of the time is left for training, whatever the start takes
VALIDATION_BATCH = 250


@dataclass(frozen=True)
class Trained:
    """What came out of a run of so many seconds. The model has its last weights.

    Attributes:
        run: The model and its data.
        result: What :func:`ebflow_plugin.fit` returned, with the best of the weights that were evaluated.
        curve: CPU seconds and validation NLL, from the start on; of averaged and calibrated weights, if there are such.
        start: CPU seconds that the start in closed form took, and one calibration; they count as training.
        seconds: CPU seconds of start and steps; evaluations are not counted.
    """

    run: Run
    result: FitResult
    curve: list[tuple[float, float]]
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
            "recipe": self.run.config.to_dict(),
        }


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
    objective = objective_of(model, config)
    if config.compile:
        objective.compile()
        with drawing_from(config.seed, "compile"):
            objective(run.split("train")[: config.batch_size])  # compiles it
    ema = ebf.EMA(model, decay=config.ema_decay) if config.ema else None
    held_out = Loader(run.split("validation")[:validation], VALIDATION_BATCH, shuffle=False)
    rows, noise = run.split("train")[:calibration], stream_seed(config.seed, "validation")
    judge = Judge(model, held_out, lambda: rows, config.calibration, ema, noise)

    def judged(step: int) -> float:
        """The NLL of validation data, of averaged and calibrated weights if there are such."""
        if validation is None:
            return nan
        with drawing_from(config.seed, "calibration"):
            return float(judge(step)["nll"])

    trained = clock.train(
        objective,
        run.data.train,
        max(LEAST_SHARE * seconds, seconds - start),
        judged,
        optimizer=optimizer_for(run, one_rate=True),
        moments=[(place / evaluations) ** 2 for place in range(1, evaluations + 1)],  # dense where a curve is steep
        schedule=clock.SCHEDULES[config.schedule],
        batch_size=config.batch_size,
        ema=ema,
        clip_norm=config.clip_norm,
        seed=config.seed,
    )
    curve = [(start + used, nll) for used, nll in trained.curve if validation is not None]
    first = curve[0][1] if curve else None
    result = replace(trained.result, start_nll=first, best_nll=judge.nll, best_step=judge.step, best_state=judge.state)
    return Trained(run, result, curve, start, start + trained.curve[-1][0])


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
        content = save(run.model.state_dict(), {"start": json.dumps(facts)})
        atomic_write(file, lambda opened: opened.write(content))
    return run, seconds


def calibration_seconds(run: Run, rows: int | None = None) -> float:
    """How long a calibration takes, of a copy of the model; nothing if its evaluations have none."""
    kind = run.config.calibration
    if kind is None:
        return 0.0
    probe = copy.deepcopy(run.model)
    with drawing_from(run.config.seed, "probe"):
        began = time.process_time()
        probe.calibrate(run.split("train")[:rows], kind)
        return time.process_time() - began


def train_by_steps(run: Run, **options: Any) -> tuple[Run, FitResult]:
    """Trains as ``ebflow train`` does, in memory: so many steps, whatever the clock says, so that a seed is a result.

    Arguments:
        run: The model with its data.
        **options: Further options of :func:`ebflow_plugin.fit`.

    Returns:
        The run with what was chosen for it, and what came out.
    """
    run = settle(run)
    config, schedule = run.config, clock.SCHEDULES[run.config.schedule]
    steps = length(config, len(run.data.train))
    assert config.batch_size is not None
    result = ebf.fit(
        objective_of(run.model, config), run.data.train, steps=steps, batch_size=config.batch_size,
        optimizer=optimizer_for(run), scheduler=lambda made: LambdaLR(made, lambda step: schedule(step / steps)),
        clip_norm=config.clip_norm, ema=ebf.EMA(run.model, decay=config.ema_decay) if config.ema else None,
        compile=config.compile, progress=False, seed=config.seed, **options,
    )  # fmt: skip
    return run, result
