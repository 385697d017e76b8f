"""A race: one model, one data set of known density, objectives that train for equal time; who is nearest to the truth.

Time is that of :mod:`~ebflow_examples.clock`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam

import ebflow_plugin as ebf
from ebflow_examples import clock, plots
from ebflow_examples.data import DataSet
from ebflow_examples.models import flow_for, preprocessing
from ebflow_examples.plots import OBJECTIVE_COLOURS, Points, labelled
from ebflow_examples.runs import above_truth
from ebflow_examples.streams import drawing_from
from ebflow_plugin.errors import TrainingError

BATCH = 50
EVALUATIONS = 6
SAMPLES = 9  # of each model, in the picture


@dataclass(frozen=True)
class Contender:
    """An objective that takes part.

    Attributes:
        name: As tables and pictures call it.
        loss: As :func:`ebflow_plugin.make_objective` does.
        options: Those of the objective.
        rate: Its learning rate: the best of ``RATES`` of :mod:`~ebflow_examples.reproduce.race` on other data.
    """

    name: str
    loss: str
    options: dict[str, Any]
    rate: float


CONTENDERS = {
    "ml": Contender("exact ML", "ml", {}, 1e-2),
    "ml_stochastic": Contender("ML without determinants", "ml", {"log_det": "stochastic"}, 1e-2),
    "dsm": Contender("DSM", "dsm", {"sigma": 0.2}, 3e-3),
    "ssm": Contender("SSM", "ssm", {}, 3e-3),
    "fdssm": Contender("FDSSM", "fdssm", {"eps": 1.0}, 3e-3),
}


@dataclass(frozen=True)
class Lap:
    """What one objective came to.

    Attributes:
        model: With its last weights.
        curve: CPU seconds of training, and nats above the truth, from the start on.
        error: The standard error of the last of these, over the rows.
        steps: How many steps there were.
    """

    model: ebf.EBFlow
    curve: list[tuple[float, float]]
    error: float
    steps: int

    def facts(self) -> dict[str, Any]:
        """All but the model, and what the curve ends at."""
        seconds, above = self.curve[-1]
        return {"above_floor": above, "error": self.error, "steps": self.steps, "seconds": seconds, "curve": self.curve}


def run(
    contender: Contender,
    data: DataSet,
    rows: Tensor,
    seconds: float,
    *,
    rate: float | None = None,
    seed: int = 0,
    tick: Callable[[float, int], object] = lambda used, step: None,
) -> Lap:
    """Trains the built-in ``cnn`` for so many CPU seconds: Adam, batches of 50, the rate falls to zero as a cosine.

    Arguments:
        contender: The objective.
        data: Images of a known density.
        rows: Images to evaluate with, which are not among those that it trains with.
        seconds: CPU seconds of this process; call it with one thread.
        rate: Another learning rate than the contender's.
        seed: Decides the weights, the batches and the noise.
        tick: Called after each step with the seconds used, and the number of steps.

    Raises:
        TrainingError: If a loss is not finite.
    """
    with drawing_from(seed, "weights"):
        flow, data = flow_for("cnn", data)
    model = ebf.wrap(flow, preprocess=preprocessing(data))
    lr = contender.rate if rate is None else rate
    try:
        trained = clock.train(
            ebf.make_objective(contender.loss, model, **contender.options),
            data.train,
            seconds,
            lambda step: gap(model, data, rows)[0],
            optimizer=lambda parameters: Adam(parameters, lr=lr),
            moments=[place / EVALUATIONS for place in range(1, EVALUATIONS + 1)],
            batch_size=BATCH,
            seed=seed,
            tick=tick,
        )
    except TrainingError as error:
        error.add_note(f"It was {contender.name}, with a rate of {lr:g}.")
        raise
    return Lap(model, trained.curve, gap(model, data, rows)[1], trained.result.steps)


@torch.no_grad()
def gap(model: ebf.EBFlow, data: DataSet, rows: Tensor) -> tuple[float, float]:
    """How far a model is above the truth, in nats, and the error of that: :func:`~ebflow_examples.runs.above_truth`."""
    assert data.truth is not None
    return above_truth(data.truth, rows, -model.log_prob(rows))


def spread(drawn: Tensor, data: DataSet) -> float:
    """The standard deviation of the pixels of samples, in units of that of the data."""
    return float(drawn.std() / data.test.std())


def draw(
    path: Path,
    title: str,
    curves: Mapping[str, Sequence[Points]],
    steps: Mapping[str, float],
    samples: Mapping[str, Tensor],
    data: DataSet,
) -> None:
    """Saves a picture. Left: nats above the floor against time. Right: samples of each model, beside the data.

    Arguments:
        path: Where to.
        title: Of the curves.
        curves: Contender -> the curves of its seeds.
        steps: Contender -> how many steps it made.
        samples: Contender -> samples of its model.
        data: The data.
    """
    columns = -(-(1 + len(samples)) // 2)
    with plots.figure(path, 6.6 + 2.7 * columns, 5.6) as figure:
        parts: Any = figure.subfigures(1, 2, width_ratios=(6.6, 2.7 * columns))
        left, right = parts
        axes = left.subplots()
        axes.set_yscale("log")
        labelled(
            axes, curves, lambda name, end: f"{CONTENDERS[name].name}\n{end:,.0f} nats, {steps[name]:,.0f} steps", 9
        )
        plots.plain_log(axes.yaxis)
        axes.set(title=title, xlabel="CPU seconds of training, one thread", ylabel="nats above the floor (log scale)")
        panels = right.subplots(2, columns, squeeze=False).flatten()
        plots.images(panels[0], data.pixels(data.test[:SAMPLES]), 3, f"the data, D = {data.train[0].numel()}")
        for place in panels[1:]:
            place.set_axis_off()
        for place, name in zip(panels[1:], sorted(samples, key=lambda name: curves[name][0][-1][1]), strict=False):
            plots.images(place, data.pixels(samples[name]), 3)
            place.set_title(f"by {CONTENDERS[name].name}", color=OBJECTIVE_COLOURS[name])
