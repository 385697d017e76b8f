"""What Table 2 shows: its tables, notes and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import log
from pathlib import Path
from typing import Any

from ebflow_examples import plots
from ebflow_examples.console import Grid
from ebflow_examples.plots import OBJECTIVE_COLOURS, Points, curves, objective_name
from ebflow_examples.reproduce import paper
from ebflow_examples.reproduce.common import MARGIN, CellResult, Options, judged
from ebflow_examples.reproduce.output import Mean, Report, beside, columns, grouped, mean

MODELS = ("fc", "cnn")
GAUSSIAN = "gaussian"
STOCHASTIC, RELATIVE = "ml_stochastic", "ml_relative"  # ML(log_det="stochastic"), ML(log_det="relative")
WAYS = {"paper": "the paper's way", "ours": "ours"}
TEMPERATURES = {"fc": 0.5, "cnn": 0.75}  # of the logit, in the authors' code
Groups = dict[tuple[Any, ...], list[CellResult]]  # by model, way and objective
RACERS = {
    "ml": "exact likelihood",
    STOCHASTIC: "likelihood without\ndeterminants",
    "dsm": "denoising score\nmatching",
    "ssm": "sliced score\nmatching",
}


def report(options: Options, found: Sequence[CellResult], path: Path) -> Report:
    """NLL, bits/dim and steps per second beside the paper's, a table for each model; curves."""
    grids, rows = [], []
    groups = grouped(found, "model", "way", "loss")
    for model in MODELS:
        if own := {key[1:]: group for key, group in groups.items() if key[0] == model}:
            grid, lines = table_of(options, model, own, found)
            grids += [grid, *rate_grid(options, model, found)]
            rows += lines
    draw(options, groups, path)
    pictures = [path]
    racing = {loss: [each["curve"] for each in groups.get(("cnn", "ours", loss), ())] for loss in RACERS}
    if any(racing.values()):
        pictures.append(path.with_stem(f"{path.stem}_race"))
        draw_race(options, racing, pictures[-1])
    return Report(grids, rows, notes(options, found), pictures)


def table_of(
    options: Options, model: str, groups: dict[tuple[Any, ...], list[CellResult]], found: Sequence[CellResult]
) -> tuple[Grid, list[dict[str, Any]]]:
    """A line for each way and objective, and for what others have; the paper's numbers are of converged models."""
    lines, rows = [], []
    known = known_data(options.data)
    theirs_by_loss = {**paper.IMAGES.get(known, {}).get(model, {})}
    if (known, model) == ("mnist", "fc"):
        theirs_by_loss |= paper.RELATED
    for way, loss in sorted(groups, key=lambda key: (list(WAYS).index(key[0]), list(OBJECTIVE_COLOURS).index(key[1]))):
        group = groups[way, loss]
        means = columns(group, "nll", "raw_nll", "bits_per_dim", "steps_per_second", "steps", "seconds")
        start = mean(each.result["curve"][0][1] for each in group)
        theirs = theirs_by_loss.get(loss)
        pace = paper.THROUGHPUT.get(known, {}).get(model, {}).get(loss)
        rate = group[0].result["recipe"]["lr"]
        told = {"model": model, "way": way, "loss": loss, "lr": rate, "start_nll": start}
        rows.append({**told, **means, "paper_nll": theirs, "paper_steps_per_second": pace})
        nlls = [f"{start.mean:.1f}", means["raw_nll"].text(1), means["nll"].text(1), means["bits_per_dim"].text(3)]
        quoted = "" if theirs is None else Mean(theirs[0], theirs[1]).text(1)
        speed = beside(f"{means['steps_per_second'].mean:.2f}", pace, 2)
        steps = f"{means['steps'].mean:.0f}"
        lines.append([WAYS[way], objective_name(loss), f"{rate:g}", *nlls, quoted, steps, speed])
    lines += _anchors(known, found)
    head = (
        "", "objective", "rate", "NLL of the start", "NLL, raw", "NLL, calibrated", "bits/dim, calibrated",
        "the paper's NLL, converged", "steps", "steps/s (V100)",
    )  # fmt: skip
    return Grid(f"{model} on {options.data}, test data", head, lines, 2), rows


def known_data(data: str) -> str:
    """The data set that the paper and others have numbers of; the JPEG copy of CIFAR-10 stands for it."""
    return "cifar10" if data.startswith("cifar10") else data


def _anchors(known: str, found: Sequence[CellResult]) -> list[list[str]]:
    """Lines with what a Gaussian has, and others' models."""
    lines = [
        (f"{each['nll']:.1f}", f"{each['bits_per_dim']:.3f}", "a Gaussian on the logits, no training")
        for each in found
        if each["loss"] == GAUSSIAN and not each.failed
    ]
    features = {"mnist": 784, "cifar10": 3072}.get(known, 0)
    for name, bits in paper.ANCHORS.get(known, {}).items():
        lines.append((f"{bits * log(2.0) * features:.0f}", f"{bits:.2f}", name))
    return [["", name, "", "", "", nll, bits, "", "", ""] for nll, bits, name in lines]


