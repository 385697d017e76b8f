"""Elementwise nonlinear steps: each is a curve, whose log-det and derivatives have a closed form."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ebflow_plugin.plan.smooth_modules import Smoothness
from ebflow_plugin.plan.step import Linearity, Linearization, Step
from ebflow_plugin.plan.values import summed


class ElementwiseMap(NamedTuple):
    """An elementwise map f at a point, with l = log|f'|.

    Attributes:
        value: f.
        log_slope: Computes l.
        slopes: Computes f', l' and l''; a number means the same value everywhere.
    """

    value: Tensor
    log_slope: Callable[[], Tensor]
    slopes: Callable[[], tuple[Tensor, Tensor | float, Tensor | float]]

    def between(
        self, value: Tensor, inner: Tensor | float, outer: Tensor | float, log_scale: Tensor | float
    ) -> ElementwiseMap:
        """Outer · f(inner · x + …) + … as a map of x, with this value, and log|outer · inner|."""

        def slopes() -> tuple[Tensor, Tensor | float, Tensor | float]:
            slope, first, second = self.slopes()
            return slope * (inner * outer), first * inner, second * inner**2

        return ElementwiseMap(value, lambda: self.log_slope() + log_scale, slopes)


class ElementwiseStep(Step):
    """A step that acts on each element separately: y = f(x), and log|f'(x)| summed.

    Subclasses implement f with its derivatives, :meth:`forward_map`, and its inverse: :meth:`invert`, or with
    derivatives of its own :meth:`inverse_map`.
    """

    linearity = Linearity.NONLINEAR
    reason = "elementwise"

    @abstractmethod
    def forward_map(self, x: Tensor, context: Tensor | None) -> ElementwiseMap:
        """The module's own forward map at x."""

    def invert(self, y: Tensor, context: Tensor | None) -> Tensor:
        """The x that the module's own forward maps to y."""
        raise NotImplementedError

    def inverse_map(self, y: Tensor, context: Tensor | None) -> ElementwiseMap:
        """The inverse of the forward map at y, by the inverse function theorem."""
        x = self.invert(y, context)
        at = self.forward_map(x, context)

        def slopes() -> tuple[Tensor, Tensor, Tensor]:
            slope, first, second = at.slopes()
            return 1.0 / slope, -first / slope, (first * first - second) / slope**2

        return ElementwiseMap(x, lambda: -at.log_slope(), slopes)

    def encode(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        at = (self.inverse_map if self.inverted else self.forward_map)(x, context)
        return at.value, summed(at.log_slope())

    def decode(self, z: Tensor, context: Tensor | None) -> Tensor:
        return (self.forward_map if self.inverted else self.inverse_map)(z, context).value

    def linearize(self, x: Tensor, context: Tensor | None) -> Linearization:
        at = (self.inverse_map if self.inverted else self.forward_map)(x, context)
        slope, first, second = at.slopes()
        straight = isinstance(first, float) and first == 0.0 and isinstance(second, float) and second == 0.0

        def curvature(adjoint: Tensor, tangent: Tensor) -> Tensor:  # f'' is f' l'
            return ((adjoint * slope * first - second) * tangent.square()).flatten(1).sum(1)

        return Linearization(
            value=at.value,
            push=lambda tangent: tangent * slope,
            pull=lambda adjoint: adjoint * slope - first,
            curvature=None if straight else curvature,
            log_det=lambda: summed(at.log_slope()),
        )


class ActivationStep(ElementwiseStep):
    """A SmoothLeakyReLU or a SinhArcsinh of ours, in its density direction."""

    reason = "elementwise, log-det depends on x"

    smoothness = Smoothness.SMOOTH

    def encode(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.inverted:
            return super().encode(x, context)
        return self.module.transform(x), self.module.log_det(x)

    def forward_map(self, x: Tensor, context: Tensor | None) -> ElementwiseMap:
        return ElementwiseMap(
            self.module.transform(x), lambda: self.module.slope(x).log(), lambda: self.module.slopes(x)
        )

    def invert(self, y: Tensor, context: Tensor | None) -> Tensor:
        return self.module.invert(y)


def sigmoid_map(x: Tensor) -> ElementwiseMap:
    """1 / (1 + exp(-x)), elementwise.

    Example:
        >>> sigmoid_map(torch.zeros(1, 1)).slopes()
        (tensor([[0.2500]]), tensor([[0.]]), tensor([[-0.5000]]))
    """
    y = torch.sigmoid(x)

    def slopes() -> tuple[Tensor, Tensor, Tensor]:
        slope = y * (1.0 - y)
        return slope, 1.0 - 2.0 * y, -2.0 * slope

    return ElementwiseMap(y, lambda: F.logsigmoid(x) + F.logsigmoid(-x), slopes)


def logit_map(x: Tensor) -> ElementwiseMap:
    """log(x) - log(1 - x), elementwise, for x in (0, 1).

    Example:
        >>> logit_map(torch.full((1, 1), 0.5)).slopes()
        (tensor([[4.]]), tensor([[0.]]), tensor([[8.]]))
    """
    left, right = torch.log(x), torch.log1p(-x)

    def slopes() -> tuple[Tensor, Tensor, Tensor]:
        slope = 1.0 / (x * (1.0 - x))
        first = (2.0 * x - 1.0) * slope
        return slope, first, 2.0 * slope + first.square()

    return ElementwiseMap(left - right, lambda: -(left + right), slopes)


def clamped_logit_map(x: Tensor, low: float, high: float) -> ElementwiseMap:
    """The logit of x clamped to [low, high], elementwise. Its slope is zero where x is clamped.

    Example:
        >>> clamped_logit_map(torch.tensor([[0.5, 0.99]]), 0.1, 0.9).slopes()[0]
        tensor([[4., 0.]])
    """
    inside = x.clamp(low, high)
    curve = logit_map(inside)

    def slopes() -> tuple[Tensor, Tensor, Tensor]:
        free = ((x > low) & (x < high)).to(x)
        slope, first, second = curve.slopes()
        return free * slope, free * first, free * second

    return ElementwiseMap(curve.value, curve.log_slope, slopes)
