r"""Scales and shifts with which an elementwise nonlinearity makes each feature most nearly Gaussian.

For one feature y of variance 1 and a nonlinearity f that is maximum likelihood of a one-dimensional flow,

.. math:: \min_{a, b}\; \tfrac12 \log \operatorname{Var} f(a y + b) - \mathbb{E} \log |a f'(a y + b)|.

A :class:`~ebflow_plugin.layers.SinhArcsinh` has two numbers more, :math:`\delta` for tails and :math:`\epsilon` for
skewness. A few numbers from thousands of rows: hardly any sampling error however large D is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from math import inf, log

import torch
from torch import Tensor

from ebflow_plugin.errors import InputError
from ebflow_plugin.layers import FullLinear, SinhArcsinh
from ebflow_plugin.plan.elementwise import Curve, ElementwiseStep

__all__ = ["Bend", "condense", "fit_bend"]

SCALES = tuple(sign * 2.0**power for power in range(-1, 4) for sign in (1, -1))
SHIFTS = (-8.0, -5.0, -3.0, -1.5, 0.0, 1.5, 3.0, 5.0, 8.0)
TAILS = (1.0, 0.5, 0.25)
LEAST, MOST = 0.25, 16.0  # scales of a nonlinearity without numbers of its own: its layer stays well conditioned
FLATTEST = 0.1  # the least δ: samples of |z| = 5 stay below 1e9 times the scale of the data
# Where a feature hardly feels a nonlinearity, as scale and shift: far out on a side that is straight, which leaves the
# layer as well conditioned as it is; or else close to one point.
STRAIGHT = ((1.0, 12.0), (1.0, -12.0), (1e-2, 0.0))
ALMOST = 1e-2  # by how much the log-slope of a straight nonlinearity may change
ROUNDS = 20
BINS, REACH = 200, 4.5  # of the condensed sample: how many, and over how many standard deviations to either side
# What a search tries from where it is, forwards and backwards: log|a|, b, log δ, ε. A shift and ε can replace each
# other in part, so that the way between them is a move of its own.
OUTER = ((0.5, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0), (0.5, 1.0, 0.0, 0.0), (0.5, -1.0, 0.0, 0.0))
INNER = ((0.0, 0.0, 0.4, 0.0), (0.0, 0.0, 0.0, 0.4), (0.0, 1.0, 0.0, 0.4), (0.4, 0.0, 0.4, 0.0))


@dataclass(frozen=True)
class Bend:
    """What makes features Gaussian, each of shape ``(D,)``.

    Attributes:
        scale: a.
        shift: b.
        log_tail: log δ of a SinhArcsinh; zero for other nonlinearities.
        skewness: Its ε.
        helps: Which features are bent; the others stay as straight as the nonlinearity allows.
    """

    scale: Tensor
    shift: Tensor
    log_tail: Tensor
    skewness: Tensor
    helps: Tensor

    def curve(self, step: ElementwiseStep, y: Tensor) -> Curve:
        """The nonlinearity at a y + b. Sets δ and ε of a SinhArcsinh."""
        self._set(step)
        return (step.inverse_curve if step.inverted else step.forward_curve)(y * self.scale + self.shift, None)

    def write(self, step: ElementwiseStep, layer: FullLinear) -> float:
        """Writes a and b into the layer before the nonlinearity, and δ and ε into the latter.

        Returns:
            What the log-determinant of the layer grew by.
        """
        assert layer.bias is not None
        self._set(step)
        layer.weight.mul_(self.scale[:, None])
        layer.bias.mul_(self.scale).add_(self.shift)
        return self.scale.abs().double().log().sum().item()

    def _set(self, step: ElementwiseStep) -> None:
        if learnable(step):
            step.module.log_tail.copy_(self.log_tail)
            step.module.skewness.copy_(self.skewness)

    @classmethod
    def straight(cls, step: ElementwiseStep, like: Tensor) -> Bend:
        """The one that changes scale and mean alone: the identity of a SinhArcsinh, else f where it is straight."""
        zero, none = torch.zeros_like(like), torch.zeros_like(like, dtype=torch.bool)
        if learnable(step):
            return cls(torch.ones_like(like), zero, zero, zero, none)
        points = torch.linspace(-4.0, 4.0, 9, dtype=like.dtype, device=like.device)[:, None].expand(-1, len(like))
        for scale, shift in STRAIGHT:
            found = cls(torch.full_like(like, scale), torch.full_like(like, shift), zero, zero, none)
            slopes = found.curve(step, points).log_slope()
            if bool((slopes.amax(0) - slopes.amin(0) < ALMOST).all()):
                return found
        return found

    def where(self, chosen: Tensor, other: Bend) -> Bend:
        """This bend for the chosen features, another one for the rest."""
        return Bend(
            torch.where(chosen, self.scale, other.scale),
            torch.where(chosen, self.shift, other.shift),
            torch.where(chosen, self.log_tail, other.log_tail),
            torch.where(chosen, self.skewness, other.skewness),
            chosen,
        )


def learnable(step: ElementwiseStep) -> bool:
    """Whether a nonlinearity has tails and a skewness to fit."""
    return isinstance(step.module, SinhArcsinh) and not step.inverted


def condense(y: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of independent interest in each feature, as weighted points: means of bins of the sorted values.

    The bins are equally wide for a Gaussian, so that each of the values furthest out has one of its own.

    Arguments:
        y: Features, with shape ``(N, D)``.

    Returns:
        Points with shape ``(K, D)``, K at most 200, and their weights with shape ``(K, 1)``, which add up to 1.

    Example:
        >>> points, weights = condense(torch.arange(1000.0)[:, None])
        >>> round(float((weights * points).sum()), 1), bool((points.diff(dim=0) > 0).all())
        (499.5, True)
    """
    ordered = y.sort(0).values
    grid = torch.special.ndtr(torch.linspace(-REACH, REACH, BINS - 1, dtype=torch.float64))
    inner = (grid * len(y)).round().long()
    ends = torch.cat([inner.new_tensor([0]), inner, inner.new_tensor([len(y)])]).unique()
    sizes = ends.diff()
    bins = torch.repeat_interleave(torch.arange(len(sizes)), sizes).to(y.device)
    points = y.new_zeros(len(sizes), y.shape[1]).index_add_(0, bins, ordered)
    counts = sizes.to(y)[:, None]
    return points / counts, counts / len(y)


