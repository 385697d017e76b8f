"""How each class of nflows acts: where it keeps its numbers, and what its log-det is.

The classes are known by name and by the package that they come from, not by identity: users hold them under ``nflows``,
``glasflow.nflows``, ``enflows`` and ``flowcon``. Numbers are read from attributes that all of these have in common.
"""

from __future__ import annotations

from math import log, pi
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ebflow_plugin.conditioners import Smoothness, smoothness_of
from ebflow_plugin.discovery import OpaqueStep
from ebflow_plugin.plan import LinearStep, NonlinearStep, Shape, Shapes
from ebflow_plugin.steps import (
    ElementwiseAffineStep,
    InitialisedAffineStep,
    IsometryStep,
    MatrixStep,
    PackedLUStep,
    SqueezeStep,
    summed,
)


class NflowsStep(NonlinearStep):
    """A transform that does its own work, as nflows calls it: ``transform(x, context)``."""

    def call_forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        result: tuple[Tensor, Tensor] = self.module(x, context)
        return result

    def call_inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        try:
            result: tuple[Tensor, Tensor] = self.module.inverse(y, context)
        except Exception as error:
            if type(error).__name__ == "InverseNotAvailable":
                raise NotImplementedError from error
            raise
        return result


class UnknownStep(OpaqueStep, NflowsStep):
    """A transform whose class nobody registered."""


class ConditionedStep(NflowsStep):
    """A coupling or autoregressive transform: as smooth as its network."""

    reason = "conditioned on its input"

    @property
    def smoothness(self) -> Smoothness:  # noqa: D102
        scale = getattr(self.module, "scale_activation", None)
        if scale is not None and scale is getattr(type(self.module), "GENERAL_SCALE_ACTIVATION", None):
            return Smoothness.KINKED  # nflows clamps it
        return smoothness_of(self.module)


class AdditiveCouplingStep(ConditionedStep):
    """A coupling that shifts: its log-det is 0, but it is not affine in x."""

    reason = "volume-preserving, but not affine in x"


class SplineStep(NflowsStep):
    """A piecewise rational-quadratic transform: its score jumps at every knot."""

    reason = "spline"

    @property
    def smoothness(self) -> Smoothness:  # noqa: D102
        return Smoothness.KINKED


class LinearSplineStep(SplineStep):
    """A piecewise linear transform: its log-det jumps at every knot."""

    @property
    def smoothness(self) -> Smoothness:  # noqa: D102
        return Smoothness.JUMPS


class TailedSplineStep(SplineStep):
    """A quadratic or cubic spline: with linear tails its log-det jumps where they begin."""

    @property
    def smoothness(self) -> Smoothness:  # noqa: D102
        return Smoothness.KINKED if getattr(self.module, "tails", None) is None else Smoothness.JUMPS


class IntegratedStep(NflowsStep):
    """A UMNN transform: its own backward drops terms of the second derivative, without an error."""

    reason = "UMNN: score is right, second derivatives are not; train it with DSM or ML"

    @property
    def smoothness(self) -> Smoothness:  # noqa: D102
        return Smoothness.FALSE


class TanhStep(NonlinearStep):
    """y = tanh(x)."""

    reason = "elementwise"

    @property
    def sensitive(self) -> bool:  # noqa: D102
        return self.inverted

    def call_forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        # log(1 - tanh²) in a form that does not run into log(0) for large x, where nflows gives -inf
        return torch.tanh(x), summed(2.0 * (log(2.0) - x + F.logsigmoid(2.0 * x)))

    def call_inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        return torch.atanh(y), summed(-torch.log1p(-(y**2)))


class LogTanhStep(NonlinearStep):
    """tanh with logarithmic tails beyond a cut point, where its derivative (and so the log-det) jumps."""

    reason = "elementwise, in three pieces"

    @property
    def smoothness(self) -> Smoothness:  # noqa: D102
        return Smoothness.JUMPS

    def call_forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        t = self.module
        middle = x.abs() <= t.cut_point
        # Where a piece is not taken its argument is moved into its domain: torch.where passes NaN gradients on.
        inner = torch.where(middle, x, torch.zeros_like(x))
        outer = torch.where(middle, torch.full_like(x, float(t.cut_point)), x.abs())
        tail = torch.sign(x) * t.alpha * torch.log(t.beta * outer)
        log_derivative = torch.where(middle, torch.log1p(-(torch.tanh(inner) ** 2)), log(t.alpha) - torch.log(outer))
        return torch.where(middle, torch.tanh(inner), tail), summed(log_derivative)

    def call_inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
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
    def smoothness(self) -> Smoothness:  # noqa: D102
        return Smoothness.JUMPS

    def call_forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        return self._slope(x, self.module.negative_slope)

    def call_inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
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
    def class_name(self) -> str:  # noqa: D102
        return "Logit" if self.inverted else super().class_name

    @property
    def sensitive(self) -> bool:  # noqa: D102
        return self.inverted

    def temperature(self, x: Tensor) -> Tensor:
        """T on the device of x: nflows 0.14 keeps it as a plain CPU tensor."""
        result: Tensor = self.module.temperature.to(x)
        return result

    def call_forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        temperature = self.temperature(x)
        x = temperature * x
        return torch.sigmoid(x), summed(torch.log(temperature) + F.logsigmoid(x) + F.logsigmoid(-x))

    def call_inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        temperature, eps = self.temperature(y), self.module.eps
        inside = (y >= 0) & (y <= 1)
        y = torch.where(inside, torch.clamp(y, eps, 1 - eps), torch.full_like(y, float("nan")))
        logit = torch.log(y) - torch.log1p(-y)
        return logit / temperature, -summed(torch.log(temperature) + F.logsigmoid(logit) + F.logsigmoid(-logit))


