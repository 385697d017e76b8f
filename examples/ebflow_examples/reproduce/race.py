"""A race on textures, whose entropy is known: exact likelihood, the same without determinants, and score matching.

One model, one data set of known density, objectives that train for equal time by
:mod:`~ebflow_examples.clock`; who is nearest to the truth. ``ebflow demo`` runs a short one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import Adam

import ebflow_plugin as ebf
from ebflow_examples import clock, plots
from ebflow_examples.console import Grid
from ebflow_examples.data import DataSet, load
from ebflow_examples.models import flow_for, preprocessing
from ebflow_examples.plots import OBJECTIVE_COLOURS
from ebflow_examples.reproduce.common import Cell, CellResult, Options, with_rates
from ebflow_examples.reproduce.output import Report, at, column, grouped, mean
from ebflow_examples.runs import above_truth
from ebflow_examples.streams import drawing_from, stream
from ebflow_plugin.errors import TrainingError

MINUTES = 10.0
RATES = (1e-3, 3e-3, 1e-2)
SEARCH = 0.2  # of the time of a race, for each rate
ROWS = 250
CHOOSING = 100  # validation images that a rate is chosen by
BATCH = 50
EVALUATIONS = 6
SAMPLES = 9  # of each model, in the picture


class Contender(NamedTuple):
    """An objective that takes part.

    Attributes:
        name: As tables and pictures call it.
        loss: As :func:`ebflow_plugin.make_objective` does.
        options: Those of the objective.
        rate: Its learning rate in the demo: the best of :data:`RATES` on other data.
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


def cells(options: Options) -> list[Cell]:
    """One for each objective and seed, and those that try learning rates, with two seeds."""
    told = {"data": "textures16" if options.quick else "textures", "quick": options.quick}
    runs = [
        Cell("race", f"{loss}-seed{seed}", {**told, "loss": loss, "seed": seed, "search": False})
        for seed in range(options.seeds)
        for loss in CONTENDERS
    ]

    def search(run: Cell) -> tuple[dict[str, float], float]:
        return {f"{run['loss']}-rate{rate:g}": rate for rate in RATES}, SEARCH

    return with_rates(runs, search, options.quick)


def compute(cell: Cell, folder: Path, data_root: str | None) -> dict[str, Any]:
    """Trains; a search is judged by validation images, a race evaluated on test images."""
    settings = cell.settings
    seed, contender = settings["seed"], CONTENDERS[settings["loss"]]
    data = load(settings["data"], seed=seed)
    rows = data.validation[:CHOOSING] if settings["search"] else data.test[:ROWS]
    model, facts = run(contender, data, rows, cell.seconds, settings["lr"], seed)
    found = {"judge": "above_floor", **facts}
    if settings["search"]:
        return found
    drawn = model.sample(SAMPLES, generator=stream(seed, "samples"))
    np.save(folder / f"{cell.name}.npy", drawn.numpy())
    return {**found, "spread": spread(drawn, data)}


def run(
    contender: Contender, data: DataSet, rows: Tensor, seconds: float, rate: float, seed: int
) -> tuple[ebf.EBFlow, dict[str, Any]]:
    """Trains the built-in ``cnn`` for so many CPU seconds: Adam, batches of 50, the rate falls to zero as a cosine.

    Arguments:
        contender: The objective.
        data: Images of a known density.
        rows: Images to evaluate with, which are not among those that it trains with.
        seconds: CPU seconds of this process; call it with one thread.
        rate: The learning rate.
        seed: Decides the weights, the batches and the noise.

    Returns:
        The model with its last weights, and what it came to: nats above the truth with their error, steps, seconds and
        the curve of these.

    Raises:
        TrainingError: If a loss is not finite.
    """
    with drawing_from(seed, "weights"):
        flow, data = flow_for("cnn", data)
    model = ebf.wrap(flow, preprocess=preprocessing(data))

    try:
        result, curve = clock.train(
            ebf.make_objective(contender.loss, model, **contender.options),
            data.train,
            seconds,
            lambda step: gap(model, data, rows)[0],
            optimizer=lambda parameters: Adam(parameters, lr=rate),
            moments=[place / EVALUATIONS for place in range(1, EVALUATIONS + 1)],
            batch_size=BATCH,
            seed=seed,
        )
    except TrainingError as error:
        error.add_note(f"It was {contender.name}, with a rate of {rate:g}.")
        raise
    used, above = curve[-1]
    apart = gap(model, data, rows)[1]
    return model, {"above_floor": above, "error": apart, "steps": result.steps, "seconds": used, "curve": curve}


@torch.no_grad()
def gap(model: ebf.EBFlow, data: DataSet, rows: Tensor) -> tuple[float, float]:
    """How far a model is above the truth, in nats, and the error of that: :func:`~ebflow_examples.runs.above_truth`."""
    assert data.truth is not None
    return above_truth(data.truth, rows, -model.log_prob(rows))


