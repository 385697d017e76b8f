"""``ebflow demo``: the tour. Two data sets, an nflows model on each, score matching beside maximum likelihood."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import cos, pi
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import ebflow_plugin as ebf
from ebflow_examples import plots
from ebflow_examples.bench.contenders import BATCH, objective, training_step
from ebflow_examples.bench.timing import interleaved, ratio
from ebflow_examples.console import say, table
from ebflow_examples.data import DataSet, load
from ebflow_examples.folders import writable
from ebflow_examples.models import build, flow_for, preprocessing
from ebflow_examples.pictures import density_of
from ebflow_examples.reproduce.common import one_thread
from ebflow_examples.runs import Likelihood, likelihood, nll_of_rows, standard_error
from ebflow_examples.streams import drawing_from, stream

__all__ = ["Trained", "run_demo"]

LARGE = 1024  # features of a large linear layer
GRID = 100  # cells on a side of a density
COARSE = 12  # and in a hurry


@dataclass(frozen=True)
class Lesson:
    """One data set of the tour, and how it is learnt.

    Attributes:
        data: The data set.
        model: The built-in model.
        options: Those of the model.
        score: The score-matching objective, and its options.
        steps: How many steps each objective gets.
        batch_size: Rows in a batch.
        lr: The learning rate, which falls to zero.
        closed_form: Whether the model starts in closed form (initialize(…, gaussianize=True)), and each evaluation fits
            the base to the latents, for both objectives.
    """

    data: str
    model: str
    options: dict[str, Any]
    score: tuple[str, dict[str, Any]]
    steps: int
    batch_size: int
    lr: float
    closed_form: bool


LESSONS = (
    Lesson("swirl", "glow", {"blocks": 4, "hidden": 32}, ("ssm", {}), 300, 500, 5e-3, closed_form=False),
    Lesson("digits", "fc", {}, ("dsm", {"sigma": 0.2}), 400, 100, 3e-4, closed_form=True),
)


@dataclass(frozen=True)
class Trained:
    """A model that was trained by one objective.

    Attributes:
        loss: The objective.
        model: With its best weights.
        untrained: The NLL of the test data with the weights as they were made.
        before: The same at the start of training; whitened and calibrated, if the later one is.
        after: The same with the best weights.
        seconds: What the steps took, without the evaluations.
        steps: How many there were.
        best_step: The one that the best weights are of; 0 if no step made them better.
        curve: Seconds and validation NLL.
    """

    loss: str
    model: ebf.EBFlow
    untrained: Likelihood
    before: Likelihood
    after: Likelihood
    seconds: float
    steps: int
    best_step: int
    curve: tuple[list[float], list[float]]


def run_demo(out: Path, seed: int = 0, quick: bool = False) -> list[dict[str, Any]]:
    """Trains, prints and draws; gives the rows of the table of NLLs, which ``demo.json`` holds too."""
    writable(out)
    with one_thread():  # small models: more threads only wait for each other
        return _tour(out, seed, quick)


def _tour(out: Path, seed: int, quick: bool) -> list[dict[str, Any]]:
    started = time.monotonic()
    found: list[tuple[Lesson, DataSet, list[Trained]]] = []
    for number, lesson in enumerate(LESSONS, start=1):
        data = load(lesson.data, seed=seed)
        if quick:
            lesson = replace(lesson, steps=4)
            data = replace(data, train=data.train[:1000], validation=data.validation[:500], test=data.test[:500])
        say(f"\n{number}. {_INTRODUCTION[lesson.data]}\n")
        model, fitting = _start(lesson, data, seed)
        say(f"{model.report}\n")
        losses: Sequence[tuple[str, dict[str, Any]]] = (lesson.score, ("ml", {}))
        found.append((lesson, fitting, [_train(lesson, data, loss, options, seed) for loss, options in losses]))
    picture = out / "demo.png"
    _draw(picture, found, seed, COARSE if quick else GRID)
    rows = [_row(lesson, each) for lesson, _, trained in found for each in trained]
    (out / "demo.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    say(f"\n{_summary(rows)}\n")
    for lesson, data, (score, ml) in found:
        say(_verdict(lesson, data, score, ml, seed))
    say(f"\n3. Where energies pay: large linear layers. {_step_times(64 if quick else LARGE)}")
    say(f"\nThe picture is in {picture}. All of it took {time.monotonic() - started:.0f} s. What to try next:")
    say("  ebflow train --data checkerboard --loss ssm --out runs/board && ebflow density runs/board")
    say("  ebflow profile fc --shape 3072       milliseconds and memory of every objective, on this machine")
    say("  ebflow inspect your_module:your_flow")
    return rows


_INTRODUCTION = {
    "swirl": "The swirl, in two dimensions. ebf.wrap(flow) around a small Glow of nflows finds these steps:",
    "digits": "Handwritten digits, 8 x 8 pixels. ebf.wrap(flow, preprocess=[…]) around two full layers of nflows:",
}


def _start(lesson: Lesson, data: DataSet, seed: int, closed_form: bool = False) -> tuple[ebf.EBFlow, DataSet]:
    """A fresh model: the same weights for the same seed, ActNorms started from the data."""
    with drawing_from(seed, "weights"):
        flow, fitting = flow_for(lesson.model, data, **lesson.options)
    model = ebf.wrap(flow, preprocess=preprocessing(fitting))
    with drawing_from(seed, "start"):
        model.initialize(fitting.train if closed_form else fitting.train[:1000], gaussianize=closed_form)
    return model, fitting


def _train(lesson: Lesson, data: DataSet, loss: str, options: dict[str, Any], seed: int) -> Trained:
    untrained = _likelihood(*_start(lesson, data, seed), seed)
    model, data = _start(lesson, data, seed, lesson.closed_form)
    probe = copy.deepcopy(model)  # training itself goes on without the calibration
    if lesson.closed_form:
        with drawing_from(seed, "calibration"):
            probe.calibrate(data.train)
    before = _likelihood(probe, data, seed)
    say(f"{loss.upper()} on {data.name}, {lesson.steps} steps:")
    result = ebf.fit(
        ebf.make_objective(loss, model, **options),
        data.train,
        optimizer=lambda parameters: Adam(parameters, lr=lesson.lr),
        scheduler=lambda optimizer: _cosine(optimizer, lesson.steps),
        steps=lesson.steps,
        batch_size=lesson.batch_size,
        validation=data.validation,
        evaluate_every=max(1, lesson.steps // 6),
        ema=ebf.EMA(model, decay=0.99),
        clip_norm=10.0 if data.levels is None else None,
        calibrate=lesson.closed_form,
        seed=seed,
    )
    result.load_best(model)
    times = [0.0, *(record["seconds"] for record in result.history)]
    assert result.start_nll is not None
    assert result.best_step is not None
    curve = times, [result.start_nll, *(record["nll"] for record in result.history)]
    after = _likelihood(model, data, seed)
    return Trained(loss, model, untrained, before, after, times[-1], result.steps, result.best_step, curve)


def _likelihood(model: ebf.EBFlow, data: DataSet, seed: int) -> Likelihood:
    return likelihood(model, data.test, seed)


def _cosine(optimizer: Optimizer, steps: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5 * (1.0 + cos(pi * min(1.0, step / steps))))


def _step_times(dim: int) -> str:
    """What a training step of the paper's model takes by each objective, interleaved."""
    x = torch.randn(BATCH, dim)
    steps = {}
    for name in ("ML", "SSM", "DSM"):
        model = ebf.wrap(build("fc", (dim,)))
        steps[name] = training_step(model, objective(name, model), x)
    found = interleaved(steps, seconds=2.0, warmup=1)
    times = ", ".join(f"{name} {1000 * samples.median:.0f} ms" for name, samples in found.items())
    first, second = (ratio(found["ML"], found[name]).value for name in ("SSM", "DSM"))
    return (
        f"A training step of two full layers with D = {dim}, batch {BATCH}, one thread:\n{times}. ML computes two "
        f"determinants in each, and takes {first:.1f} times as long as SSM, {second:.1f} times as long as DSM."
    )


