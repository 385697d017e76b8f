r"""Marginal Gaussianisation: the scale and shift before an elementwise nonlinearity, fitted for each feature.

For one feature y of variance 1 and a nonlinearity f, this is maximum likelihood of a one-dimensional flow,

.. math:: \min_{a, b}\; \tfrac12 \log \operatorname{Var} f(a y + b) - \mathbb{E} \log |a f'(a y + b)|.

A :class:`~ebflow_plugin.layers.SinhArcsinh` has two more parameters, :math:`\delta` for tails and :math:`\epsilon` for
skewness. Each feature has a few parameters and thousands of rows, so the sampling error is small however large D is.
"""

from __future__ import annotations

import copy
from itertools import product
from math import inf, log
from typing import NamedTuple

import torch
from torch import Tensor

from ebflow_plugin.errors import InputError
from ebflow_plugin.layers import FullConv2d, FullLinear, SinhArcsinh
from ebflow_plugin.plan.elementwise import ElementwiseMap, ElementwiseStep

SCALES = tuple(sign * 2.0**power for power in range(-1, 4) for sign in (1, -1))
SHIFTS = (-8.0, -5.0, -3.0, -1.5, 0.0, 1.5, 3.0, 5.0, 8.0)
TAILS = (1.0, 0.5, 0.25)
LEAST, MOST = 0.25, 16.0  # the range of |a| for a nonlinearity without parameters: keeps its layer well-conditioned
FLATTEST = 0.1  # the smallest δ: samples of |z| = 5 stay below 1e9 times the scale of the data
# Scales and shifts where a nonlinearity is nearly affine: far out on a straight side, which leaves the layer as
# well-conditioned as it is, or else close to one point.
STRAIGHT = ((1.0, 12.0), (1.0, -12.0), (1e-2, 0.0))
ALMOST = 1e-2  # by how much the log-slope of a nearly affine nonlinearity may change
ROUNDS = 20
BINS, REACH = 200, 4.5  # of the condensed sample: the number of bins, and their range in standard deviations
# The moves of a search, in either direction: log|a|, b, log δ, ε. A shift and ε can partly replace each other, so
# changing both is a move of its own.
OUTER = ((0.5, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0), (0.5, 1.0, 0.0, 0.0), (0.5, -1.0, 0.0, 0.0))
INNER = ((0.0, 0.0, 0.4, 0.0), (0.0, 0.0, 0.0, 0.4), (0.0, 1.0, 0.0, 0.4), (0.4, 0.0, 0.4, 0.0))


class MarginalMap(NamedTuple):
    """The parameters of a marginal map f(a y + b), each of shape ``(D,)``.

    Attributes:
        scale: a.
        shift: b.
        log_tail: log δ of a SinhArcsinh; zero for other nonlinearities.
        skewness: Its ε.
        helps: Which features are fitted; for the others the map is as nearly affine as f allows.
    """

    scale: Tensor
    shift: Tensor
    log_tail: Tensor
    skewness: Tensor
    helps: Tensor

    def curve(self, step: ElementwiseStep, y: Tensor) -> ElementwiseMap:
        """The nonlinearity at a y + b. Sets δ and ε of a SinhArcsinh."""
        moved = y * self.scale + self.shift
        if learnable(step):
            self._set(step)
            moved = moved.view(*y.shape, *(1 for _ in range(-1 - step.module.dim)))
        found = (step.inverse_map if step.inverted else step.forward_map)(moved, None)
        return ElementwiseMap(found.value.view(y.shape), lambda: found.log_slope().view(y.shape), found.slopes)

    def write(self, step: ElementwiseStep, layer: FullLinear | FullConv2d) -> float:
        """Writes a and b into the layer before the nonlinearity, and δ and ε into the nonlinearity.

        Returns:
            The change of the layer's log-determinant.
        """
        assert layer.bias is not None
        if learnable(step):
            self._set(step)
        layer.weight.mul_(self.scale.view(-1, *(1 for _ in layer.weight.shape[1:])))
        layer.bias.mul_(self.scale).add_(self.shift)
        return self.scale.abs().double().log().sum().item()

    def _set(self, step: ElementwiseStep) -> None:
        step.module.log_tail.copy_(self.log_tail)
        step.module.skewness.copy_(self.skewness)

    @classmethod
    def nearly_linear(cls, step: ElementwiseStep, like: Tensor) -> MarginalMap:
        """The nearly affine map: the identity for a SinhArcsinh, else f where its slope is nearly constant."""
        zero, none = torch.zeros_like(like), torch.zeros_like(like, dtype=torch.bool)
        if learnable(step):
            return cls(torch.ones_like(like), zero, zero, zero, none)
        points = torch.linspace(-4.0, 4.0, 9, dtype=like.dtype, device=like.device)[:, None].expand(-1, len(like))
        for scale, shift in STRAIGHT:
            candidate = cls(torch.full_like(like, scale), torch.full_like(like, shift), zero, zero, none)
            slopes = candidate.curve(step, points).log_slope()
            if bool((slopes.amax(0) - slopes.amin(0) < ALMOST).all()):
                break
        return candidate