class CauchyCDFStep(NonlinearStep):
    """y = atan(x)/π + 1/2."""

    reason = "elementwise"

    @property
    def sensitive(self) -> bool:  # noqa: D102
        return self.inverted

    def call_forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        return torch.atan(x) / pi + 0.5, summed(-log(pi) - torch.log1p(x**2))

    def call_inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        inside = (y >= 0) & (y <= 1)
        x = torch.tan(pi * (torch.where(inside, y, torch.full_like(y, float("nan"))) - 0.5))
        return x, summed(log(pi) + torch.log1p(x**2))


class ExpStep(NflowsStep):
    """y = exp(x) (nflows' development version and its forks)."""

    reason = "elementwise"

    @property
    def sensitive(self) -> bool:  # noqa: D102
        return True


class GatedLinearUnitStep(NonlinearStep):
    """y = x · sigmoid(context). nflows sums its log-det over the context's entries: right for one feature alone."""

    reason = "affine in x, but its log-det depends on the context"

    def call_forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        gate = self._gate(context)
        return x * torch.sigmoid(gate), summed(F.logsigmoid(gate).expand_as(x))

    def call_inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        gate = self._gate(context)
        return y / torch.sigmoid(gate), -summed(F.logsigmoid(gate).expand_as(y))

    @staticmethod
    def _gate(context: Tensor | None) -> Tensor:
        if context is None:
            raise ValueError("GatedLinearUnit needs a context")
        return context


class PointwiseAffineStep(ElementwiseAffineStep):
    """PointwiseAffineTransform: buffers ``_scale`` and ``_shift``."""

    def scale_shift(self, dim: int) -> tuple[Tensor, Tensor]:  # noqa: D102
        return self.module._scale, self.module._shift

    def log_scale(self, dim: int) -> Tensor:  # noqa: D102
        return torch.log(torch.abs(self.module._scale))


class BatchNormStep(ElementwiseAffineStep):
    """BatchNorm, which is an affine map in eval mode alone."""

    reason = "affine per feature in eval mode"

    def refusal(self) -> str | None:  # noqa: D102
        if self.module.training:
            return "couples the samples of a batch in training mode; put the model in eval()"
        return None

    def scale_shift(self, dim: int) -> tuple[Tensor, Tensor]:  # noqa: D102
        t = self.module
        scale = t.weight / torch.sqrt(t.running_var + t.eps)
        return scale, t.bias - t.running_mean * scale

    def log_scale(self, dim: int) -> Tensor:  # noqa: D102
        t = self.module
        return torch.log(t.weight) - 0.5 * torch.log(t.running_var + t.eps)


class ActNormStep(InitialisedAffineStep):
    """ActNorm: ``log_scale`` and ``shift`` per feature or channel, from the first batch in training mode."""

    def flag(self) -> Tensor:  # noqa: D102
        flag: Tensor = self.module.initialized
        return flag

    def start(self, x: Tensor) -> None:  # noqa: D102
        if not self.inverted:  # nflows initialises it in the forward direction alone
            self.module._initialize(x)

    def apply(self, x: Tensor) -> Tensor:  # noqa: D102
        if self.module.training and not self.inverted:
            self.initialize(x)
        return super().apply(x)

    def scale_shift(self, dim: int) -> tuple[Tensor, Tensor]:  # noqa: D102
        broadcast = (-1, *[1] * (dim - 2))
        return self.module.scale.reshape(broadcast), self.module.shift.reshape(broadcast)

    def log_scale(self, dim: int) -> Tensor:  # noqa: D102
        log_scale: Tensor = self.module.log_scale
        return log_scale


class NflowsSqueezeStep(SqueezeStep):
    """SqueezeTransform."""

    @property
    def factor(self) -> int:  # type: ignore[override]
        """How many pixels along an edge become channels."""
        factor: int = self.module.factor
        return factor


class NaiveLinearStep(MatrixStep):
    """NaiveLinear, whose own inverse raises on current torch."""

    def weight(self) -> Tensor:  # noqa: D102
        weight: Tensor = self.module._weight
        return weight

    def bias(self) -> Tensor:  # noqa: D102
        bias: Tensor = self.module.bias
        return bias


