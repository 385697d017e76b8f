"""The nonlinear classes of nflows: how each acts, what its log-det is, and what it does to the score.

The classes are known by name and by the package that they come from, not by identity: users hold them under ``nflows``,
``glasflow.nflows``, ``enflows`` and ``flowcon``. Numbers are read from attributes that all of these have in common.
"""

from __future__ import annotations

from math import log, pi

import torch
from torch import Tensor
from torch.nn import functional as F

from ebflow_plugin.conditioners import Smoothness, smoothness_of
from ebflow_plugin.plan import NonlinearStep
from ebflow_plugin.rules import OpaqueStep
from ebflow_plugin.steps import (
    summed,
)


class NflowsStep(NonlinearStep):
    """A transform that does its own work, as nflows calls it: ``transform(x, context)``."""

    def call_forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = self.module(x, context)
        return result

    def call_inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        try:
            result: tuple[Tensor, Tensor] = self.module.inverse(y, context)
        except Exception as error:
            if type(error).__name__ == "InverseNotAvailable":
                raise NotImplementedError from error
            raise
        return result


class UnknownStep(OpaqueStep, NflowsStep):
    """A transform whose class nobody registered. It gets a copy of its input, since it may write into it."""

    def call_forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        return super().call_forward(x.clone(), context)

    def call_inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        return super().call_inverse(y.clone(), context)


class ConditionedStep(NflowsStep):
    """A coupling or autoregressive transform: as smooth as its network."""

    reason = "conditioned on its input"

    @property
    def smoothness(self) -> Smoothness:
        scale = getattr(self.module, "scale_activation", None)
        if scale is not None and scale is getattr(type(self.module), "GENERAL_SCALE_ACTIVATION", None):
            return Smoothness.KINKED  # nflows clamps it
        if getattr(self.module, "unconditional_transform", None) is not None:
            return Smoothness.KINKED  # as nflows has it, a spline of the features that are passed on
        return smoothness_of(self.module)


class AdditiveCouplingStep(ConditionedStep):
    """A coupling that shifts: its log-det is 0, but it is not affine in x."""

    reason = "volume-preserving, but not affine in x"


class SplineStep(NflowsStep):
    """A piecewise rational-quadratic transform: its score jumps at every knot."""

    reason = "spline"

    @property
    def smoothness(self) -> Smoothness:
        return Smoothness.KINKED


class LinearSplineStep(SplineStep):
    """A piecewise linear transform: its log-det jumps at every knot."""

    @property
    def smoothness(self) -> Smoothness:
        return Smoothness.JUMPS


class TailedSplineStep(SplineStep):
    """A quadratic or cubic spline: with linear tails its log-det jumps where they begin."""

    @property
    def smoothness(self) -> Smoothness:
        return Smoothness.KINKED if getattr(self.module, "tails", None) is None else Smoothness.JUMPS


class IntegratedStep(NflowsStep):
    """A UMNN transform: its own backward drops terms of the second derivative, without an error."""

    reason = "UMNN: score is right, second derivatives are not; train it with ML, SML or FDSSM"

    @property
    def smoothness(self) -> Smoothness:
        return Smoothness.FALSE


class TanhStep(NonlinearStep):
    """y = tanh(x)."""

    reason = "elementwise"

    @property
    def sensitive(self) -> bool:
        return self.inverted

    def call_forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        # log(1 - tanh²) in a form that does not run into log(0) for large x, where nflows gives -inf
        return torch.tanh(x), summed(2.0 * (log(2.0) - x + F.logsigmoid(2.0 * x)))

    def call_inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        return torch.atanh(y), summed(-torch.log1p(-(y**2)))


