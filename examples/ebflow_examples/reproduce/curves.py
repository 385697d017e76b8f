"""Curves of several seeds: their mean, and each of them as a thin line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from ebflow_examples import plots

__all__ = ["COLOURS", "joined", "objective_name", "seed_curves"]

COLOURS = {  # told apart by all eyes
    "ml": "#D55E00",
    "sml": "#E69F00",
    "ml_stochastic": "#000000",
    "relative_ml": "#CC79A7",
    "ssm": "#0072B2",
    "dsm": "#009E73",
    "fdssm": "#56B4E9",
}
POINTS = 60
SMALL, LARGE = 1e-2, 1e5  # numbers between these are written out
WIDEST = 0.95  # values above this quantile do not stretch the axis

Points = Sequence[tuple[float, float]]


def objective_name(loss: str) -> str:
    """An objective as tables and pictures call it.

    Example:
        >>> objective_name("relative_ml"), objective_name("ssm")
        ('RelativeML', 'SSM')
    """
    return {"relative_ml": "RelativeML", "ml_stochastic": "ML, probes"}.get(loss, loss.upper())


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
    axes.legend(loc="best", labelcolor="linecolor", fontsize=8)
    axes.grid(axis="y", color=plots.COLOURS["grid"], linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set(title=title, xlabel=x, ylabel=y)