def fit_bend(step: ElementwiseStep, y: Tensor, held_out: Tensor) -> Bend:
    """For each feature the numbers with which f(a y + b) is most nearly Gaussian, by likelihood.

    A coarse grid, then a search around its best point, on a condensed sample; no gradient. Rows that were held out
    decide whether a feature is better left straight, which guards against few rows and against tails that the sample
    does not tell of. O(N·D·log N), and some hundred evaluations at 200 points a feature.

    Arguments:
        step: f.
        y: Features of mean about 0 and variance about 1, with shape ``(N, D)``.
        held_out: Other rows of them.

    Raises:
        InputError: If f is finite nowhere that was tried.
    """
    points, weights = condense(y)
    sign = torch.ones_like(points[0])

    def bend(numbers: Tensor, sign: Tensor) -> Bend:
        scale, shift, log_tail, skewness = numbers
        return Bend(sign * scale.exp(), shift, log_tail, skewness, torch.ones_like(sign, dtype=torch.bool))

    def nll(numbers: Tensor, sign: Tensor) -> Tensor:
        curve = bend(numbers, sign).curve(step, points)
        mean = (weights * curve.value).sum(0)
        variance = (weights * (curve.value - mean).square()).sum(0)
        found = 0.5 * variance.log() - (weights * curve.log_slope()).sum(0) - numbers[0]
        return found.nan_to_num(nan=float("inf"))

    best, numbers = torch.full_like(sign, float("inf")), points.new_zeros(4, points.shape[1])
    for start, turned in _starts(step):
        tried = points.new_tensor(start)[:, None].expand_as(numbers)
        facing = torch.full_like(sign, turned)
        found = nll(tried, facing)
        lower = found < best
        best, numbers = torch.where(lower, found, best), torch.where(lower, tried, numbers)
        sign = torch.where(lower, facing, sign)
    if not bool(torch.isfinite(best).all()):
        raise InputError(f"{step.where} has no finite log-det on whitened data, so that nothing can be fitted to it")
    moves = (*OUTER, *INNER) if learnable(step) else OUTER
    limits = (-inf, inf) if learnable(step) else (log(LEAST), log(MOST))
    numbers = _search(lambda tried: nll(tried, sign), numbers, best, moves, limits)
    fitted, straight = bend(numbers, sign), Bend.straight(step, sign)
    margin = len(OUTER[0]) / len(held_out)  # as many numbers as were fitted can gain by chance
    better = _surprise(step, fitted, y, held_out) + margin < _surprise(step, straight, y, held_out)
    return fitted.where(better, straight)


def _starts(step: ElementwiseStep) -> list[tuple[tuple[float, ...], float]]:
    """Where a search may begin: log|a|, b, log δ and ε; and the sign of a."""
    if learnable(step):  # symmetric in the sign of y, but for ε
        return [((log(scale), 0.0, log(tail), 0.0), 1.0) for scale, tail in product((1.0, 0.5, 2.0, 6.0), TAILS)]
    return [((log(abs(a)), b, 0.0, 0.0), 1.0 if a > 0 else -1.0) for a, b in product(SCALES, SHIFTS)]


def _search(
    nll: Callable[[Tensor], Tensor],
    numbers: Tensor,
    best: Tensor,
    moves: tuple[tuple[float, ...], ...],
    limits: tuple[float, float],
) -> Tensor:
    """Walks downhill, each feature by itself, within limits of log|a|; its moves shrink where none of them helps."""
    size = torch.ones_like(best)
    for _ in range(ROUNDS):
        improved = torch.zeros_like(best, dtype=torch.bool)
        for move, way in product(moves, (1.0, -1.0)):
            tried = numbers + way * size * numbers.new_tensor(move)[:, None]
            tried[0].clamp_(*limits)
            tried[2].clamp_(log(FLATTEST), 0.0)
            found = nll(tried)
            lower = found < best
            best, numbers = torch.where(lower, found, best), torch.where(lower, tried, numbers)
            improved |= lower
        size = torch.where(improved, size, 0.5 * size)
    return numbers


def _surprise(step: ElementwiseStep, bend: Bend, y: Tensor, held_out: Tensor) -> Tensor:
    """The NLL of rows that were held out, with the mean and the variance of the others; up to a constant."""
    known = bend.curve(step, y).value
    seen = bend.curve(step, held_out)
    variance = known.var(0)
    misfit = (seen.value - known.mean(0)).square().mean(0) / variance
    return 0.5 * (variance.log() + misfit) - seen.log_slope().mean(0) - bend.scale.abs().log()