class LogTanhStep(NonlinearStep):
    """tanh with logarithmic tails beyond a cut point, where its derivative (and so the log-det) jumps."""

    reason = "elementwise, in three pieces"

    @property
    def smoothness(self) -> Smoothness:
        return Smoothness.JUMPS

    def call_forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        t = self.module
        middle = x.abs() <= t.cut_point
        # Where a piece is not taken its argument is moved into its domain: torch.where passes NaN gradients on.
        inner = torch.where(middle, x, torch.zeros_like(x))
        outer = torch.where(middle, torch.full_like(x, float(t.cut_point)), x.abs())
        tail = torch.sign(x) * t.alpha * torch.log(t.beta * outer)
        log_derivative = torch.where(middle, torch.log1p(-(torch.tanh(inner) ** 2)), log(t.alpha) - torch.log(outer))
        return torch.where(middle, torch.tanh(inner), tail), summed(log_derivative)

    def call_inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        t = self.module
        middle = y.abs() <= float(t.inv_cut_point)
        inner = torch.where(middle, y, torch.zeros_like(y))
        outer = torch.where(middle, torch.full_like(y, float(t.inv_cut_point)), y.abs())
        tail = torch.sign(y) * torch.exp(outer / t.alpha) / t.beta
        log_derivative = torch.where(middle, -torch.log1p(-(inner**2)), outer / t.alpha - log(t.alpha * t.beta))
        return torch.where(middle, torch.atanh(inner), tail), summed(log_derivative)


class LeakyReLUStep(NonlinearStep):
    """x for x > 0, slope · x below. nflows puts its log-det on the CPU, in float32."""

    reason = "elementwise, in two pieces"

    @property
    def smoothness(self) -> Smoothness:
        return Smoothness.JUMPS

    def call_forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._slope(x, self.module.negative_slope)

    def call_inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._slope(y, 1.0 / self.module.negative_slope)

    @staticmethod
    def _slope(x: Tensor, slope: float) -> tuple[Tensor, Tensor]:
        return F.leaky_relu(x, slope), summed((x < 0).to(x) * log(slope))


class SigmoidStep(NonlinearStep):
    """y = sigmoid(T x); the inverse is a logit that clamps its input to [eps, 1 - eps], as nflows does.

    nflows looks for input outside of [0, 1] by waiting for the device; here such input gives NaN.
    """

    reason = "elementwise"

    @property
    def class_name(self) -> str:
        return "Logit" if self.inverted else super().class_name

    @property
    def sensitive(self) -> bool:
        return self.inverted

    def temperature(self, x: Tensor) -> Tensor:
        """T on the device of x: nflows 0.14 keeps it as a plain CPU tensor."""
        result: Tensor = self.module.temperature.to(x)
        return result

    def call_forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        temperature = self.temperature(x)
        x = temperature * x
        return torch.sigmoid(x), summed(torch.log(temperature) + F.logsigmoid(x) + F.logsigmoid(-x))

    def call_inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        temperature, eps = self.temperature(y), self.module.eps
        inside = (y >= 0) & (y <= 1)
        y = torch.where(inside, torch.clamp(y, eps, 1 - eps), torch.full_like(y, float("nan")))
        logit = torch.log(y) - torch.log1p(-y)
        return logit / temperature, -summed(torch.log(temperature) + F.logsigmoid(logit) + F.logsigmoid(-logit))


class CauchyCDFStep(NonlinearStep):
    """y = atan(x)/π + 1/2."""

    reason = "elementwise"

    @property
    def sensitive(self) -> bool:
        return self.inverted

    def call_forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        return torch.atan(x) / pi + 0.5, summed(-log(pi) - torch.log1p(x**2))

    def call_inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        inside = (y >= 0) & (y <= 1)
        x = torch.tan(pi * (torch.where(inside, y, torch.full_like(y, float("nan"))) - 0.5))
        return x, summed(log(pi) + torch.log1p(x**2))


class ExpStep(NflowsStep):
    """y = exp(x) (nflows' development version and its forks)."""

    reason = "elementwise"

    @property
    def sensitive(self) -> bool:
        return True


class GatedLinearUnitStep(NonlinearStep):
    """y = x · sigmoid(context). nflows sums its log-det over the context's entries: right for one feature alone."""

    reason = "affine in x, but its log-det depends on the context"

    def call_forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        gate = self._gate(context)
        return x * torch.sigmoid(gate), summed(F.logsigmoid(gate).expand_as(x))

    def call_inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        gate = self._gate(context)
        return y / torch.sigmoid(gate), -summed(F.logsigmoid(gate).expand_as(y))

    @staticmethod
    def _gate(context: Tensor | None) -> Tensor:
        if context is None:
            raise ValueError("GatedLinearUnit needs a context")
        return context
