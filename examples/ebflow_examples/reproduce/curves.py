"""Curves of several seeds as one line: the mean, and its 95 % interval as a band."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ebflow_examples import plots
from ebflow_examples.reproduce.output import mean

__all__ = ["COLOURS", "bands", "joined", "objective_name"]

COLOURS = {  # told apart by all eyes
    "ml": "#D55E00",
    "sml": "#E69F00",
    "relative_ml": "#CC79A7",
    "ssm": "#0072B2",
    "dsm": "#009E73",
    "fdssm": "#56B4E9",
}
POINTS = 60
WIDEST = 0.95  # values above this quantile do not stretch the axis

Points = Sequence[tuple[float, float]]


def objective_name(loss: str) -> str:
    """An objective as tables and pictures call it.

    Example:
        >>> objective_name("relative_ml"), objective_name("ssm")
        ('RelativeML', 'SSM')
    """
    return {"relative_ml": "RelativeML"}.get(loss, loss.upper())


def joined(curves: Sequence[Points]) -> tuple[list[float], list[float], list[float]]:
    """Puts curves on the x that all of them reach: x, mean, and half the width of the 95 % interval (0 for one).

    Example:
        >>> joined([[(0.0, 1.0), (2.0, 3.0)], [(0.0, 1.0), (4.0, 5.0)]])[1][-1]
        3.0
    """
    low, high = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    x = np.linspace(low, max(low, high), POINTS)
    lines = [np.interp(x, *np.array(curve).T) for curve in curves]
    means = [mean(values) for values in zip(*(line.tolist() for line in lines), strict=True)]
    return x.tolist(), [each.value for each in means], [each.interval if len(curves) > 1 else 0.0 for each in means]


def bands(
    axes: Any,
    lines: Mapping[str, tuple[str, Sequence[Points]]],
    title: str,
    x: str,
    y: str,
    *,
    digits: int = 1,
    log: bool = False,
) -> None:
    """Draws lines with bands, named with the values that they end at.

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
    number = ".2e" if log else f".{digits}f"
    for label, (colour, curves) in lines.items():
        along, middle, width = joined(curves)
        axes.plot(along, middle, color=colour, linewidth=1.6, label=f"{label}  {middle[-1]:{number}}")
        edges = np.array(middle)[None] + np.outer((-1.0, 1.0), width)
        axes.fill_between(along, edges[0], edges[1], color=colour, alpha=0.18, linewidth=0)
        heights += middle
    if log:
        axes.set_yscale("log")
    elif heights:
        low, high = min(heights), float(np.quantile(heights, WIDEST))
        room = 0.08 * max(high - low, 1e-6)
        axes.set_ylim(low - room, high + room)
    axes.legend(loc="best", labelcolor="linecolor", fontsize=8)
    axes.grid(axis="y", color=plots.COLOURS["grid"], linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set(title=title, xlabel=x, ylabel=y)