def rate_grid(options: Options, model: str, found: Sequence[CellResult]) -> list[Grid]:
    """Validation NLL by learning rate: a line for each objective."""
    tried = [each for each in found if each.cell.settings["search"] and each["model"] == model]
    if not tried:
        return []
    used = sorted({each["lr"] for each in tried})
    lines = []
    for loss in OBJECTIVE_COLOURS:
        by_rate = {rate: [each for each in tried if (each["loss"], each["lr"]) == (loss, rate)] for rate in used}
        values = {rate: judged(runs) for rate, runs in by_rate.items()}
        best = min((value for value in values.values() if value is not None), default=None)
        texts = [_rate_text(values[rate], best) if runs else "" for rate, runs in by_rate.items()]
        if any(texts):
            lines.append([objective_name(loss), *texts])
    lengths = sorted({each.cell.seconds for each in tried})
    long = f" ({lengths[-1]:.0f} s for exact ML, whose steps are few)" * (len(lengths) > 1)
    title = (
        f"{model} on {options.data}: validation NLL after {lengths[0]:.0f} s{long} by learning rate, mean of its seeds"
    )
    return [Grid(title, ("objective", *(f"{rate:g}" for rate in used)), lines)]


def _rate_text(value: float | None, best: float | None) -> str:
    if value is None:
        return "failed"
    return f"**{value:.1f}**" if value == best else f"{value:.1f}"


def notes(options: Options, found: Sequence[CellResult]) -> list[str]:
    """What the numbers are, and how the two ways differ."""
    runs = [each for (loss,), group in grouped(found, "loss").items() for each in group if loss != GAUSSIAN]
    ours = [each["start_seconds"] for each in runs if each["way"] == "ours"]
    error = max((each["nll_error"] for each in runs), default=0.0)
    told = [
        f"Pixels are kept {options.margin:g} from 0 and 1: with {MARGIN:g}, as in the authors' code, an NLL here and "
        "one of the paper are the same quantity (but for cifar10-jpeg, another copy of the data, whose compression "
        "takes out detail). What differs is the length of training: seconds of one CPU core in the place of up to "
        "10,000 epochs on a GPU. Seconds are CPU seconds of the one thread that a cell has, so that neighbours on a "
        "shared machine take no time from it, but some of its cache and memory bandwidth. The intervals are over "
        f"seeds; all seeds share the test rows, whose own standard error is {error:.0f} nats for each, and nearly "
        "cancels in differences.",
        "Raw is the model as it was trained. Calibrated: with an affine map of its latents, full or, of CIFAR-10, "
        "diagonal, fitted to training data in closed form. A full one adds a dense D × D layer to a cnn, which has "
        "few weights of its own. After score matching a raw NLL can be thousands of nats above the calibrated one: "
        "scores hardly see directions in which the data are wide, so that means and scales there stay wrong by "
        "factors, and D of them add up; a calibration sets them right at once.",
    ]
    if ours:
        told.append(
            "Ours: a start in closed form where the model allows it (Gaussianising for fc, whitening for cnn), Adam at "
            "the best rate of the grid by validation NLL, for each objective its own, EMA, a cosine schedule, the best "
            "weights by calibrated validation NLL (calibrated on some thousand training rows; what is tested, on "
            f"more). That start and one calibration, up to {max(ours):.1f} s, count as training time; evaluations do "
            "not. The NLL of the start is of validation data, before any step, calibrated."
        )
    if len(ours) < len(runs):
        told.append(
            "The paper's way, as its code has it: start at minus the identity, logits divided by "
            f"{TEMPERATURES['fc']} for fc and {TEMPERATURES['cnn']} for cnn, which is the unit of σ and ε; for cnn a "
            "residual nonlinearity after every convolution but the last; RMSProp with 1e-4 and batches of 100, EMA, "
            "the rate a tenth at 1/2 and at 3/4 of the time; the last average."
        )
    return told


def draw(options: Options, groups: Groups, path: Path) -> None:
    """NLL against training time: a row for each model, a column for each way."""
    models = [model for model in MODELS if any(each[0] == model for each in groups)]
    ways = [way for way in WAYS if any(each[1] == way for each in groups)]
    with plots.figure(path, 6.6 * max(1, len(ways)), 3.6 * max(1, len(models))) as figure:
        axes = figure.subplots(max(1, len(models)), max(1, len(ways)), squeeze=False)
        for (line, model), (place, way) in product(enumerate(models), enumerate(ways)):
            drawn = {loss: [each["curve"] for each in groups.get((model, way, loss), ())] for loss in OBJECTIVE_COLOURS}
            place_of = axes[line, place]
            place_of.set_yscale("log" if way == "paper" else "linear")
            curves(place_of, drawn, lambda loss, end: f"{objective_name(loss)}  {end:,.1f}")
            title = f"{model} on {options.data}, {WAYS[way]}: NLL of validation data"
            place_of.set(title=title, xlabel="CPU seconds of training, one core", ylabel="nats")


def draw_race(options: Options, racing: Mapping[str, Sequence[Points]], path: Path) -> None:
    """NLL against seconds, readable on its own: cnn by exact ML, by ML without determinants, and by two scores."""
    name = {"mnist": "MNIST", "cifar10": "CIFAR-10"}.get(known_data(options.data), options.data)
    with plots.figure(path, 9.0, 5.0) as figure:
        axes = figure.subplots()
        curves(axes, racing, lambda loss, end: f"{RACERS[loss]}: {end:,.0f}", 14)
        axes.tick_params(labelsize=13)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("CPU seconds of training", fontsize=15)
        axes.set_ylabel("NLL in nats (lower is better)", fontsize=15)
        axes.set_title(f"{name}, held-out images: a flow of six 7 × 7 convolutions, one CPU core", fontsize=15)
