"""Curves of several seeds: their mean, and each of them as a thin line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from ebflow_examples import plots

__all__ = ["COLOURS", "apart", "joined", "objective_name", "race", "seed_curves"]

COLOURS = {  # told apart by all eyes
    "ml": "#D55E00",
    "sml": "#E69F00",
    "ml_stochastic": "#000000",
    "ml_relative": "#CC79A7",
    "ssm": "#0072B2",
    "dsm": "#009E73",
    "fdssm": "#56B4E9",
}
POINTS = 60
SMALL, LARGE = 1e-2, 1e5  # numbers between these are written out
WIDEST = 0.95  # values above this quantile do not stretch the axis

RACERS = {
    "ml": "exact likelihood",
    "ml_stochastic": "likelihood without\ndeterminants",
    "dsm": "denoising score\nmatching",
    "ssm": "sliced score\nmatching",
}
NEAREST = 0.13  # of the height of a picture: two labels of two lines each are at least so far from each other

Points = Sequence[tuple[float, float]]


def objective_name(loss: str) -> str:
    """An objective as tables and pictures call it.

    Example:
        >>> objective_name("ml_relative"), objective_name("ssm")
        ('ML, relative gradient', 'SSM')
    """
    return {"ml_relative": "ML, relative gradient", "ml_stochastic": "ML without determinants"}.get(loss, loss.upper())


def joined(curves: Sequence[Points]) -> tuple[list[float], list[list[float]]]:
    """Puts curves on the x that all of them reach: x, and each curve there.

    Example:
        >>> x, lines = joined([[(0.0, 1.0), (2.0, 3.0)], [(0.0, 1.0), (4.0, 5.0)]])
        >>> x[-1], [line[-1] for line in lines]
        (2.0, [3.0, 3.0])
    """
    low, high = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    x = np.linspace(low, max(low, high), POINTS)
    return x.tolist(), [np.interp(x, *np.array(curve).T).tolist() for curve in curves]


def seed_curves(
    axes: Any,
    lines: Mapping[str, tuple[str, Sequence[Points]]],
    title: str,
    x: str,
    y: str,
    *,
    digits: int = 1,
    log: bool = False,
) -> None:
    """Draws the mean over seeds, named with the value that it ends at, and thin lines for the seeds.

    Arguments:
        axes: Where to.
        lines: Label -> colour and the curves of its seeds.
        title: What it is.
        x: What is to the right.
        y: What is up.
        digits: Of the values in the legend.
        log: Whether y is logarithmic.
    """
    heights: list[float] = []
    for label, (colour, curves) in lines.items():
        along, seeds = joined(curves)
        middle = np.mean(seeds, axis=0)
        number = f"{middle[-1]:.{digits}f}" if SMALL < abs(middle[-1]) < LARGE else f"{middle[-1]:.2g}"
        axes.plot(along, middle, color=colour, linewidth=1.8, label=f"{label}  {number}")
        if len(seeds) > 1:
            axes.plot(along, np.transpose(seeds), color=colour, linewidth=0.6, alpha=0.6)
        heights += [value for line in seeds for value in line]
    if log:
        axes.set_yscale("log")
        if heights and max(heights) < 100 * min(heights):  # powers of ten alone would leave two ticks
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
    elif heights:
        low, high = min(heights), float(np.quantile(heights, WIDEST))
        room = 0.08 * max(high - low, 1e-6)
        axes.set_ylim(low - room, high + room)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), labelcolor="linecolor", fontsize=8)  # hides no line
    axes.grid(axis="y", color=plots.COLOURS["grid"], linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set(title=title, xlabel=x, ylabel=y)


def race(path: Path, curves: Mapping[str, Sequence[Points]], title: str) -> None:
    """Draws NLL against seconds for some objectives, each named at the end of its line, in letters for a README.

    Arguments:
        path: The file.
        curves: Objective -> the curves of its seeds.
        title: Data, model and machine.
    """
    with plots.figure(path, 9.0, 5.0) as figure:
        axes = figure.subplots()
        ends: dict[str, tuple[float, float]] = {}
        for loss, seeds in curves.items():
            along, lines = joined(seeds)
            middle = np.mean(lines, axis=0)
            axes.plot(along, middle, color=COLOURS[loss], linewidth=3.0)
            axes.fill_between(along, np.min(lines, axis=0), np.max(lines, axis=0), color=COLOURS[loss], alpha=0.15)
            ends[loss] = along[-1], float(middle[-1])
        low, high = axes.get_ylim()
        last = max(x for x, _ in ends.values())
        for (loss, (_, value)), place in zip(
            sorted(ends.items(), key=lambda item: item[1][1]),
            apart((value for _, value in ends.values()), NEAREST * (high - low)),
            strict=True,
        ):
            axes.annotate(
                f"{RACERS[loss]}: {value:,.0f}", (last, value), (last * 1.05, place), color=COLOURS[loss],
                fontsize=14, fontweight="bold", va="center", annotation_clip=False,
                arrowprops={"arrowstyle": "-", "color": COLOURS[loss], "linewidth": 0.8, "relpos": (0.0, 0.5)},
            )  # fmt: skip
        axes.set_xlim(0.0, last)
        axes.tick_params(labelsize=13)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.grid(axis="y", color=plots.COLOURS["grid"], linewidth=0.6)
        axes.set_xlabel("CPU seconds of training", fontsize=15)
        axes.set_ylabel("NLL in nats (lower is better)", fontsize=15)
        axes.set_title(title, fontsize=15)


def apart(values: Iterable[float], least: float) -> list[float]:
    """Heights for labels in ascending order, near their values and not on one another.

    Example:
        >>> apart([1.1, 5.0, 1.0], 0.5)
        [1.0, 1.5, 5.0]
    """
    heights: list[float] = []
    for value in sorted(values):
        heights.append(value if not heights else max(value, heights[-1] + least))
    return heights
