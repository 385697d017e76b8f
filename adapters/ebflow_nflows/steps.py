"""The nonlinear classes of nflows: their maps, log-dets and smoothness.

Classes are matched by name and package, not by identity: they exist in ``nflows``, ``glasflow.nflows``, ``enflows`` and
``flowcon``. Parameters are read from attributes that all of these have in common.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log, pi
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ebflow_plugin.adapting import (
    DEPENDS_ON_CONTEXT,
    VOLUME_PRESERVING,
    BoundedStep,
    ConditionedStep,
    ElementwiseMap,
    ElementwiseStep,
    NonlinearStep,
    OpaqueStep,
    PackedSplineStep,
    SigmoidStep,
    Smoothness,
    clamped_logit_map,
    is_a,
)


class NflowsStep(NonlinearStep):
    """A transform that is called as in nflows: ``transform(x, context)``."""

    def call_forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.module(x, context)

    def call_inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        try:
            result: tuple[Tensor, Tensor] = self.module.inverse(y, context)
        except Exception as error:
            if type(error).__name__ == "InverseNotAvailable":
                raise NotImplementedError from error
            raise
        return result


class UnknownStep(OpaqueStep, NflowsStep):
    """A transform of unknown class."""


class NetworkStep(ConditionedStep, NflowsStep):
    """A coupling or autoregressive transform with an affine map of each feature."""

    @property
    def smoothness(self) -> Smoothness:
        scale = getattr(self.module, "scale_activation", None)
        if scale is not None and scale is getattr(type(self.module), "GENERAL_SCALE_ACTIVATION", None):
            return Smoothness.KINKED  # nflows clamps it
        if getattr(self.module, "unconditional_transform", None) is not None:
            return Smoothness.KINKED  # in nflows, a spline of the identity features
        return super().smoothness


class CouplingStep(NetworkStep):
    """A coupling with an affine map: features are taken and put back by index, which costs less than indexing.

    The network and the arithmetic are the module's own. Forks of nflows, and what it refuses, are left to the module.
    """

    def __init__(self, module: Any, path: str, inverted: bool = False) -> None:
        super().__init__(module, path, inverted)
        self._plain = is_a(module, ("CouplingTransform",), ("nflows",)) and module.unconditional_transform is None

    def call_forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        if not self._takes(x):
            return super().call_forward(x, context)
        return self._coupled(x, context, self.module._coupling_transform_forward)

    def call_inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        if not self._takes(y):
            return super().call_inverse(y, context)
        return self._coupled(y, context, self.module._coupling_transform_inverse)

    def _takes(self, x: Tensor) -> bool:
        return self._plain and x.dim() in (2, 4) and x.shape[1] == self.module.features

    def _coupled(self, x: Tensor, context: Tensor | None, curve: Callable[..., Any]) -> tuple[Tensor, Tensor]:
        module = self.module
        parameters = module.transform_net(x.index_select(1, module.identity_features), context)
        changed, log_det = curve(x.index_select(1, module.transform_features), parameters)
        return x.index_copy(1, module.transform_features, changed.to(x.dtype)), log_det


class AdditiveCouplingStep(CouplingStep):
    """A coupling that shifts: its log-det is 0, but it is not affine in x."""

    reason = VOLUME_PRESERVING


class RationalSplineStep(PackedSplineStep, NflowsStep):
    """A piecewise rational-quadratic transform."""


class LinearSplineStep(RationalSplineStep):
    """A piecewise linear transform: its log-det jumps at every knot."""

    smoothness = Smoothness.JUMPS


class TailedSplineStep(RationalSplineStep):
    """A quadratic or cubic spline: with linear tails, its log-det jumps where they begin."""

    @property
    def smoothness(self) -> Smoothness:  # type: ignore[override]
        return Smoothness.KINKED if getattr(self.module, "tails", None) is None else Smoothness.JUMPS


class IntegratedStep(NflowsStep):
    """A UMNN transform: its custom backward silently drops terms of the second derivative."""

    reason = "UMNN: score is right, second derivatives are not; train it with ML, SML or FDSSM"

    smoothness = Smoothness.WRONG


class TanhStep(BoundedStep):
    """y = tanh(x)."""

    def forward_map(self, x: Tensor, context: Tensor | None) -> ElementwiseMap:
        y = torch.tanh(x)
        # log(1 - tanh²) in a form that is finite for large x, where nflows returns -inf
        return ElementwiseMap(y, lambda: 2.0 * (log(2.0) - x + F.logsigmoid(2.0 * x)), lambda: tanh_slopes(y))

    def inverse_map(self, y: Tensor, context: Tensor | None) -> ElementwiseMap:
        return super().inverse_map(y, context)._replace(log_slope=lambda: -torch.log1p(-(y**2)))

    def invert(self, y: Tensor, context: Tensor | None) -> Tensor:
        return torch.atanh(y)


class LogTanhStep(ElementwiseStep):
    """tanh with logarithmic tails beyond a cut point, where its derivative (and so the log-det) jumps."""

    reason = "elementwise, in three pieces"

    smoothness = Smoothness.JUMPS

    def forward_map(self, x: Tensor, context: Tensor | None) -> ElementwiseMap:
        t = self.module
        middle = x.abs() <= t.cut_point
        # Arguments outside the domain of a piece are replaced, since torch.where would pass on their NaN gradients.
        inner = torch.tanh(torch.where(middle, x, torch.zeros_like(x)))
        outer = torch.where(middle, torch.full_like(x, float(t.cut_point)), x.abs())
        sign = torch.sign(x)

        def slopes() -> tuple[Tensor, Tensor, Tensor]:
            tail = t.alpha / outer, -sign / outer, outer**-2
            slope, first, second = (torch.where(middle, *both) for both in zip(tanh_slopes(inner), tail, strict=True))
            return slope, first, second

        return ElementwiseMap(
            torch.where(middle, inner, sign * t.alpha * torch.log(t.beta * outer)),
            lambda: torch.where(middle, torch.log1p(-(inner**2)), log(t.alpha) - torch.log(outer)),
            slopes,
        )

    def invert(self, y: Tensor, context: Tensor | None) -> Tensor:
        t = self.module
        middle = y.abs() <= float(t.inv_cut_point)
        inner = torch.where(middle, y, torch.zeros_like(y))
        outer = torch.where(middle, torch.full_like(y, float(t.inv_cut_point)), y.abs())
        return torch.where(middle, torch.atanh(inner), torch.sign(y) * torch.exp(outer / t.alpha) / t.beta)


class LeakyReLUStep(ElementwiseStep):
    """x for x > 0, slope · x below. nflows computes its log-det on the CPU, in float32."""

    reason = "elementwise, in two pieces"

    smoothness = Smoothness.JUMPS

    def forward_map(self, x: Tensor, context: Tensor | None) -> ElementwiseMap:
        return self._curve(x, self.module.negative_slope)

    def inverse_map(self, y: Tensor, context: Tensor | None) -> ElementwiseMap:
        return self._curve(y, 1.0 / self.module.negative_slope)

    @staticmethod
    def _curve(x: Tensor, slope: float) -> ElementwiseMap:
        return ElementwiseMap(
            F.leaky_relu(x, slope),
            lambda: (x < 0).to(x) * log(slope),
            lambda: (torch.where(x > 0, torch.ones_like(x), slope), 0.0, 0.0),
        )


class ScaledSigmoidStep(SigmoidStep):
    """y = sigmoid(T x); the inverse is a logit that clamps its input to [eps, 1 - eps], as in nflows.

    nflows checks for input outside [0, 1], which synchronises with the device; here such input becomes NaN.
    """

    def temperature(self, x: Tensor) -> Tensor:
        """T on the device of x: in nflows 0.14 it is a plain CPU tensor."""
        return self.module.temperature.to(x, non_blocking=True)

    def forward_map(self, x: Tensor, context: Tensor | None) -> ElementwiseMap:
        temperature = self.temperature(x)
        at = super().forward_map(temperature * x, context)
        return at.between(at.value, temperature, 1.0, torch.log(temperature))

    def inverse_map(self, y: Tensor, context: Tensor | None) -> ElementwiseMap:
        temperature, eps = self.temperature(y), self.module.eps
        inside = (y >= 0) & (y <= 1)
        curve = clamped_logit_map(torch.where(inside, y, torch.full_like(y, float("nan"))), eps, 1 - eps)
        return curve.between(curve.value / temperature, 1.0, 1.0 / temperature, -torch.log(temperature))


class CauchyCDFStep(BoundedStep):
    """y = atan(x)/π + 1/2."""

    def forward_map(self, x: Tensor, context: Tensor | None) -> ElementwiseMap:
        square = x**2

        def slopes() -> tuple[Tensor, Tensor, Tensor]:
            fraction = 1.0 / (1.0 + square)
            return fraction / pi, -2.0 * x * fraction, 2.0 * (square - 1.0) * fraction**2

        return ElementwiseMap(torch.atan(x) / pi + 0.5, lambda: -log(pi) - torch.log1p(square), slopes)

    def invert(self, y: Tensor, context: Tensor | None) -> Tensor:
        inside = (y >= 0) & (y <= 1)
        return torch.tan(pi * (torch.where(inside, y, torch.full_like(y, float("nan"))) - 0.5))


class ExpStep(NflowsStep):
    """y = exp(x) (nflows' development version and its forks)."""

    reason = "elementwise"

    match_after = True


class GatedLinearUnitStep(ElementwiseStep):
    """y = x · sigmoid(context). nflows sums its log-det over the context's entries, which is right for one feature."""

    reason = DEPENDS_ON_CONTEXT

    def forward_map(self, x: Tensor, context: Tensor | None) -> ElementwiseMap:
        gate = self._gate(x, context)
        return ElementwiseMap(
            x * torch.sigmoid(gate), lambda: F.logsigmoid(gate), lambda: (torch.sigmoid(gate), 0.0, 0.0)
        )

    def invert(self, y: Tensor, context: Tensor | None) -> Tensor:
        return y / torch.sigmoid(self._gate(y, context))

    @staticmethod
    def _gate(x: Tensor, context: Tensor | None) -> Tensor:
        if context is None:
            raise ValueError("GatedLinearUnit needs a context")
        return context.expand_as(x)


def tanh_slopes(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The slopes of tanh, as in :class:`ElementwiseMap`, where its value is y."""
    slope = 1.0 - y**2
    return slope, -2.0 * y, -2.0 * slope
