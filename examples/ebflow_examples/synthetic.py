r"""Data made on the spot, with their exact density and score.

The three two-dimensional sets of the paper are a sine wave, a spiral and a checkerboard (Appendix A.2), at the scale of
the authors' code, and smoothed by a Gaussian of 0.375. What is smoothed is an average of boxes, segments or points
along a curve, so that the density is a closed form, or an integral over the parameter of the curve:

.. math:: p(x) = \sum_i w_i \prod_d k_d(x_d - c_{id})

with :math:`k_d` a Gaussian, or a uniform density smoothed by one. The checkerboard has eight terms, one for each
square; the curves have the nodes of a Gauss-Legendre rule, close enough for an error below 1e-9 in log p.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from torch import Generator, Tensor

from ebflow_plugin.errors import InputError

SMOOTHING = 0.375  # the paper's standard deviation of the Gaussian
ORDER = 12  # nodes of a Gauss-Legendre rule on each piece of a curve; a piece is a unit long or so
CHUNK = 2**20  # kernel values held at once: 8 MB in double precision, for each of the few tensors of them


class Truth(Protocol):
    """A density that is known exactly."""

    def log_prob(self, x: Tensor) -> Tensor:
        """The log-density of rows with shape (B, D): shape (B,)."""

    def score(self, x: Tensor) -> Tensor:
        """Its gradient, with the shape of ``x``."""

    def sample(self, count: int, generator: Generator | None = None) -> Tensor:
        """Draws rows, shape (count, D), in double precision."""

    def entropy(self) -> float | None:
        """Its entropy in nats, the least NLL that any model can have; None if no formula tells it."""


def score_of(log_prob: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The gradient of a log-density at rows, computed in double precision, with the shape of ``x``."""
    with torch.enable_grad():
        rows = x.detach().double().requires_grad_()
        (score,) = torch.autograd.grad(log_prob(rows).sum(), rows)
    return score.to(x.dtype)