def _row(lesson: Lesson, trained: Trained) -> dict[str, Any]:
    return {
        "data": lesson.data,
        "loss": trained.loss,
        "steps": trained.steps,
        "best_step": trained.best_step,
        "steps_per_second": trained.steps / trained.seconds,
        "seconds": trained.seconds,
        "closed_form": lesson.closed_form,
        "nll_untrained": trained.untrained.nll,
        "nll_before": trained.before.nll,
        "nll_after": trained.after.nll,
        "nll_error": trained.after.nll_error,
    }


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    cells = [
        (
            row["data"],
            row["loss"].upper(),
            f"{row['steps_per_second']:.1f}",
            f"{row['nll_untrained']:.3f}",
            f"{row['nll_before']:.3f}",
            f"{row['nll_after']:.3f} ± {row['nll_error']:.3f}",
            f"{row['best_step']}",
            f"{row['seconds']:.1f} s",
        )
        for row in rows
    ]
    return table(
        ("data", "method", "steps/s", "untrained", "start", "trained", "at step", "training"), cells, left=2
    ) + (
        "\nexact NLL of test data in nats, lower is better; digits start Gaussianised and calibrated, in closed form; "
        "at step 0 nothing was learnt: the start is the best"
    )


def _verdict(lesson: Lesson, data: DataSet, score: Trained, ml: Trained, seed: int) -> str:
    """Which was better, and why."""
    apart = nll_of_rows(score.model, data.test, seed) - nll_of_rows(ml.model, data.test, seed)
    difference, error = float(apart.mean()), standard_error(apart)  # on the same rows, so of the difference itself
    speed = (score.steps / score.seconds) / (ml.steps / ml.seconds)
    dimensions = data.train[0].numel()
    name = score.loss.upper()
    measured = f"{abs(difference):.3f} ± {error:.3f} nats"
    if abs(difference) < 2 * error:
        first = f"{lesson.data}: {name} and ML come out the same after as many steps (they differ by {measured})."
    elif difference < 0:
        first = f"{lesson.data}: {name} is better by {measured} after as many steps."
    else:
        first = f"{lesson.data}: ML is better by {measured} after as many steps: it follows NLL, {name} the score."
    return first + (
        f" {name} makes {speed:.1f} times as many steps a second as ML; with D = {dimensions} a determinant "
        f"costs {'next to nothing' if dimensions < 10 else 'little'}."
    )


