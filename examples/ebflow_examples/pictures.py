"""Pictures of a run: samples, imputations, and densities in the plane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import ebflow_plugin as ebf
from ebflow_examples import plots
from ebflow_examples.runs import Run, likelihood
from ebflow_examples.streams import stream
from ebflow_plugin.errors import InputError, suggest

MASKS = ("left", "right", "top", "bottom", "random")
GRID = 120  # cells on a side of a density picture
SHOWN = (0, 10, 50, 200, 1000, 5000)  # steps of a chain that a strip shows, as far as it goes


def draw_samples(run: Run, count: int, path: Path, *, temperature: float = 1.0, seed: int = 0) -> Path:
    """Saves samples of a run: as numbers beside the picture, which is a grid of images or points of the plane.

    Returns:
        The file of the numbers.

    Raises:
        InputError: If the temperature is no good.
    """
    if run.data.event_shape == (1,):
        raise InputError(f"there is no picture of one dimension, which {run.config.data} has; use model.sample(n)")
    rows = run.model.sample(
        count, temperature=temperature, generator=run.generator(seed, "samples"), batch_size=max(1, min(count, 1000))
    )
    warmth = "" if temperature == 1.0 else f", temperature {temperature:g}"
    title = f"{count} samples{warmth}\n{_name(run)}"
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = path.with_suffix(".npy")
    np.save(numbers, rows.cpu().numpy())
    if run.image_shape is not None:
        plots.save_images(path, run.as_images(rows), columns=min(count, 16, ceil(sqrt(count))), title=title)
        return numbers
    shown = run.data.test[:count]
    panel = plots.Panel.around(run.data.train[:, :2])
    with plots.figure(path, 7.8, 4.2) as figure:
        left, right = figure.subplots(1, 2)
        plots.scatter(left, shown[:, :2], panel, f"{len(shown)} test rows\n{Path(run.config.data).name}")
        plots.scatter(right, rows[:, :2], panel, title)
        left_out = unseen_features(run)
        if left_out:
            figure.suptitle(left_out, fontsize=8, x=0.01, ha="left")
    return numbers


def unseen_features(run: Run) -> str:
    """What a picture of the plane leaves out of rows of numbers; empty if nothing."""
    features = run.data.event_shape[0]
    if run.image_shape is not None or features <= 2:
        return ""
    return f"the picture shows features 1 and 2 of {features}; the .npy file has all"


def draw_density(run: Run, path: Path, seed: int = 0) -> None:
    """Saves the density of a two-dimensional run beside the true one, where that is known, and samples.

    Raises:
        InputError: If the data are not two-dimensional.
    """
    if run.data.event_shape != (2,):
        raise InputError(
            f"a density is drawn in two dimensions, and {run.config.data} has rows of shape {run.data.event_shape}; "
            "`ebflow sample` shows what it looks like"
        )
    panel = plots.Panel.around(run.data.train)
    points = panel.points(GRID)
    ours = density_of(run.model, points)
    truth = None if run.data.truth is None else run.data.truth.log_prob(points).exp()
    top = float((ours if truth is None else truth).max())
    nll = likelihood(run.model, run.split("test"), run.config.seed)
    samples = run.model.sample(5000, generator=run.generator(seed, "samples"), batch_size=1000)
    with plots.figure(path, 11.4, 3.7) as figure:
        first, second, third = figure.subplots(1, 3)
        if truth is None:
            plots.scatter(first, run.data.test[:5000], panel, f"{run.config.data}, test data")
        else:
            plots.density(first, truth, panel, f"{run.config.data}, true density", top)
        bar = plots.density(second, ours, panel, f"{_name(run)}, NLL {nll.nll:.3f}", top)
        plots.scatter(third, samples, panel, "5000 samples of it")
        figure.colorbar(bar, ax=[first, second], shrink=0.8, label="density", extend="max")


@torch.no_grad()
def density_of(model: ebf.EBFlow, points: Tensor) -> Tensor:
    """The density of a model at points of the plane."""
    points = points.to(next(model.parameters()))
    return torch.cat([model.log_prob(part) for part in points.split(5000)]).exp().cpu()


def missing(kind: str, image_shape: Sequence[int], count: int, share: float, generator: torch.Generator) -> Tensor:
    """True where pixels are missing, with shape (count, C, H, W).

    Example:
        >>> missing("left", (1, 2, 2), 1, 0.5, torch.Generator())[0, 0].tolist()
        [[True, False], [True, False]]
    """
    channels, height, width = image_shape
    mask = torch.zeros(count, channels, height, width, dtype=torch.bool)
    if kind == "random":  # a pixel is missing in all of its colours
        drawn = torch.rand(count, 1, height, width, generator=generator) < share
        return drawn.expand(-1, channels, -1, -1).clone()
    rows, columns = round(share * height), round(share * width)
    parts = {
        "left": (slice(None), slice(0, columns)),
        "right": (slice(None), slice(width - columns, width)),
        "top": (slice(0, rows), slice(None)),
        "bottom": (slice(height - rows, height), slice(None)),
    }
    if kind not in parts:
        raise InputError(f"unknown mask {kind!r}. {suggest(kind, MASKS)}")
    down, across = parts[kind]
    mask[:, :, down, across] = True
    return mask


@dataclass(frozen=True)
class Imputation:
    """What an imputation found, all as rows of the data.

    Attributes:
        truth: The images as they are.
        mask: True where pixels were missing.
        states: The chains after so many steps, the start first.
        start_error: The root mean square error of the missing pixels at the start, in grey levels.
        mean_error: The same with the mean of the training images in their place: what is to be beaten.
        error: The same with the last states of the chains.
    """

    truth: Tensor
    mask: Tensor
    states: dict[int, Tensor]
    start_error: float
    mean_error: float
    error: float


def impute_rows(run: Run, count: int, kind: str, *, share: float, steps: int, seed: int = 0) -> Imputation:
    """Fills in missing pixels of test images by Langevin chains that begin at noise.

    A chain is shown by running it anew for fewer steps, with the same noise: it is then at the same place.
    """
    if run.image_shape is None:
        raise InputError(f"pixels are imputed, and {run.config.data} has none; train on digits, mnist or a folder")
    if not 0.0 < share < 1.0:
        raise InputError(f"--share is the share of missing pixels, between 0 and 1, got {share:g}")
    truth = run.split("test")[:count]
    chance = stream(seed, "masks")
    mask = missing(kind, run.image_shape, len(truth), share, chance).to(run.device).reshape(truth.shape)
    if not bool(mask.any()):
        raise InputError(f"no pixel is missing with --share {share:g}; choose a larger share")
    if run.data.levels is None:  # pixels of other places
        pixels = run.data.train.flatten()
        noise = pixels[torch.randint(len(pixels), truth.shape, generator=chance)].to(truth)
    else:
        noise = torch.randint(run.data.levels, truth.shape, generator=chance).to(truth)
    start = torch.where(mask, noise, truth)
    states = {0: start}
    for length in (*(shown for shown in SHOWN[1:] if shown < steps), steps):
        tuned = min(length, steps // 2)  # the step size is tuned in the first half, and fixed in the second
        filled = ebf.impute(
            run.model, truth, mask, init=start, burn_in=tuned, steps=length - tuned, step_size=0.01,
            generator=run.generator(seed, "chains"),
        )  # fmt: skip
        states[length] = filled[:, 0]
    mean = run.split("train").mean(0).expand_as(truth)

    def error(guess: Tensor) -> float:
        return float((guess - truth)[mask].square().mean().sqrt())

    return Imputation(truth, mask, states, error(start), error(mean), error(states[steps]))


def draw_imputation(run: Run, found: Imputation, path: Path) -> None:
    """Saves strips: observed, start, states of the chain, result, and the image as it is."""
    truth = run.as_images(found.truth)
    hidden = truth.masked_fill(found.mask.reshape(truth.shape), float("nan"))
    *between, last = found.states
    columns = [("observed", hidden)]
    columns += [("start" if not step else f"{step} steps", run.as_images(found.states[step])) for step in between]
    columns += [(f"result\n({last} steps)", run.as_images(found.states[last])), ("truth", truth)]
    plots.strips(path, columns, f"Missing pixels by Langevin steps, {_name(run)}")


def _name(run: Run) -> str:
    """What a picture shows: the model, how it was trained, and at which step."""
    if run.step == 0:
        return f"{run.config.model}, untrained (step 0)"
    step = "" if run.step is None else f", step {run.step:,}"
    return f"{run.config.model} by {(run.config.loss or '').upper()}{step}"
