r"""Calibration: the closed-form fit of the base after training.

Score matching learns the features of a flow before the scale of its latents. With :math:`z = g(x)` on training data, of
mean :math:`m` and covariance :math:`C = L L^\top`, the map :math:`L^{-1}(z - m)` after the flow is the
maximum-likelihood choice among all affine maps. The model holds it as one more linear step; the flow is not changed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from math import log, pi
from typing import Any

import torch
from torch import Tensor, nn

from ebflow_plugin.chunks import picked
from ebflow_plugin.closed_form.moments import HeldOut, Moments, Rows
from ebflow_plugin.errors import InputError, SingularError
from ebflow_plugin.linalg.memo import own_tensors
from ebflow_plugin.linalg.random import gaussian_like
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.step import Base, LinearStep, Shape
from ebflow_plugin.plan.values import flatten, parts_of, shapes_of, unflatten

HELD_OUT = 10  # every tenth row is held out


class Calibration(nn.Module):
    """An affine map of flat latents, in buffers: part of checkpoints, but not trained.

    Attributes:
        mean: m, with shape ``(D,)``; None if the model is not calibrated.
        to_base: The map A in u = A (z - m) + μ, with shape ``(D, D)``, or ``(D,)`` if it is diagonal.
        from_base: The inverse of A.
        center: μ, the mean of the base, with shape ``(D,)``.
    """

    names = ("mean", "to_base", "from_base", "center")
    mean: Tensor | None
    to_base: Tensor | None
    from_base: Tensor | None
    center: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        for name in self.names:
            self.register_buffer(name, None)

    @property
    def ready(self) -> bool:
        """Whether the model is calibrated."""
        return self.mean is not None

    def set(self, **tensors: Tensor | None) -> None:
        """Sets the map; without arguments, removes it."""
        for name in self.names:
            setattr(self, name, tensors.get(name))


class CalibrationStep(LinearStep):
    """The step of a :class:`Calibration`: after the flow, over all of its latents."""

    reason = "closed-form fit of the base"

    def __init__(self, module: Calibration, shapes: tuple[Shape, ...]) -> None:
        super().__init__(module, "calibration")
        self._shapes = shapes
        self.n_in = self.n_out = len(shapes)

    def apply(self, x: Any) -> Any:
        c = self.module
        return unflatten(_times(c.to_base, flatten(x) - c.mean) + c.center, self._shapes)

    def invert(self, y: Any) -> Any:
        c = self.module
        return unflatten(_times(c.from_base, flatten(y) - c.center) + c.mean, self._shapes)

    def log_abs_det(self, shape: Shape) -> Tensor:
        to_base: Tensor = self.module.to_base
        return (to_base if to_base.dim() == 1 else to_base.diagonal()).abs().log().sum()


def _times(matrix: Tensor, rows: Tensor) -> Tensor:
    return rows * matrix if matrix.dim() == 1 else rows @ matrix.T


@dataclass(frozen=True)
class CalibrationReport:
    """The effect of a calibration, on held-out data.

    Attributes:
        before: The NLL in nats before.
        after: The NLL in nats of a map that is fitted to the other rows. The map of the model is fitted to all rows.
        shrinkage: How far the covariance was shrunk towards its diagonal, 0 to 1.
        kind: ``"full"``, ``"diagonal"``, or ``"none"`` if calibration would have made held-out data less likely.
    """

    before: float
    after: float
    shrinkage: float
    kind: str

    def __str__(self) -> str:
        return f"held-out NLL {self.before:.2f} -> {self.after:.2f} nats ({self.kind}, shrinkage {self.shrinkage:.3g})"


def gaussian_of(base: Base, latents: tuple[Tensor, ...], call: str) -> tuple[Tensor, Tensor]:
    """The mean and standard deviation of a diagonal Gaussian base, from its log-density and score at three points.

    Arguments:
        base: The base.
        latents: Some latents, for their shapes, device and dtype.
        call: What needs a Gaussian, for messages.

    Returns:
        The mean and the standard deviation, in float64, with shape ``(D,)``.

    Raises:
        InputError: If the base is not a diagonal Gaussian.
    """
    why = f"{call} fits a Gaussian base with a diagonal covariance and without a context; {base.class_name} is none"
    with torch.inference_mode(False), torch.enable_grad():
        rows = flatten(latents)[:1].repeat(3, 1).zero_()
        rows[1], rows[2] = 1.0, gaussian_like(rows[2], torch.Generator("cpu").manual_seed(0))
        rows.requires_grad_()
        if any(tensor.is_inference() for tensor in own_tensors(base.module)):
            base = copy.deepcopy(base)  # gradients cannot pass through tensors that were made in inference mode
        try:
            log_prob = base.log_prob(parts_of(unflatten(rows, shapes_of(latents))), None)
            (scores,) = torch.autograd.grad(log_prob.sum(), rows)
        except Exception as error:
            raise InputError(f"{why}: {error}") from error
    (zero, one, other), rows = scores.double(), rows.detach().double()
    precision = zero - one
    mean, std = zero / precision, precision.rsqrt()
    # A mixture may have the score of a Gaussian near one of its modes, but not the density.
    density = -0.5 * (((rows - mean) / std).square() + (2 * pi / precision).log()).sum(1)
    close = torch.allclose(other, -precision * (rows[2] - mean), rtol=1e-2, atol=1e-3) and torch.allclose(
        log_prob.double(), density, rtol=max(1e-5, 4 * torch.finfo(scores.dtype).eps), atol=1e-3
    )
    if not (bool((precision > 0).all()) and close):
        raise InputError(why)
    return mean, std


def fit_affine(
    moments: Moments, others: Moments, base: tuple[Tensor, Tensor], kind: str, shrinkage: float | None = None
) -> tuple[dict[str, Tensor], float, float]:
    """Fits u = A (z - m) + μ to moments of latents, with the shrinkage that minimises the held-out NLL.

    Returns:
        The tensors of a :class:`Calibration`, the shrinkage, and the mean held-out NLL of the latents in nats.
    """
    center, std = base
    covariance = moments.covariance(unbiased=False)
    if not bool(torch.isfinite(covariance).all()):
        raise InputError("the latents of the data hold NaN or inf; ebflow_plugin.verify(flow, x) finds where")
    spread = (covariance if kind == "diagonal" else covariance.diagonal()).clamp_min(0.0).sqrt()
    flat = (spread <= torch.finfo(torch.float64).eps * spread.max()).nonzero().flatten().tolist()
    if flat:
        raise SingularError(f"latents {flat[:5]} do not vary over the data, so no scale fits them")
    second = others.second_moments(moments.mean)
    nll = spread.log().sum() + 0.5 * len(spread) * log(2 * pi)
    if kind == "diagonal":
        rho, to_base, from_base = 1.0, std / spread, spread / std
        nll = nll + 0.5 * (second / spread**2).sum()
    else:  # in units of the spread, shrinking towards the diagonal moves every eigenvalue towards 1
        correlation, observed = (matrix / torch.outer(spread, spread) for matrix in (covariance, second))
        rho = choose_shrinkage(correlation, observed)[0] if shrinkage is None else shrinkage
        unit = torch.eye(len(spread), dtype=correlation.dtype, device=correlation.device)
        lower, failed = torch.linalg.cholesky_ex((1 - rho) * correlation + rho * unit)
        if bool(failed) or lower.diagonal().min() <= 1e-6 * lower.diagonal().max():
            raise SingularError(
                f"the covariance of the latents is singular ({moments.count:.0f} data points for {len(spread)} "
                "dimensions); pass more data, or kind='diagonal'"
            )
        inverse = torch.linalg.solve_triangular(lower, unit, upper=False)
        to_base, from_base = std[:, None] * inverse / spread, spread[:, None] * lower / std
        nll = nll + lower.diagonal().log().sum() + 0.5 * ((inverse @ observed) * inverse).sum()
    tensors = {"mean": moments.mean, "to_base": to_base, "from_base": from_base, "center": center}
    return tensors, rho, nll.item()


def choose_shrinkage(correlation: Tensor, observed: Tensor) -> tuple[float, float]:
    """The ρ for which (1 - ρ) C + ρ I makes data with second moments ``observed`` most likely. One eigh: O(D³).

    Returns:
        ρ, and the mean NLL of these data in nats.
    """
    values, vectors = torch.linalg.eigh(correlation)
    projected = ((vectors.T @ observed) * vectors.T).sum(1)

    def nll(rho: float) -> float:
        shrunk = (1 - rho) * values + rho
        if shrunk.min() <= 1e-12 * shrunk.max():
            return float("inf")
        return 0.5 * float((shrunk.log() + projected / shrunk).sum()) + 0.5 * len(values) * log(2 * pi)

    rho = min([0.0, *(10.0 ** (power / 4) for power in range(-16, 0)), 1.0], key=nll)
    return rho, nll(rho)


@torch.no_grad()
def calibrate_plan(
    plan: Plan, stream: Iterable[Rows], like: Tensor, kind: str
) -> tuple[dict[str, Tensor], CalibrationReport]:
    """Fits the base of a plan to the latents of data. Every tenth row is held out, to choose the shrinkage.

    Returns:
        The tensors of a :class:`Calibration` (none if it would make held-out data less likely), and the report.
    """
    diagonal, held_out = kind == "diagonal", HeldOut(HELD_OUT)
    moments, others, losses = Moments(diagonal), Moments(diagonal), Moments(diagonal=True)
    for x, context, weights, volume in stream:
        embedded = plan.embed(context)
        latents, log_det = plan.encode(x, embedded)
        volume = volume if log_det is None else volume + log_det
        event_shape, log_prob = tuple(x.shape[1:]), plan.base_log_prob(latents, embedded)
        held = held_out(x)
        moments.add(*picked(~held, flatten(latents), weights))
        others.add(*picked(held, flatten(latents), weights))
        # Apart: latents far from the base have log-densities beside which a log-det would be lost to rounding.
        losses.add(*picked(held, torch.stack([log_prob.double(), volume], 1), weights))
    for collected in (moments, others, losses):  # so that every process decides the same
        collected.reduce()
    if others.count < 2:
        raise InputError(f"calibrate needs at least {2 * HELD_OUT} data points, got {moments.count + others.count:.0f}")
    base = gaussian_of(plan.base, latents, "calibrate")
    tensors, rho, fitted = fit_affine(moments, others, base, kind)
    log_prob, log_det = losses.mean.tolist()
    constant = plan.log_z(event_shape, like.double()).item() - log_det
    before, after = constant - log_prob, constant + fitted
    if fitted > -log_prob:
        return {}, CalibrationReport(before, before, 1.0, "none")
    moments.merge(others)  # the shrinkage is chosen: refit to all data
    tensors, rho, _ = fit_affine(moments, others, base, kind, rho)
    with torch.inference_mode(False):  # they outlive the call
        tensors = {name: tensor.to(like, copy=True) for name, tensor in tensors.items()}
    return tensors, CalibrationReport(before, after, rho, kind)