class SmoothedSet:
    r"""Points of some set, smoothed by a Gaussian: the mixture :math:`\sum_i w_i \prod_d k_d(x_d - c_{id})`.

    Each kernel :math:`k_d` is uniform on an interval of the length ``widths[d]`` around 0, smoothed by a Gaussian of
    ``deviations[d]``; a length of 0 leaves the Gaussian. Densities and scores cost O(B·M), in double precision.

    Arguments:
        clean: Draws points of the set, before the smoothing: takes a count and a generator, returns shape (count, D).
        centres: The centres c, shape (M, D).
        weights: The weights w, shape (M,), of sum 1.
        widths: The lengths of the intervals, D of them.
        deviations: The standard deviations of the Gaussians, D of them, noise of the set itself included.

    Example:
        >>> origin = lambda count, generator=None: torch.zeros(count, 2, dtype=torch.float64)
        >>> truth = SmoothedSet(origin, torch.zeros(1, 2), torch.ones(1), (0.0, 0.0), (1.0, 1.0))
        >>> truth.score(torch.tensor([[1.0, -2.0]]))
        tensor([[-1.,  2.]])
        >>> abs(truth.entropy() - math.log(2 * math.pi * math.e)) < 1e-12
        True
    """

    def __init__(
        self,
        clean: Callable[[int, Generator | None], Tensor],
        centres: Tensor,
        weights: Tensor,
        widths: Sequence[float],
        deviations: Sequence[float],
    ) -> None:
        self.clean = clean
        self.centres, self.weights = centres.double(), weights.double()
        self.widths, self.deviations = tuple(widths), tuple(deviations)

    def log_prob(self, x: Tensor) -> Tensor:
        """The log-density of rows with shape (B, D): shape (B,)."""
        rows = self._rows(x)
        parts = [self._log_terms(rows[some]).logsumexp(1) for some in self._chunks(len(rows))]
        return torch.cat(parts).to(x.dtype)

    def score(self, x: Tensor) -> Tensor:
        """The gradient of :meth:`log_prob`, with the shape of ``x``."""
        return torch.cat([score_of(self.log_prob, x[some]) for some in self._chunks(len(x))])

    def sample(self, count: int, generator: Generator | None = None) -> Tensor:
        """Draws rows, shape (count, D), in double precision: points of the set, and noise."""
        return self.noised(self.clean(count, generator), generator)

    def noised(self, clean: Tensor, generator: Generator | None = None) -> Tensor:
        """Adds the Gaussian that smooths the set to points of it."""
        return clean + SMOOTHING * torch.randn(clean.shape, generator=generator, dtype=clean.dtype)

    def entropy(self, spacing: float = 0.05) -> float:
        r""":math:`-\int p \log p` in nats, in the plane, by sums over a grid that reaches ten deviations beyond.

        The integrand is analytic, so that the error falls faster than any power of the spacing, 1e-9 by default.
        """
        factors = []
        for place, (width, deviation) in enumerate(zip(self.widths, self.deviations, strict=True)):
            reach = width / 2 + 10 * deviation
            low, high = float(self.centres[:, place].min()) - reach, float(self.centres[:, place].max()) + reach
            axis = torch.arange(low, high, spacing, dtype=torch.float64)
            factors.append(_log_kernel(axis[:, None] - self.centres[:, place], width, deviation).exp())
        across, along = factors
        density = (across * self.weights) @ along.T
        return -float(torch.xlogy(density, density).sum()) * spacing**2

    def _rows(self, x: Tensor) -> Tensor:
        if x.dim() != 2 or x.shape[1] != self.centres.shape[1]:
            raise InputError(f"this density takes rows of {self.centres.shape[1]} numbers, got {tuple(x.shape)}")
        return x.double()

    def _chunks(self, count: int) -> Iterator[slice]:
        size = max(1, CHUNK // len(self.centres))
        return (slice(start, start + size) for start in range(0, max(1, count), size))

    def _log_terms(self, rows: Tensor) -> Tensor:
        """The logarithm of each term at each row: shape (B, M)."""
        terms = self.weights.to(rows).log()
        for place, (width, deviation) in enumerate(zip(self.widths, self.deviations, strict=True)):
            terms = terms + _log_kernel(rows[:, place, None] - self.centres[:, place].to(rows), width, deviation)
        return terms


def _log_kernel(offset: Tensor, width: float, deviation: float) -> Tensor:
    """The log-density of a Gaussian, or of a uniform variable on an interval around 0 plus a Gaussian one."""
    if width == 0.0:
        return -0.5 * (offset / deviation).square() - math.log(deviation * math.sqrt(2 * math.pi))
    # Φ(b) - Φ(a) on the left of the mean, where nothing cancels however far out
    distance = offset.abs()
    upper = torch.special.log_ndtr((width / 2 - distance) / deviation)
    lower = torch.special.log_ndtr((-width / 2 - distance) / deviation)
    return upper + torch.log(-torch.expm1(lower - upper)) - math.log(width)


def _nodes(edges: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights of a Gauss-Legendre rule on each piece between edges: their sum is an integral."""
    points, weights = (torch.from_numpy(each) for each in np.polynomial.legendre.leggauss(ORDER))
    middle, half = (edges[1:] + edges[:-1]) / 2, (edges[1:] - edges[:-1]) / 2
    return (middle[:, None] + half[:, None] * points).flatten(), (half[:, None] * weights).flatten()


@lru_cache(maxsize=1)
def sine() -> SmoothedSet:
    """The Sine set: w uniform on [-8, 8], and 4 sin(3w/4) + N(0, 1)."""

    def clean(count: int, generator: Generator | None = None) -> Tensor:
        w = 16 * _uniform(count, generator) - 8
        return _wave(w) + torch.stack([torch.zeros_like(w), _normal(count, generator)], dim=1)

    nodes, weights = _nodes(torch.linspace(-8, 8, 33, dtype=torch.float64))
    return SmoothedSet(clean, _wave(nodes), weights / 16, (0.0, 0.0), (SMOOTHING, math.hypot(1.0, SMOOTHING)))


@lru_cache(maxsize=1)
def swirl() -> SmoothedSet:
    r"""The Swirl set: a spiral of one turn and a half, its radius :math:`\frac{5}{6} n` with :math:`n = 3\pi\sqrt U`.

    Each point is moved by up to 5/12 to the left, and downwards: the authors' jitter.
    """
    jitter = 5 / 12

    def clean(count: int, generator: Generator | None = None) -> Tensor:
        moves = torch.stack([_uniform(count, generator), _uniform(count, generator)], dim=1)
        return _spiral(_uniform(count, generator).sqrt()) - jitter * moves

    # Pieces of equal length of the spiral, near enough; its points have the density 2r of the share r of its radius.
    nodes, weights = _nodes(torch.linspace(0, 1, 65, dtype=torch.float64).sqrt())
    centres = _spiral(nodes) - jitter / 2
    return SmoothedSet(clean, centres, 2 * nodes * weights, (jitter, jitter), (SMOOTHING, SMOOTHING))


@lru_cache(maxsize=1)
def checkerboard() -> SmoothedSet:
    """The Checkerboard set: eight squares of side 3 in a square of side 12."""
    corners = [(x, y) for x in range(-2, 2) for y in range(-2, 2) if (x + y) % 2 == 0]
    squares = torch.tensor(corners, dtype=torch.float64)

    def clean(count: int, generator: Generator | None = None) -> Tensor:
        chosen = squares[torch.randint(len(squares), (count,), generator=generator)]
        return 3 * (chosen + torch.stack([_uniform(count, generator), _uniform(count, generator)], dim=1))

    weights = torch.full((len(squares),), 1 / len(squares), dtype=torch.float64)
    return SmoothedSet(clean, 3 * (squares + 0.5), weights, (3.0, 3.0), (SMOOTHING, SMOOTHING))


PLANE: dict[str, Callable[[], SmoothedSet]] = {"sine": sine, "swirl": swirl, "checkerboard": checkerboard}


def _wave(w: Tensor) -> Tensor:
    return torch.stack([w, 4 * torch.sin(0.75 * w)], dim=1)


def _spiral(share: Tensor) -> Tensor:
    angle = 3 * math.pi * share
    return 2.5 / 3 * torch.stack([angle * angle.cos() + 1, 2 - angle * angle.sin()], dim=1)


class Autoregressive:
    r"""The chain of Eq. A7, with :math:`u \sim N(0, I)`.

    .. math:: x_1 = u_1, \qquad x_i = \tanh(s u_i) (x_{i-1} + d\,2^i), \quad i = 2, \dots, D

    It is itself a flow, so that its density is known: :math:`\prod_i N(u_i) \, |\partial u_i / \partial x_i|`. The
    paper does not say its s and d. Here s = 1, which has two modes for each :math:`x_i` without the spikes that larger
    ones put where tanh saturates, and d = 1, for which :math:`x_{i-1} + d\,2^i` almost never changes its sign.

    Arguments:
        features: The number D of entries.
        shape: The paper's s.
        distance: The paper's d.

    Example:
        >>> truth = Autoregressive(3)
        >>> truth.log_prob(truth.sample(5, torch.Generator().manual_seed(0))).isfinite().all()
        tensor(True)
    """

    def __init__(self, features: int = 10, shape: float = 1.0, distance: float = 1.0) -> None:
        self.features, self.shape, self.distance = features, shape, distance

    def sample(self, count: int, generator: Generator | None = None) -> Tensor:
        """Draws rows, shape (count, D), in double precision."""
        u = torch.randn(count, self.features, generator=generator, dtype=torch.float64)
        columns = [u[:, 0]]
        for place in range(1, self.features):
            columns.append(torch.tanh(self.shape * u[:, place]) * (columns[-1] + self._shift(place)))
        return torch.stack(columns, dim=1)

    def log_prob(self, x: Tensor) -> Tensor:
        """The log-density of rows with shape (B, D): shape (B,); -inf outside of its support."""
        if x.dim() != 2 or x.shape[1] != self.features:
            raise InputError(f"this density takes rows of {self.features} numbers, got {tuple(x.shape)}")
        rows = x.double()
        shifts = rows.new_tensor([self._shift(place) for place in range(1, self.features)])
        reach = rows[:, :-1] + shifts
        ratio = rows[:, 1:] / reach
        inside = ratio.abs() < 1
        ratio = torch.where(inside, ratio, 0.0)
        u = torch.cat([rows[:, :1], torch.atanh(ratio) / self.shape], dim=1)
        log_slope = -torch.log(self.shape * reach.abs()) - torch.log1p(-ratio.square())
        log_normal = -0.5 * (u.square() + math.log(2 * math.pi))
        log_prob = log_normal.sum(1) + log_slope.sum(1)
        return torch.where(inside.all(1), log_prob, -torch.inf).to(x.dtype)

    def score(self, x: Tensor) -> Tensor:
        """The gradient of :meth:`log_prob`, with the shape of ``x``."""
        return score_of(self.log_prob, x)

    def entropy(self) -> None:
        """Not known: a mean of log |x + d 2^i| over the whole chain before."""

    def _shift(self, place: int) -> float:
        return self.distance * 2.0 ** (place + 1)  # the paper counts from 1


def _uniform(count: int, generator: Generator | None) -> Tensor:
    return torch.rand(count, generator=generator, dtype=torch.float64)


def _normal(count: int, generator: Generator | None) -> Tensor:
    return torch.randn(count, generator=generator, dtype=torch.float64)