def _draw(path: Path, found: Sequence[tuple[Lesson, DataSet, list[Trained]]], seed: int, cells: int) -> None:
    """One row for each data set: the data, score matching, maximum likelihood, and the NLL of both over time."""
    with plots.figure(path, 13.2, 6.4) as figure:
        grid = figure.subplots(2, 4, width_ratios=(1.0, 1.0, 1.0, 1.25))
        for axes, (lesson, data, trained) in zip(grid, found, strict=True):
            if data.truth is None:
                _pictures(axes, data, trained, seed)
            else:
                _densities(axes, data, trained, cells)
            colours = (plots.COLOURS["score"], plots.COLOURS["ml"])
            lines = [
                plots.Curve(each.loss.upper(), *each.curve, colour)
                for each, colour in zip(trained, colours, strict=True)
            ]
            title = f"{lesson.data}: exact NLL of validation data"
            plots.curves(axes[3], lines, title, "seconds of training", "nats")


def _densities(axes: Any, data: DataSet, trained: Sequence[Trained], cells: int) -> None:
    assert data.truth is not None
    panel = plots.Panel.around(data.train)
    points = panel.points(cells)
    truth = data.truth.log_prob(points).exp()
    top = float(truth.max())
    plots.density(axes[0], truth, panel, f"{data.name}: true density", top)
    for place, each in zip(axes[1:3], trained, strict=True):
        title = f"{each.loss.upper()}, step {each.best_step}, test NLL {each.after.nll:.3f}"
        plots.density(place, density_of(each.model, points), panel, title, top)


def _pictures(axes: Any, data: DataSet, trained: Sequence[Trained], seed: int) -> None:
    count, columns = 36, 6
    plots.images(axes[0], _as_images(data, data.test[:count]), columns, f"{data.name}: test data")
    for place, each in zip(axes[1:3], trained, strict=True):
        drawn = each.model.sample(count, generator=stream(seed, "samples"))
        plots.images(
            place,
            _as_images(data, drawn),
            columns,
            f"{each.loss.upper()}, step {each.best_step}, NLL {each.after.nll:.1f}",
        )


def _as_images(data: DataSet, rows: Tensor) -> Tensor:
    side = int(rows[0].numel() ** 0.5)
    return rows.reshape(-1, 1, side, side) / ((data.levels or 2) - 1)