class OneByOneConvolutionStep(PackedLUStep):
    """OneByOneConvolution: a fixed permutation of the channels, then LU factors."""

    reason = "1 × 1 convolution held as LU factors"

    def order(self) -> Tensor:  # noqa: D102
        order: Tensor = self.module.permutation._permutation
        return order


class HouseholderStep(IsometryStep):
    """HouseholderSequence: a product of reflections, with log-det 0. O(K·D)."""

    reason = "orthogonal"

    def apply(self, x: Tensor) -> Tensor:  # noqa: D102
        return reflect(x, self.module.q_vectors)

    def invert(self, y: Tensor) -> Tensor:  # noqa: D102
        return reflect(y, self.module.q_vectors.flip(0))


class QRLinearStep(LinearStep):
    """QRLinear: y = Q R x + b."""

    reason = "matrix held as QR factors"

    def apply(self, x: Tensor) -> Tensor:  # noqa: D102
        t = self.module
        return reflect(F.linear(x, t._create_upper()), t.orthogonal.q_vectors) + t.bias

    def invert(self, y: Tensor) -> Tensor:  # noqa: D102
        t = self.module
        rows = reflect(y - t.bias, t.orthogonal.q_vectors.flip(0))
        return torch.linalg.solve_triangular(t._create_upper().mT, rows, upper=False, left=False)

    def log_abs_det(self, shape: Shape) -> Tensor:  # noqa: D102
        log_diagonal: Tensor = self.module.log_upper_diag
        return log_diagonal.sum()


class SVDLinearStep(LinearStep):
    """SVDLinear: y = U S V x + b."""

    reason = "matrix held as SVD factors"

    def apply(self, x: Tensor) -> Tensor:  # noqa: D102
        t = self.module
        return reflect(reflect(x, t.orthogonal_2.q_vectors) * t.diagonal, t.orthogonal_1.q_vectors) + t.bias

    def invert(self, y: Tensor) -> Tensor:  # noqa: D102
        t = self.module
        x = reflect(y - t.bias, t.orthogonal_1.q_vectors.flip(0)) / t.diagonal
        return reflect(x, t.orthogonal_2.q_vectors.flip(0))

    def log_abs_det(self, shape: Shape) -> Tensor:  # noqa: D102
        return torch.log(self.module.diagonal).sum()


class SplitStep(IsometryStep):
    """One split of a MultiscaleCompositeTransform: the first half is finished, the second goes on."""

    gives = 2
    reason = "splits off latents"

    def apply(self, x: Tensor) -> tuple[Tensor, ...]:  # noqa: D102
        return torch.chunk(x, chunks=2, dim=self.module._split_dim)

    def invert(self, y: tuple[Tensor, ...]) -> Tensor:  # noqa: D102
        return torch.cat(y, dim=self.module._split_dim)

    def forward_shapes(self, shapes: Shapes) -> Shapes:  # noqa: D102
        axis = self.module._split_dim - 1
        (shape,) = shapes
        first = (shape[axis] + 1) // 2
        return tuple((*shape[:axis], size, *shape[axis + 1 :]) for size in (first, shape[axis] - first))

    def inverse_shapes(self, shapes: Shapes) -> Shapes:  # noqa: D102
        axis = self.module._split_dim - 1
        first, second = shapes
        return ((*first[:axis], first[axis] + second[axis], *first[axis + 1 :]),)


class CollectStep(IsometryStep):
    """The end of a MultiscaleCompositeTransform: the latents of all levels as one flat vector."""

    reason = "joins the latents"

    def __init__(self, module: Any, path: str, inverted: bool = False) -> None:  # noqa: ANN401
        self.takes = len(module._transforms)
        super().__init__(module, path, inverted)

    def apply(self, x: Any) -> Tensor:  # noqa: ANN401, D102
        parts = (x,) if isinstance(x, Tensor) else x
        return torch.cat([part.flatten(1) for part in parts], dim=1)

    def invert(self, y: Tensor) -> tuple[Tensor, ...]:  # noqa: D102
        shapes = [torch.Size(shape) for shape in self.module._output_shapes]
        parts = y.split([shape.numel() for shape in shapes], dim=1)
        return tuple(part.reshape(-1, *shape) for part, shape in zip(parts, shapes, strict=True))

    def forward_shapes(self, shapes: Shapes) -> Shapes:  # noqa: D102
        return ((sum(torch.Size(shape).numel() for shape in shapes),),)

    def inverse_shapes(self, shapes: Shapes) -> Shapes:  # noqa: D102
        return tuple(tuple(shape) for shape in self.module._output_shapes)


def reflect(x: Tensor, vectors: Tensor) -> Tensor:
    """Applies Householder reflections in turn: x - 2 (x·q) q / (q·q) for each q of ``(K, D)`` vectors."""
    scaled = vectors * (2.0 / (vectors**2).sum(-1, keepdim=True))
    for vector, scaled_vector in zip(vectors.unbind(), scaled.unbind(), strict=True):
        x = x - (x @ vector)[:, None] * scaled_vector
    return x
