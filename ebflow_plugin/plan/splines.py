r"""Monotone splines without masks: rational-quadratic, quadratic, cubic and linear ones.

A library selects the entries inside of a spline's interval with boolean indices, which makes the host wait for the
device and cannot be traced into a graph. Here each entry is computed, and :func:`torch.where` selects. Every function
returns the value and the log of the slope, elementwise, in either direction.

The parameters of a spline have one more dimension than x, the bins or the knots; they may be broadcast against x.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

HALVINGS = 24  # of a bin, before the Newton steps
AREA = 1e-3  # of a bin under a density, at least, before it is normalised

Curve = tuple[Tensor, Tensor]


def shares(logits: Tensor, minimum: float = 0.0) -> Tensor:
    """Positive numbers with the sum 1, each at least ``minimum``.

    Example:
        >>> shares(torch.zeros(4), 0.1)
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    parts = torch.softmax(logits, -1)
    return parts if minimum == 0.0 else minimum + (1.0 - minimum * logits.shape[-1]) * parts


def knots(widths: Tensor) -> Tensor:
    """The edges of bins with these widths: exactly 0, the cumulative sums, and exactly 1.

    Example:
        >>> knots(torch.tensor([0.25, 0.75]))
        tensor([0.0000, 0.2500, 1.0000])
    """
    return F.pad(F.pad(widths.cumsum(-1)[..., :-1], (1, 0)), (0, 1), value=1.0)


def rational_quadratic(x: Tensor, xs: Tensor, ys: Tensor, slopes: Tensor, inverse: bool = False) -> Curve:
    """A piecewise rational-quadratic map through the knots (xs, ys) with these slopes; outside of them, the identity.

    References:
        Neural Spline Flows (Durkan et al., 2019), https://arxiv.org/abs/1906.04032

    Example:
        >>> knot = torch.tensor([-1.0, 0.0, 1.0])
        >>> rational_quadratic(torch.tensor([0.5, 3.0]), knot, knot, torch.tensor([1.0, 1.0, 1.0]))
        (tensor([0.5000, 3.0000]), tensor([0., 0.]))
    """
    grid = (ys if inverse else xs).detach()
    inside = (x >= grid[..., 0]) & (x <= grid[..., -1])
    point = torch.where(inside, x, grid[..., 0])
    place = _bins(point, grid)
    (x0, x1), (y0, y1), (d0, d1) = _ends(torch.stack((xs, ys, slopes), -2), place)
    width, height = x1 - x0, y1 - y0
    slope = height / width
    bend = d0 + d1 - 2.0 * slope
    if inverse:
        rise = point - y0
        a, b, c = height * (slope - d0) + rise * bend, height * d0 - rise * bend, -slope * rise
        t = 2.0 * c / (-b - torch.sqrt(b.square() - 4.0 * a * c))
    else:
        t = (point - x0) / width
    both, rest = t * (1.0 - t), 1.0 - t
    under = slope + bend * both
    over = d1 * t.square() + 2.0 * slope * both + d0 * rest.square()
    log_slope = 2.0 * torch.log(slope / under) + torch.log(over)
    value = x0 + width * t if inverse else y0 + height * (slope * t.square() + d0 * both) / under
    log_slope = -log_slope if inverse else log_slope
    return torch.where(inside, value, x), torch.where(inside, log_slope, torch.zeros_like(x))


def linear(x: Tensor, heights: Tensor, inverse: bool = False) -> Curve:
    """The distribution function of a density on [0, 1] that is constant on bins of equal width.

    Arguments:
        x: Points of [0, 1].
        heights: The probability of each bin.
        inverse: Whether to map back.

    Example:
        >>> linear(torch.tensor([0.5]), torch.tensor([0.25, 0.75]))[0]
        tensor([0.2500])
    """
    count, edges = heights.shape[-1], knots(heights)
    place = _bins(x, edges.detach()) if inverse else (x.detach() * count).long().clamp(0, count - 1)
    height, below = _at(heights, place), _at(edges, place)
    log_slope = torch.log(height * count)
    if inverse:
        return ((place + (x - below) / height) / count).clamp(0.0, 1.0), -log_slope
    return (below + (x * count - place) * height).clamp(0.0, 1.0), log_slope


def quadratic(x: Tensor, widths: Tensor, heights: Tensor, least: float, inverse: bool = False) -> Curve:
    """The distribution function of a density on [0, 1] that is linear on each bin.

    Arguments:
        x: Points of [0, 1].
        widths: The widths of K bins, with the sum 1.
        heights: The unnormalised density at the K + 1 knots, or at the K - 1 inner ones: it is then 1 at both ends.
        least: The smallest density.
        inverse: Whether to map back.

    References:
        Neural Importance Sampling (Müller et al., 2019), https://arxiv.org/abs/1808.03856

    Example:
        >>> quadratic(torch.tensor([0.5]), torch.tensor([0.5, 0.5]), torch.zeros(3), 0.0)[0]
        tensor([0.5000])
    """
    heights = F.softplus(heights) + AREA
    if heights.shape[-1] == widths.shape[-1] - 1:
        first, last = 0.5 * widths[..., 0], 0.5 * widths[..., -1]
        inner = (0.5 * (heights[..., :-1] + heights[..., 1:]) * widths[..., 1:-1]).sum(-1)
        inner = inner + 0.5 * first * heights[..., 0] + 0.5 * last * heights[..., -1]
        end = (inner / (1.0 - 0.5 * first - 0.5 * last)).unsqueeze(-1)
        heights = torch.cat([end, heights, end], -1)
    area = (0.5 * (heights[..., :-1] + heights[..., 1:]) * widths).sum(-1, keepdim=True)
    heights = least + (1.0 - least) * heights / area
    lefts, edges = knots(0.5 * (heights[..., :-1] + heights[..., 1:]) * widths), knots(widths)
    place = _bins(x, (lefts if inverse else edges).detach())
    width, start, below = _at(widths, place), _at(edges, place), _at(lefts, place)
    left, right = _at(heights, place), _at(heights, place + 1)
    a, b = 0.5 * (right - left) * width, left * width
    if inverse:  # the root in a form that does not cancel for small a
        c = below - x
        t = -2.0 * c / (b + torch.sqrt(b.square() - 4.0 * a * c))
        return (start + t * width).clamp(0.0, 1.0), -torch.log(left + t * (right - left))
    t = (x - start) / width
    return ((a * t + b) * t + below).clamp(0.0, 1.0), torch.log(left + t * (right - left))