def learnable(step: ElementwiseStep) -> bool:
    """Whether a nonlinearity has tail and skewness parameters to fit."""
    return isinstance(step.module, SinhArcsinh) and not step.inverted


def condense(y: Tensor) -> tuple[Tensor, Tensor]:
    """The marginal sample of each feature as weighted points: the means of bins of its sorted values.

    The bins have equal widths for a Gaussian, so the most extreme values each have a bin of their own.

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
    grid = torch.special.ndtr(torch.linspace(-REACH, REACH, BINS - 1, dtype=torch.float64, device="cpu"))
    inner = (grid * len(y)).round().long()
    ends = torch.cat([inner.new_tensor([0]), inner, inner.new_tensor([len(y)])]).unique()
    sizes = ends.diff()
    bins = torch.repeat_interleave(sizes).to(y.device)
    points = y.new_zeros(len(sizes), y.shape[1]).index_add_(0, bins, ordered)
    counts = sizes.to(y)[:, None]
    return points / counts, counts / len(y)


def fit_marginals(step: ElementwiseStep, y: Tensor, held_out: Tensor) -> MarginalMap:
    """Fits the parameters of each feature for which f(a y + b) is closest to Gaussian, by maximum likelihood.

    A coarse grid, then a search around its best point, on a condensed sample, without gradients. Held-out rows decide
    whether a feature is better left nearly affine, which guards against small samples, and against tails that the
    sample does not show. Cost: O(N·D·log N), and some hundred evaluations at 200 points per feature.

    Arguments:
        step: f.
        y: Features of mean about 0 and variance about 1, with shape ``(N, D)``.
        held_out: Other rows of the same features.

    Raises:
        InputError: If f is not finite at any point of the grid.
    """
    step = copy.copy(step)
    step.module = copy.deepcopy(step.module)  # to try parameters on
    points, weights = condense(y)
    best, numbers = torch.full_like(points[0], inf), points.new_zeros(5, points.shape[1])
    helps = torch.ones_like(best, dtype=torch.bool)

    def marginal(numbers: Tensor) -> MarginalMap:
        log_scale, shift, log_tail, skewness, sign = numbers
        return MarginalMap(sign * log_scale.exp(), shift, log_tail, skewness, helps)

    def improve(tried: Tensor) -> Tensor:
        """Takes these numbers for the features that they make more likely, and returns which these are."""
        nonlocal best, numbers
        curve = marginal(tried).curve(step, points)
        mean = (weights * curve.value).sum(0)
        variance = (weights * (curve.value - mean).square()).sum(0)
        nll = (0.5 * variance.log() - (weights * curve.log_slope()).sum(0) - tried[0]).nan_to_num(nan=inf)
        lower = nll < best
        best, numbers = torch.where(lower, nll, best), torch.where(lower, tried, numbers)
        return lower

    if learnable(step):  # a sign of y can be absorbed into ε
        starts = [(log(scale), 0.0, log(tail), 0.0, 1.0) for scale, tail in product((1.0, 0.5, 2.0, 6.0), TAILS)]
        moves, limits = [*OUTER, *INNER], (-inf, inf)
    else:
        starts = [(log(abs(a)), b, 0.0, 0.0, 1.0 if a > 0 else -1.0) for a, b in product(SCALES, SHIFTS)]
        moves, limits = [*OUTER], (log(LEAST), log(MOST))
    for start in starts:
        improve(points.new_tensor(start)[:, None].expand_as(numbers))
    if not bool(torch.isfinite(best).all()):
        raise InputError(f"{step.where} has no finite log-det on whitened data, so nothing can be fitted to it")
    size = torch.ones_like(best)  # of the moves, which are halved where none of them helps
    for _ in range(ROUNDS):
        improved = torch.zeros_like(helps)
        for move, direction in product(moves, (1.0, -1.0)):
            tried = numbers + direction * size * points.new_tensor((*move, 0.0))[:, None]
            tried[0].clamp_(*limits)
            tried[2].clamp_(log(FLATTEST), 0.0)
            improved |= improve(tried)
        size = torch.where(improved, size, 0.5 * size)
    fitted, straight = marginal(numbers), MarginalMap.nearly_linear(step, best)
    margin = len(OUTER[0]) / len(held_out)  # the gain that this many fitted parameters can have by chance
    better = _held_out_nll(step, fitted, y, held_out) + margin < _held_out_nll(step, straight, y, held_out)
    return MarginalMap(*(torch.where(better, mine, other) for mine, other in zip(fitted, straight, strict=True)))


def _held_out_nll(step: ElementwiseStep, marginal: MarginalMap, y: Tensor, held_out: Tensor) -> Tensor:
    """The NLL of the held-out rows, with the mean and the variance of y, up to a constant."""
    fitted = marginal.curve(step, y).value
    other = marginal.curve(step, held_out)
    variance = fitted.var(0)
    misfit = (other.value - fitted.mean(0)).square().mean(0) / variance
    return 0.5 * (variance.log() + misfit) - other.log_slope().mean(0) - marginal.scale.abs().log()
