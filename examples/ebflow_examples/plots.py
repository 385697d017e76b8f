"""Pictures: densities, samples, imputations, and curves of several seeds, in one style.

Functions of this module draw into an axes, or save one figure; none shows a window, and none touches pyplot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter
from torch import Tensor

COLOURS = {"score": "#0072B2", "ml": "#D55E00", "ink": "#333333", "grid": "#DDDDDD"}  # told apart by all eyes
OBJECTIVE_COLOURS = {  # in the order of tables
    "ml": "#D55E00",
    "sml": "#E69F00",
    "ml_stochastic": "#000000",
    "ml_relative": "#CC79A7",
    "ssm": "#0072B2",
    "dsm": "#009E73",
    "fdssm": "#56B4E9",
}
DENSITY_MAP = "magma"
STYLE: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "axes.titlepad": 6.0,
    "axes.edgecolor": "#999999",
    "axes.labelcolor": COLOURS["ink"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": COLOURS["ink"],
    "ytick.color": COLOURS["ink"],
    "text.color": COLOURS["ink"],
    "legend.frameon": False,
    "image.interpolation": "nearest",
    "savefig.dpi": 150.0,
}
SAME_UNITS = 4.0  # two coordinates whose ranges differ by less share one scale
GAP = 1  # pixels between the images of a grid
POINTS = 60  # of a mean of curves
WIDEST = 0.95  # values above this quantile do not stretch the axis
NEAREST = 0.13  # of the height of a picture: two labels of two lines each are at least so far from each other
VEIL = (0.80, 0.86, 0.92)  # the colour of what is not known

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """A part of the plane, drawn as a square.

    Attributes:
        low: The lower left corner.
        high: The upper right corner.
    """

    low: tuple[float, float]
    high: tuple[float, float]

    @classmethod
    def around(cls, rows: Tensor) -> Panel:
        """What holds nearly all of the points: a square, or, if their units differ, a range for each coordinate."""
        edges = torch.quantile(rows[:10_000].double().cpu(), torch.tensor([0.001, 0.999], dtype=torch.float64), dim=0)
        centre, half = edges.mean(0), 0.56 * (edges[1] - edges[0])
        if float(half.max()) < SAME_UNITS * float(half.min()):
            half = half.max().expand(2)
        half = torch.where(half > 0, half, 1.0)
        (left, below), (right, above) = (centre - half).tolist(), (centre + half).tolist()
        return cls((left, below), (right, above))

    def points(self, size: int) -> Tensor:
        """The middles of ``size`` times ``size`` cells, row by row from below: shape (size², 2)."""
        lines = []
        for low, high in zip(self.low, self.high, strict=True):
            edges = torch.linspace(low, high, size + 1)
            lines.append((edges[1:] + edges[:-1]) / 2)
        return torch.cartesian_prod(lines[1], lines[0]).flip(1)

    @property
    def extent(self) -> tuple[float, float, float, float]:
        """As matplotlib wants it."""
        return self.low[0], self.high[0], self.low[1], self.high[1]

    @property
    def area(self) -> float:
        """How large it is, in the units of the data."""
        left, right, below, above = self.extent
        return (right - left) * (above - below)


@contextmanager
def figure(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure in our style, saved at the end of the ``with`` block."""
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(width, height), layout="constrained")
        yield drawn
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(path)


def density(axes: Any, values: Tensor, panel: Panel, title: str, top: float | None = None) -> Any:
    """Draws a density from its values at :meth:`Panel.points`, black for zero. ``top`` is the brightest value."""
    size = int(len(values) ** 0.5)
    picture = values.reshape(size, size).cpu().numpy()
    drawn = axes.imshow(
        picture, origin="lower", extent=panel.extent, cmap=DENSITY_MAP, vmin=0.0, vmax=top, interpolation="bilinear",
        aspect="auto",
    )  # fmt: skip
    _plane(axes, panel, title)
    return drawn


def scatter(axes: Any, rows: Tensor, panel: Panel, title: str) -> None:
    """Draws points of the plane; those outside of the panel are drawn at its edge, in another colour, and counted."""
    rows = rows.detach().cpu().double()
    low, high = (torch.tensor(corner, dtype=rows.dtype) for corner in (panel.low, panel.high))
    inside = ((rows >= low) & (rows <= high)).all(1)
    x, y = rows[inside].unbind(1)
    axes.scatter(x.numpy(), y.numpy(), s=2.0, linewidths=0, alpha=0.5, color=COLOURS["score"], rasterized=True)
    if not bool(inside.all()):
        edge = rows[~inside].nan_to_num(nan=float("inf")).clamp(low, high)
        axes.scatter(*edge.T.numpy(), s=9.0, marker="s", linewidths=0, color=COLOURS["ml"], clip_on=False, zorder=3)
        words = f"{int((~inside).sum()):,} of {len(rows):,} outside, at the edge"
        axes.text(0.99, 0.99, words, transform=axes.transAxes, ha="right", va="top", fontsize=7, color=COLOURS["ml"],
                  bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.0}, zorder=4)  # fmt: skip
    _plane(axes, panel, title)


def _plane(axes: Any, panel: Panel, title: str) -> None:
    axes.set_title(title)
    axes.set_xlim(panel.low[0], panel.high[0])
    axes.set_ylim(panel.low[1], panel.high[1])
    axes.set_box_aspect(1)
    for side, low, high in zip((axes.xaxis, axes.yaxis), panel.low, panel.high, strict=True):
        side.set_tick_params(length=2)
        side.set_major_locator(MaxNLocator(5, integer=high - low > 5))
    axes.set_xlabel("$x_1$", labelpad=1)
    axes.set_ylabel("$x_2$", labelpad=1)