def cubic(x: Tensor, widths: Tensor, heights: Tensor, first: Tensor, last: Tensor, inverse: bool = False) -> Curve:
    """A monotone piecewise cubic map of [0, 1] onto itself (Steffen's method).

    Arguments:
        x: Points of [0, 1].
        widths: The widths of K bins, with the sum 1.
        heights: Their heights, with the sum 1.
        first: The logit of the slope at 0, as a share of three times that of the first bin, with one entry.
        last: The same at 1, of the last bin.
        inverse: Whether to map back.

    References:
        Cubic-Spline Flows (Durkan et al., 2019), https://arxiv.org/abs/1906.02145

    Example:
        >>> cubic(torch.tensor([0.5]), *[torch.tensor([0.5, 0.5])] * 2, *[torch.tensor([0.0])] * 2)[0]
        tensor([0.5000])
    """
    slopes, edges, lefts = heights / widths, knots(widths), knots(heights)
    before, after = slopes[..., :-1], slopes[..., 1:]
    middle = (widths[..., 1:] * before + widths[..., :-1] * after) / (widths[..., :-1] + widths[..., 1:])
    inner = torch.minimum(2.0 * torch.minimum(before, after), middle)
    ends = (3.0 * torch.sigmoid(first) * slopes[..., :1], 3.0 * torch.sigmoid(last) * slopes[..., -1:])
    d = torch.cat([ends[0], inner, ends[1]], -1)
    place = _bins(x, (lefts if inverse else edges).detach())
    width, slope, start, below = (_at(one, place) for one in (widths, slopes, edges, lefts))
    d0, d1 = _at(d, place), _at(d, place + 1)
    a, b = d0 + d1 - 2.0 * slope, 3.0 * slope - 2.0 * d0 - d1

    def rise(t: Tensor) -> Tensor:
        return width * t * (d0 + t * (b + t * a))

    def steepness(t: Tensor) -> Tensor:
        return d0 + t * (2.0 * b + 3.0 * t * a)

    if not inverse:
        t = (x - start) / width
        return below + rise(t), torch.log(steepness(t))
    with torch.no_grad():  # no closed form is accurate for all coefficients
        low, high = torch.zeros_like(x), torch.ones_like(x)
        for _ in range(HALVINGS):
            t = 0.5 * (low + high)
            under = below + rise(t) < x
            low, high = torch.where(under, t, low), torch.where(under, high, t)
        t = 0.5 * (low + high)
    for _ in range(2):  # exact, and differentiable three times
        t = t - (below + rise(t) - x) / (width * steepness(t))
    return start + width * t, -torch.log(steepness(t))


def within(x: Tensor, spline: Callable[[Tensor], Curve], bound: float | None) -> Curve:
    """A spline of [0, 1] on [-bound, bound], and the identity outside; without a bound on [0, 1], and NaN outside.

    Example:
        >>> within(torch.tensor([0.5, 2.0]), lambda x: (x.square(), (2 * x).log()), None)[0]
        tensor([0.2500,    nan])
    """
    low, high = (0.0, 1.0) if bound is None else (-bound, bound)
    inside = (x >= low) & (x <= high)
    value, log_slope = spline((torch.where(inside, x, torch.full_like(x, low)) - low) / (high - low))
    nothing = torch.full_like(x, torch.nan)
    outside = (nothing, nothing) if bound is None else (x, torch.zeros_like(x))
    return torch.where(inside, value * (high - low) + low, outside[0]), torch.where(inside, log_slope, outside[1])


def _bins(x: Tensor, edges: Tensor) -> Tensor:
    """The bin of each entry of x: that of the right one of two at a knot."""
    found: Tensor = (x.detach().unsqueeze(-1) >= edges[..., 1:-1]).sum(-1)
    return found


def _at(table: Tensor, place: Tensor) -> Tensor:
    """The entry of each row of a table, which is broadcast against the places."""
    return table.expand(*place.shape, table.shape[-1]).gather(-1, place.unsqueeze(-1)).squeeze(-1)


def _ends(tables: Tensor, place: Tensor) -> list[tuple[Tensor, ...]]:
    """The entries of tables, with shape (*, T, K), at a place and after it: by one gather."""
    count, size = tables.shape[-2:]
    both = torch.stack([place, place + 1], -1).unsqueeze(-2).expand(*place.shape, count, 2)
    found = tables.expand(*place.shape, count, size).gather(-1, both)
    return [one.unbind(-1) for one in found.unbind(-2)]
