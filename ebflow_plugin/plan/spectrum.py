r"""The singular values of full linear layers: cheap estimates, monitoring, and a penalty on small ones.

Score matching, unlike likelihood, has no term that pushes determinants away from zero, so a full layer can become
singular while the loss falls. All of this needs only products with vectors: :math:`O(D^2)` each for a dense layer, and
one convolution each for a convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, prod

import torch
from torch import Generator, Tensor

from ebflow_plugin.errors import ConditioningWarning, warn
from ebflow_plugin.linalg.bidiagonal import bidiagonalise
from ebflow_plugin.linalg.operators import LinearOperator
from ebflow_plugin.linalg.random import gaussian_like, signs_like
from ebflow_plugin.plan.matrices import FullConvStep, MatrixStep
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.step import LinearStep, Shape, Shapes

LANCZOS_STEPS = 32
CG_STEPS = 12
NEAR_SINGULAR = 1e4  # the condition number above which a ConditionWatch warns
SMALL = 0.01  # the penalty acts on singular values below this fraction of their root mean square


Placed = tuple[LinearStep, Shapes]  # a full layer of a plan, and the event shapes of its input


@dataclass(frozen=True)
class Spectrum:
    """Estimates of the extreme singular values: a lower bound of the largest, an upper bound of the smallest."""

    largest: float
    smallest: float

    @property
    def condition(self) -> float:
        """A lower bound of the condition number."""
        return self.largest / self.smallest if self.smallest > 0 else float("inf")


class ConditionWatch:
    """Estimates the condition number of each full layer, and warns once about each that is nearly singular.

    Arguments:
        layers: The layers (:func:`full_layers`).
        limit: The condition number above which it warns.
        advice: The last line of the warning.
    """

    def __init__(self, layers: Sequence[Placed], limit: float = NEAR_SINGULAR, advice: str = "") -> None:
        self.layers, self.limit, self.advice = list(layers), limit, advice
        self._warned: set[str] = set()

    def check(self, step: int) -> dict[str, Spectrum]:
        """Estimates the spectrum of each layer, by path, at a training step, and warns."""
        spectra: dict[str, Spectrum] = {}
        lines = []
        for layer, shapes in self.layers:
            path, operator = layer.path, layer.operator(shapes)
            assert operator is not None
            spectrum = spectra[path] = estimate_spectrum(operator)
            near = isnan(spectrum.condition) or spectrum.condition > self.limit
            if near and path not in self._warned:
                self._warned.add(path)
                lines.append(
                    f"{layer.where}: smallest singular value about {spectrum.smallest:.1e}, condition number at "
                    f"least {spectrum.condition:.1e}"
                )
        if lines:
            warn(
                f"step {step}: {len(lines)} of {len(self.layers)} full layers are close to singular, where log Z and "
                "samples break\n  " + "\n  ".join(lines) + f"\n{self.advice}",
                ConditioningWarning,
            )
        return spectra


def full_layers(plan: Plan, event_shape: Shape) -> list[Placed]:
    """The steps of a plan that are full, unconstrained matrices or convolutions.

    Arguments:
        plan: The plan.
        event_shape: The shape of one data point.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from ebflow_nflows import FullLinear
        >>> from nflows import distributions, flows
        >>> model = ebf.wrap(flows.Flow(FullLinear(3), distributions.StandardNormal([3])))
        >>> [(layer.path, shapes) for layer, shapes in full_layers(model.plan, (3,))]
        [('_transform', ((3,),))]
    """
    return [
        (step, shapes)
        for step, shapes in plan.shapes(event_shape)
        if isinstance(step, (MatrixStep, FullConvStep)) and any(True for _ in step.module.parameters())
    ]


def estimate_spectrum(operator: LinearOperator, steps: int = LANCZOS_STEPS) -> Spectrum:
    r"""Estimates the largest and the smallest singular value by Golub-Kahan bidiagonalisation.

    It takes k products with W and k with its transpose, :math:`O(k D^2)`, and no factorisation. It is exact for D ≤ k,
    and accurate if the extreme singular values are well separated, as they are when a layer becomes singular. A cluster
    of small singular values is detected, but the smallest of them is overestimated.

    Example:
        >>> from ebflow_plugin.linalg.dense import Dense
        >>> round(estimate_spectrum(Dense(torch.tensor([4.0, 1.0, 0.5]).diag())).condition, 3)
        8.0
    """
    size = prod(operator.shape)
    start = gaussian_like(operator.like.new_empty(1, size), Generator("cpu").manual_seed(0))
    bands = bidiagonalise(operator, start, min(steps, size))
    matrix = bands.matrices()[0].cpu()
    if not matrix.isfinite().all():
        return Spectrum(float("nan"), float("nan"))
    values = torch.linalg.svdvals(matrix)
    return Spectrum(float(values[0]), float(values[-1]))


def conditioning_penalty(layers: list[Placed], generator: Generator | None = None) -> Tensor:
    r"""A smooth count of the singular values near zero, as a penalty, estimated with one probe for each layer.

    .. math:: \sum_{\text{layers}} \operatorname{tr}\left[\delta\,(W^T W + \delta I)^{-1}\right]
              = \sum_{\text{layers}} \sum_i \frac{\delta}{\sigma_i^2 + \delta}, \qquad
              \delta = 10^{-4} \cdot \frac1D \sum_i \sigma_i^2

    A singular value of zero counts 1, one at a hundredth of the root mean square ½, a large one almost nothing:
    well-conditioned layers are not affected. The trace is estimated without bias by :math:`\delta\, v^T y` with a
    random sign vector v and :math:`y = (W^T W + \delta I)^{-1} v` from a few steps of conjugate gradients, and its
    gradient by that of :math:`-\delta \|W y\|^2`. :math:`O(D^2)` for each dense layer, without synchronisation. With
    few steps of conjugate gradients, clustered small singular values are undercounted.

    Arguments:
        layers: The layers (:func:`full_layers`).
        generator: Draws the probes.

    Returns:
        A scalar, differentiable in the parameters of the layers.
    """
    total: Tensor | None = None
    for layer, shapes in layers:
        operator = layer.operator(shapes)
        assert operator is not None
        probe = signs_like(operator.like.new_empty(1, *operator.shape), generator)
        with torch.no_grad():
            image = operator.apply(probe)
            delta = SMALL**2 * image.square().mean()  # E ‖W v‖² is the sum of the squared singular values
            solution = _conjugate_gradients(operator, probe, delta)
            value = delta * (probe * solution).sum()
        surrogate = -delta * operator.apply(solution).square().sum()
        term = surrogate - surrogate.detach() + value
        total = term if total is None else total + term
    if total is None:
        raise ValueError("no layers")
    return total


def _conjugate_gradients(operator: LinearOperator, right: Tensor, delta: Tensor) -> Tensor:
    """Solves (WᵀW + δI) y = right, approximately."""
    tiny = torch.finfo(right.dtype).tiny
    solution, residual, direction = torch.zeros_like(right), right, right
    square = residual.square().sum()
    for _ in range(min(CG_STEPS, right.numel())):
        image = operator.apply_transposed(operator.apply(direction)) + delta * direction
        length = square / (direction * image).sum().clamp_min(tiny)
        solution = solution + length * direction
        residual = residual - length * image
        before, square = square, residual.square().sum()
        direction = residual + (square / before.clamp_min(tiny)) * direction
    return solution