def images(axes: Any, pictures: Tensor, columns: int, title: str = "") -> None:
    """Draws a grid of images with shape (N, C, H, W) and values in [0, 1]."""
    axes.imshow(tiled(pictures, columns).numpy(), cmap="gray", vmin=0.0, vmax=1.0)
    axes.set_axis_off()
    if title:
        axes.set_title(title)


def tiled(pictures: Tensor, columns: int) -> Tensor:
    """One image of many: shape (H', W') for grey ones, (H', W', 3) for colour, white between them.

    What is not known (NaN) is in the colour of none of the pixels.

    Example:
        >>> tiled(torch.zeros(4, 1, 8, 8), columns=2).shape
        torch.Size([17, 17])
    """
    unknown = pictures.isnan().any(1, keepdim=True)
    if bool(unknown.any()):
        pictures = torch.where(unknown, torch.tensor(VEIL, device=pictures.device).reshape(3, 1, 1), pictures[:, :3])
    count, channels, height, width = pictures.shape
    rows = -(-count // columns)
    sheet = torch.ones(channels, rows * (height + GAP) - GAP, columns * (width + GAP) - GAP)
    for place, picture in enumerate(pictures.detach().cpu().float().clamp(0.0, 1.0)):
        top, left = place // columns * (height + GAP), place % columns * (width + GAP)
        sheet[:, top : top + height, left : left + width] = picture
    return sheet[0] if channels == 1 else sheet[:3].movedim(0, -1)


def save_images(path: Path, pictures: Tensor, columns: int, title: str) -> None:
    """Saves a grid of images."""
    rows = -(-len(pictures) // columns)
    with figure(path, 0.6 * columns + 0.4, 0.6 * rows + 0.6) as drawn:
        images(drawn.subplots(), pictures, columns, title)


def save_panels(path: Path, files: Mapping[str, Path], columns: int, size: float) -> None:
    """Saves grids of images beside one another, each from its .npy file, by title."""
    with figure(path, size * max(1, len(files)), size + 0.3) as drawn:
        for place, (title, file) in enumerate(files.items(), start=1):
            images(drawn.add_subplot(1, len(files), place), torch.from_numpy(np.load(file)), columns, title)


def plain_log(axis: Any) -> None:
    """Gives a logarithmic axis ticks at 1, 2 and 5 times powers of ten, written out: powers alone may be two."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.set_minor_formatter(NullFormatter())


def strips(path: Path, columns: Sequence[tuple[str, Tensor]], title: str) -> None:
    """Saves one row for each image, one column for each state of its chain.

    Arguments:
        path: Where to.
        columns: A heading and images with shape (N, C, H, W) and values in [0, 1], NaN where nothing is known.
        title: What it is.
    """
    count, width = len(columns[0][1]), columns[0][1].shape[-1] + GAP
    pictures = torch.stack([each.cpu().float() for _, each in columns], 1).flatten(0, 1)
    with figure(path, 0.95 * len(columns) + 0.3, 0.95 * count + 0.7) as drawn:
        axes = drawn.subplots()
        images(axes, pictures, len(columns))
        for place, (heading, _) in enumerate(columns):
            axes.text((place + 0.5) * width, -GAP, heading, fontsize=8, ha="center", va="bottom")
        drawn.suptitle(title, fontsize=10, x=0.01, ha="left")


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


def curves(
    axes: Any,
    lines: Mapping[str, Sequence[Points]],
    words: Callable[[str, float], str],
    size: float = 9.0,
    colours: Mapping[str, str] = OBJECTIVE_COLOURS,
) -> None:
    """Draws the mean over seeds and a thin line for each, from 0 on; words at the end of a line, not on one another.

    Arguments:
        axes: Where to. If its y is logarithmic already, the words are apart on that scale; limits of y that are set
            hold, else what is far above all else is left out.
        lines: Name -> the curves of its seeds; names without any are left out.
        words: What stands at the end of a line, by its name and its last value.
        size: Of the words, in points; lines are a fifth of it wide.
        colours: By name.
    """
    lines, log = {name: seeds for name, seeds in lines.items() if seeds}, axes.get_yscale() == "log"
    if not lines:
        return
    ends: dict[str, float] = {}
    heights: list[float] = []
    for name, seeds in lines.items():
        along, values = joined(seeds)
        middle = np.mean(values, axis=0)
        axes.plot(along, middle, color=colours[name], linewidth=size / 5, zorder=3)
        if len(seeds) > 1:
            axes.plot(along, np.transpose(values), color=colours[name], linewidth=0.6, alpha=0.6)
        ends[name] = float(middle[-1])
        heights += [height for value in values for height in value]
    if log:
        plain_log(axes.yaxis)
    elif axes.get_autoscaley_on():
        low, high = min(heights), max(float(np.quantile(heights, WIDEST)), *ends.values())
        room = 0.08 * max(high - low, 1e-6)
        axes.set_ylim(low - room, high + room)
    last = max(curve[-1][0] for seeds in lines.values() for curve in seeds)
    axes.set_xlim(0.0, last)
    axes.grid(axis="y", color=COLOURS["grid"], linewidth=0.6)
    low, high = axes.get_ylim()
    for name, place in apart(ends, low, high, log).items():
        axes.annotate(
            words(name, ends[name]), (last, ends[name]), (last * 1.05, place), color=colours[name],
            fontsize=size, fontweight="bold", va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colours[name], "linewidth": 0.8, "relpos": (0.0, 0.5)},
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
