"""The nonlinear classes of zuko: their maps and smoothness.

Conditioned transforms are as smooth as their univariate transform, and as the network that computes its parameters from
other features. A network of the context alone does not affect the smoothness.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ebflow_plugin.adapting import (
    DEPENDS_ON_CONTEXT,
    VOLUME_PRESERVING,
    BoundedStep,
    ElementwiseMap,
    ElementwiseStep,
    NonlinearStep,
    OpaqueStep,
    RefusedStep,
    SigmoidStep,
    Smoothness,
    clamped_logit_map,
    registered_smoothness,
    smoothness_of,
    worst_of,
)
from ebflow_zuko.linear import LazyPart, accepted_context, built_name
from ebflow_zuko.transforms import ISOMETRIES, forward, inverse, inverse_and_log_det, known_name, unwrapped

Call = Callable[[Any, Tensor], tuple[Tensor, Any]]

# The univariate transforms, and how smooth each is.
SMOOTHNESS = {
    **dict.fromkeys(("AdditiveTransform", "AffineTransform", "IdentityTransform"), Smoothness.SMOOTH),
    **dict.fromkeys(("BernsteinTransform", "BoundedBernsteinTransform", "CosTransform"), Smoothness.SMOOTH),
    **dict.fromkeys(("CumulativeDistributionTransform", "GaussianizationTransform"), Smoothness.SMOOTH),
    **dict.fromkeys(("MonotonicAffineTransform", "SOSPolynomialTransform", "ShiftedSOSPTransform"), Smoothness.SMOOTH),
    **dict.fromkeys(("SinTransform", "SoftplusTransform", "TanhTransform"), Smoothness.SMOOTH),
    # As smooth as a network or a power that the class does not tell.
    **dict.fromkeys(("MonotonicTransform", "PowerTransform", "UMNN"), Smoothness.UNKNOWN),
    "UnconstrainedMonotonicTransform": Smoothness.UNKNOWN,
    # The log-det is a derivative of the map: a map with a discontinuous second derivative has a score that jumps.
    **dict.fromkeys(("MonotonicRQSTransform", "SoftclipTransform", "MNN"), Smoothness.KINKED),
    # A circle has no boundary, but the networks after it see where it is cut; a power has a pole or a zero at 0.
    **dict.fromkeys(("CircularShiftTransform", "CircularRQSTransform", "SignedPowerTransform"), Smoothness.JUMPS),
}
# Maps onto a bounded domain, whose inverses explode at its edges.
BOUNDED = ("CosTransform", "CumulativeDistributionTransform", "SinTransform", "SoftplusTransform", "TanhTransform")


def smoothness_of_factory(factory: Any) -> Smoothness:
    """The smoothness of the univariate transforms that a class, function or module builds."""
    name, cls = known_name(factory), unwrapped(factory)
    if isinstance(cls, type) and (registered := registered_smoothness(cls)) is not None:
        return registered
    if name == "UMNN":
        return smoothness_of(factory.integrand)
    return SMOOTHNESS.get(name or "", Smoothness.UNKNOWN)


class LazyStep(LazyPart, NonlinearStep):
    """A lazy module, which builds its transform once per call."""

    def run(self, x: Tensor, context: Tensor | None, function: Call) -> tuple[Tensor, Any]:
        """Applies a function of the transform and its input."""
        return function(self.build(context), x)

    def call_forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Any]:
        return self.run(x, context, forward)

    def call_inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Any]:
        return self.run(y, context, inverse_and_log_det)

    def encode(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if torch.is_inference_mode_enabled():  # monotonic networks compute their log-det by autograd
            with torch.inference_mode(False), torch.no_grad():
                return super().encode(x.clone(), None if context is None else context.clone())
        return super().encode(x, context)

    def decode(self, z: Tensor, context: Tensor | None) -> Tensor:
        return self.run(z, context, forward if self.inverted else lambda transform, y: (inverse(transform, y), None))[0]


class UnknownStep(OpaqueStep, LazyStep):
    """A lazy transform of unknown class."""


class UnivariateStep(LazyStep):
    """A univariate transform, whose parameters depend at most on the context."""

    def __init__(self, module: Any, path: str, inverted: bool = False) -> None:
        super().__init__(module, path, inverted)
        self.reason = f"{self.kind or 'transform of unknown class'}, elementwise"
        if self.kind in ("AffineTransform", "MonotonicAffineTransform"):
            self.reason = DEPENDS_ON_CONTEXT

    @property
    def kind(self) -> str | None:
        """The name of the transform."""
        if hasattr(self.module, "univariate"):
            return known_name(self.module.univariate)
        return built_name(self.module) or known_name(type(self.module))

    @property
    def smoothness(self) -> Smoothness:
        if hasattr(self.module, "univariate"):
            return smoothness_of_factory(self.module.univariate)
        return SMOOTHNESS.get(self.kind or "", Smoothness.UNKNOWN)

    @property
    def conditional(self) -> bool:
        return "hyper" in getattr(self.module, "_modules", ())

    @property
    def match_after(self) -> bool:
        return self.kind == "PowerTransform" or (self.inverted and self.kind in BOUNDED)

    def build(self, context: Tensor | None = None) -> Any:
        return super().build(accepted_context(self.module, context))


class AutoregressiveStep(LazyStep):
    """MaskedAutoregressiveTransform."""

    def __init__(self, module: Any, path: str, inverted: bool = False) -> None:
        super().__init__(module, path, inverted)
        name = known_name(module.univariate)
        self.reason = f"{name or 'transform of unknown class'}, conditioned on its input"
        if name in ISOMETRIES:
            self.reason = VOLUME_PRESERVING

    @property
    def smoothness(self) -> Smoothness:
        return worst_of([smoothness_of_factory(self.module.univariate), smoothness_of(self.module.hyper)])

    @property
    def conditional(self) -> bool:
        return bool(self.module.hyper.in_features > self.module.order.numel())


class CouplingStep(AutoregressiveStep):
    """GeneralCouplingTransform. zuko finds the halves of its mask on each call, which synchronises with the device."""

    def run(self, x: Tensor, context: Tensor | None, function: Call) -> tuple[Tensor, Any]:
        order = torch.argsort(self.module.mask.to(torch.uint8), descending=True, stable=True)  # constant features first
        constant, changed = x.index_select(-1, order).tensor_split([self._constant], dim=-1)
        value, log_det = function(self.module.meta(context, constant), changed)
        return torch.cat([constant, value], dim=-1).index_select(-1, torch.argsort(order)), log_det

    @property
    def _constant(self) -> int:
        """The number of constant features, from the output size of the network, without reading the mask."""
        return self.module.mask.numel() - self.module.hyper.out_features // self.module.total

    @property
    def conditional(self) -> bool:
        return bool(self.module.hyper.in_features > self._constant)


class SoftclipStep(LazyPart, BoundedStep):
    """y = x / (1 + |x| / B): the derivative of its log-det jumps at 0."""

    smoothness = Smoothness.KINKED

    def forward_map(self, x: Tensor, context: Tensor | None) -> ElementwiseMap:
        return self._curve(x, self.build().bound, 1.0)

    def inverse_map(self, y: Tensor, context: Tensor | None) -> ElementwiseMap:
        return self._curve(y, self.build().bound, -1.0)

    @staticmethod
    def _curve(x: Tensor, bound: float, sign: float) -> ElementwiseMap:
        """The curve x / (1 ± |x| / B)."""
        share = 1.0 / (1.0 + sign * torch.abs(x) / bound)

        def slopes() -> tuple[Tensor, Tensor, Tensor]:
            return share**2, -2.0 * sign / bound * torch.sign(x) * share, 2.0 * (share / bound) ** 2

        return ElementwiseMap(x * share, lambda: 2.0 * torch.log(share), slopes)


class LogisticStep(SigmoidStep, LazyPart):
    """torch's SigmoidTransform. Its inverse is a logit that clamps its input to (0, 1), as in torch."""

    def inverse_map(self, y: Tensor, context: Tensor | None) -> ElementwiseMap:
        info = torch.finfo(y.dtype)
        return clamped_logit_map(y, info.tiny, 1.0 - info.eps)


class ExpStep(LazyPart, ElementwiseStep):
    """torch's ExpTransform, and the logarithm that is its inverse."""

    match_after = True

    def forward_map(self, x: Tensor, context: Tensor | None) -> ElementwiseMap:
        y = torch.exp(x)
        return ElementwiseMap(y, lambda: x, lambda: (y, 1.0, 0.0))

    def invert(self, y: Tensor, context: Tensor | None) -> Tensor:
        return torch.log(y)


class IntegratedFlowStep(LazyPart, RefusedStep):
    """FFJTransform, of a CNF."""

    reason = (
        "a differential equation, solved to a tolerance with steps that depend on the whole batch, without second "
        "derivatives: its energy is not exact"
    )
