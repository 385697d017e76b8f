r"""Data made on the spot, with their exact density and score.

The three two-dimensional sets of the paper are curves and squares smoothed by a Gaussian (Appendix A.2). The density is
that of the smoothed sample itself, a mixture of M Gaussians, so that it is exact, and the data are drawn from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Generator, Tensor

from ebflow_plugin.errors import InputError

__all__ = ["PLANE", "Autoregressive", "SmoothedPoints", "Truth", "checkerboard", "sine", "swirl"]

SMOOTHING = 0.375  # the paper's standard deviation of the Gaussian
CENTRES = 50_000  # and its number of points
CHUNK = 2**22  # kernel values held at once: 32 MB in double precision, for each of the two or three tensors of them


class Truth(Protocol):
    """A density that is known exactly."""

    def log_prob(self, x: Tensor) -> Tensor:
        """The log-density of rows with shape (B, D): shape (B,)."""

    def score(self, x: Tensor) -> Tensor:
        """Its gradient, with the shape of ``x``."""

    def sample(self, count: int, generator: Generator | None = None) -> Tensor:
        """Draws rows, shape (count, D), in double precision."""


def sine(count: int, generator: Generator | None = None) -> Tensor:
    """Draws points of the Sine set, (4w - 2, sin(12w - 6)) for w uniform on [0, 1]: shape (count, 2)."""
    w = _uniform(count, generator)
    return torch.stack([4 * w - 2, torch.sin(12 * w - 6)], dim=1)


def swirl(count: int, generator: Generator | None = None) -> Tensor:
    r"""Draws points of the Swirl set, (-r cos r, r sin r) with :math:`r = \pi \sqrt w`: shape (count, 2)."""
    r = math.pi * _uniform(count, generator).sqrt()
    return torch.stack([-r * r.cos(), r * r.sin()], dim=1)


def checkerboard(count: int, generator: Generator | None = None) -> Tensor:
    """Draws points of the Checkerboard set, (4w - 2, t - 2s + floor(4w - 2) mod 2): shape (count, 2)."""
    x, t = 4 * _uniform(count, generator) - 2, _uniform(count, generator)
    s = torch.randint(2, (count,), generator=generator)
    return torch.stack([x, t - 2 * s + x.floor() % 2], dim=1)


PLANE: dict[str, Callable[..., Tensor]] = {"sine": sine, "swirl": swirl, "checkerboard": checkerboard}


class SmoothedPoints:
    r"""Points smoothed by a Gaussian: the mixture :math:`\frac{1}{M} \sum_i N(x \mid c_i, \sigma^2 I)`.

    The score is :math:`(\bar c(x) - x) / \sigma^2`, with :math:`\bar c` the mean of the centres under the weights that
    they have at x. Both cost O(B·M), in double precision, and hold about ``CHUNK`` kernel values at a time.

    Arguments:
        centres: The points, shape (M, D).
        sigma: The standard deviation of the Gaussian.

    Example:
        >>> truth = SmoothedPoints(torch.zeros(1, 2), sigma=1.0)
        >>> truth.score(torch.tensor([[1.0, -2.0]]))
        tensor([[-1.,  2.]])
    """

    def __init__(self, centres: Tensor, sigma: float = SMOOTHING) -> None:
        self.centres = centres.double()
        self.sigma = sigma

    def log_prob(self, x: Tensor) -> Tensor:
        """The log-density of rows with shape (B, D): shape (B,)."""
        rows = self._rows(x)
        # Filled in place: small results of the chunks, kept between them, would break up the heap, by gigabytes.
        total = rows.new_empty(len(rows))
        for some in self._chunks(len(rows)):
            total[some] = self._log_weights(rows[some]).logsumexp(1)
        constant = math.log(len(self.centres)) + rows.shape[1] / 2 * math.log(2 * math.pi * self.sigma**2)
        return (total - rows.square().sum(1) / (2 * self.sigma**2) - constant).to(x.dtype)

    @torch.no_grad()
    def score(self, x: Tensor) -> Tensor:
        """The gradient of :meth:`log_prob`, with the shape of ``x``."""
        rows = self._rows(x)
        mean = torch.empty_like(rows)
        for some in self._chunks(len(rows)):
            mean[some] = self._log_weights(rows[some]).softmax(1) @ self.centres.to(rows)
        return ((mean - rows) / self.sigma**2).to(x.dtype)

    def sample(self, count: int, generator: Generator | None = None) -> Tensor:
        """Draws rows, shape (count, D), in double precision: a centre each, and noise."""
        chosen = self.centres[torch.randint(len(self.centres), (count,), generator=generator)]
        return chosen + self.sigma * torch.randn(chosen.shape, generator=generator, dtype=chosen.dtype)

    def _rows(self, x: Tensor) -> Tensor:
        if x.dim() != 2 or x.shape[1] != self.centres.shape[1]:
            raise InputError(f"this density takes rows of {self.centres.shape[1]} numbers, got {tuple(x.shape)}")
        return x.double()

    def _chunks(self, count: int) -> Iterator[slice]:
        size = max(1, CHUNK // len(self.centres))
        return (slice(start, start + size) for start in range(0, count, size))

    def _log_weights(self, rows: Tensor) -> Tensor:
        """Returns -‖x - c‖²/2σ² without its ‖x‖², for some rows and all centres, as one product.

        In double precision nothing is lost by expanding the square.
        """
        centres, scale = self.centres.to(rows), self.sigma**-2
        return torch.addmm(centres.square().sum(1) * (-scale / 2), rows, centres.T, alpha=scale)


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
        with torch.enable_grad():
            rows = x.detach().double().requires_grad_()
            (score,) = torch.autograd.grad(self.log_prob(rows).sum(), rows)
        return score.to(x.dtype)

    def _shift(self, place: int) -> float:
        return self.distance * 2.0 ** (place + 1)  # the paper counts from 1


def _uniform(count: int, generator: Generator | None) -> Tensor:
    return torch.rand(count, generator=generator, dtype=torch.float64)