def spread(drawn: Tensor, data: DataSet) -> float:
    """The standard deviation of the pixels of samples, in units of that of the data."""
    return float(drawn.std() / data.test.std())


def report(options: Options, found: Sequence[CellResult], path: Path) -> Report:
    """Nats above the floor on the way and at the end, steps, rates, and the spread of samples; curves and samples."""
    from ebflow_examples.textures import SIDES, Textures

    groups = {key[0]: group for key, group in grouped(found, "loss").items()}
    if not groups:
        return Report([], [], ["No objective came to an end."], [])
    name = next(iter(groups.values()))[0]["data"]
    floor = Textures(SIDES[name]).entropy()
    lines, rows = [], []
    for loss in sorted(groups, key=lambda loss: column(groups[loss], "above_floor").mean):
        group = groups[loss]
        above, steps, width = (column(group, key) for key in ("above_floor", "steps", "spread"))
        quarter, half = (mean(at(each, share) for each in group) for share in (0.25, 0.5))
        rate = f"{group[0]['lr']:g}"
        told = {"loss": loss, "above_floor": above, "at_a_quarter": quarter, "at_half": half, "steps": steps}
        rows.append({**told, "rate": rate, "spread": width, "floor": floor})
        way = [f"{each.mean:,.0f}" for each in (quarter, half)]
        lines.append([CONTENDERS[loss].name, rate, f"{steps.mean:.0f}", *way, above.text(1), width.text(2)])
    seconds = mean(each["seconds"] for group in groups.values() for each in group).mean
    head = ("objective", "rate", "steps", f"{seconds / 4:.0f} s", f"{seconds / 2:.0f} s", f"{seconds:.0f} s", "spread")
    size = 3 * SIDES[name] ** 2
    grid = Grid(f"{name}, D = {size}: nats above the entropy of {floor:,.1f}, by CPU seconds of training", head, lines)
    drawn = {
        loss: torch.from_numpy(np.load(options.folder / f"{group[0].cell.name}.npy")) for loss, group in groups.items()
    }
    draw(path, seconds, groups, drawn, load(name, seed=0))
    return Report([grid], rows, _notes(), [path])


def draw(path: Path, seconds: float, runs: Mapping[str, Any], samples: Mapping[str, Tensor], data: DataSet) -> None:
    """Saves a picture. Left: nats above the floor against time. Right: samples of each model, beside the data.

    Arguments:
        path: Where to.
        seconds: How long each trained.
        runs: Contender -> its runs with several seeds, each with its ``curve`` and its number of ``steps``.
        samples: Contender -> samples of its model.
        data: The data.
    """
    curves = {name: [each["curve"] for each in group] for name, group in runs.items()}
    steps = {name: mean(each["steps"] for each in group).mean for name, group in runs.items()}
    columns = -(-(1 + len(samples)) // 2)
    with plots.figure(path, 6.6 + 2.7 * columns, 5.6) as figure:
        parts: Any = figure.subfigures(1, 2, width_ratios=(6.6, 2.7 * columns))
        left, right = parts
        axes = left.subplots()
        axes.set_yscale("log")
        plots.curves(
            axes, curves, lambda name, end: f"{CONTENDERS[name].name}\n{end:,.0f} nats, {steps[name]:,.0f} steps"
        )
        title = f"The same model, {seconds:.3g} seconds of one core: how far from the best possible"
        axes.set(title=title, xlabel="CPU seconds of training, one thread", ylabel="nats above the floor (log scale)")
        panels = right.subplots(2, columns, squeeze=False).flatten()
        plots.images(panels[0], data.pixels(data.test[:SAMPLES]), 3, f"the data, D = {data.train[0].numel()}")
        for place in panels[1:]:
            place.set_axis_off()
        for place, name in zip(panels[1:], sorted(samples, key=lambda name: curves[name][0][-1][1]), strict=False):
            plots.images(place, data.pixels(samples[name]), 3)
            place.set_title(f"by {CONTENDERS[name].name}", color=OBJECTIVE_COLOURS[name])


def _notes() -> list[str]:
    settings = ", ".join(
        f"{each.name}: {', '.join(f'{key} = {value}' for key, value in each.options.items())}"
        for each in CONTENDERS.values()
        if each.options
    )
    return [
        f"`cnn` of one block (two 7 × 7 convolutions, zeros around the image), which can reach the floor, from the "
        f"paper's start; Adam, batches of {BATCH}, a cosine schedule by CPU time of one thread, evaluations not "
        f"counted, the last weights; {settings}. Each rate is the best of {', '.join(f'{rate:g}' for rate in RATES)} "
        f"on {CHOOSING} validation images after {SEARCH:.0%} of the time, in the mean of two seeds. Nats above "
        f"the floor: the mean of log p of the truth less that of the model on {ROWS} test images. Spread: the standard "
        "deviation of the pixels of samples over that of the data; 1 is right.",
        "With padding by wrapping around (`circular`) determinants come from Fourier transforms and cost next to "
        "nothing: exact ML is then the one to use.",
    ]
