"""Curves of several seeds: their mean, and each of them as a thin line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ebflow_examples import plots

__all__ = ["COLOURS", "joined", "labelled", "objective_name", "seed_curves"]

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
            plots.plain_log(axes.yaxis)
    elif heights:
        low, high = min(heights), float(np.quantile(heights, WIDEST))
        room = 0.08 * max(high - low, 1e-6)
        axes.set_ylim(low - room, high + room)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), labelcolor="linecolor", fontsize=8)  # hides no line
    axes.grid(axis="y", color=plots.COLOURS["grid"], linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set(title=title, xlabel=x, ylabel=y)


def labelled(
    axes: Any, curves: Mapping[str, Sequence[Points]], words: Callable[[str, float], str], size: float
) -> None:
    """Draws the mean over seeds and a thin line for each, from 0 on; words at the end of a line, not on one another.

    Arguments:
        axes: Where to; if its y is logarithmic already, the words are apart on that scale.
        curves: Objective -> the curves of its seeds.
        words: What stands at the end of a line, by the objective and its last value.
        size: Of the words, in points; lines are a fifth of it wide.
    """
    ends: dict[str, float] = {}
    for loss, seeds in curves.items():
        along, lines = joined(seeds)
        axes.plot(along, np.mean(lines, axis=0), color=COLOURS[loss], linewidth=size / 5)
        axes.plot(along, np.transpose(lines), color=COLOURS[loss], linewidth=0.6, alpha=0.6)
        ends[loss] = float(np.mean(lines, axis=0)[-1])
    last = max(curve[-1][0] for seeds in curves.values() for curve in seeds)
    axes.set_xlim(0.0, last)
    axes.grid(axis="y", color=plots.COLOURS["grid"], linewidth=0.6)
    low, high = axes.get_ylim()
    for loss, place in apart(ends, low, high, axes.get_yscale() == "log").items():
        axes.annotate(
            words(loss, ends[loss]), (last, ends[loss]), (last * 1.05, place), color=COLOURS[loss],
            fontsize=size, fontweight="bold", va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": COLOURS[loss], "linewidth": 0.8, "relpos": (0.0, 0.5)},
        )  # fmt: skip


def apart(ends: Mapping[str, float], low: float, high: float, log: bool = False) -> dict[str, float]:
    """Places for labels on an axis from low to high: near their values, and not on one another.

    Example:
        >>> apart({"a": 1.0, "c": 5.0, "b": 1.1}, 0.0, 10.0)
        {'a': 1.0, 'b': 2.3, 'c': 5.0}
    """
    to, back = (np.log, np.exp) if log else (float, float)
    places: dict[str, float] = {}
    before = -np.inf
    for name in sorted(ends, key=ends.__getitem__):
        before = max(float(to(ends[name])), before + NEAREST * float(to(high) - to(low)))
        places[name] = float(back(before))
    return places
