"""The nonlinear classes of normflows, and those that cannot be part of an energy.

Each step describes the module's own ``forward``; the walk knows that the density direction is ``inverse``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import log
from typing import Any

import torch
from torch import Tensor, nn

from ebflow_normflows.linear import halves, joined
from ebflow_plugin.adapting import (
    DEPENDS_ON_CONTEXT,
    VOLUME_PRESERVING,
    ConditionedStep,
    ElementwiseMap,
    NonlinearStep,
    OpaqueStep,
    PackedSplineStep,
    RefusedStep,
    SigmoidStep,
    Smoothness,
    comes_from,
    is_a,
    logit_map,
    smoothness_of,
    takes_context,
)
from ebflow_plugin.errors import InputError, UnsupportedStepError

PACKAGES = ("normflows", "ebflow_normflows")
ONE_WAY = (
    "has no inverse, which is its density direction; put it into normflows.flows.Reverse, where it has a density but "
    "cannot be sampled"
)


def ours(cls: type) -> bool:
    """Whether a class comes from normflows, or from here."""
    return comes_from(cls, PACKAGES)


class NormflowsStep(NonlinearStep):
    """A flow that is called as in normflows: ``flow(z)`` and ``flow.inverse(z)``, on lists for pairs.

    Attributes:
        conditional: Whether the model passes its context to its flows. Only a ConditionalNormalizingFlow does. It
            raises if a flow's methods do not take a context; here those are called without one.
    """

    conditional = True

    def __init__(self, module: Any, path: str, inverted: bool = False) -> None:
        super().__init__(module, path, inverted)
        self._takes_context = {name: takes_context(getattr(module, name, None)) for name in ("forward", "inverse")}
        self._one_way = inverted and not has_inverse(module)

    def refusal(self) -> str | None:
        return ONE_WAY if self._one_way else super().refusal()

    def call_forward(self, x: Any, context: Tensor | None) -> tuple[Any, Any]:
        return self._call(self.module, "forward", x, context)

    def call_inverse(self, y: Any, context: Tensor | None) -> tuple[Any, Any]:
        return self._call(self.module.inverse, "inverse", y, context)

    def _call(self, flow: Callable[..., Any], name: str, x: Any, context: Tensor | None) -> tuple[Any, Any]:
        given = self.conditional and context is not None and self._takes_context[name]
        value, log_det = flow(list(x) if isinstance(x, tuple) else x, **({"context": context} if given else {}))
        return (tuple(value) if isinstance(value, list) else value), log_det


class UnknownStep(OpaqueStep, NormflowsStep):
    """A flow of unknown class."""

    def __init__(self, module: Any, path: str, inverted: bool = False) -> None:
        if is_a(module, ("AffineCoupling", "Merge"), PACKAGES):
            self.n_in = 2
        if is_a(module, ("AffineCoupling", "Split"), PACKAGES) and not is_a(module, ("Merge",), PACKAGES):
            self.n_out = 2
        super().__init__(module, path, inverted)


class UnknownLevelStep(UnknownStep):
    """A merge of a MultiscaleFlow that is no plain Merge. Its forward takes the finished latents second."""

    def __init__(self, module: Any, path: str, inverted: bool = False) -> None:
        self.n_in = 2
        super().__init__(module, path, inverted)

    def call_forward(self, x: tuple[Tensor, Tensor], context: Tensor | None) -> tuple[Any, Any]:
        return super().call_forward(x[::-1], context)

    def call_inverse(self, y: Tensor, context: Tensor | None) -> tuple[Any, Any]:
        value, log_det = super().call_inverse(y, context)
        return value[::-1], log_det


class NetworkStep(ConditionedStep, NormflowsStep):
    """A coupling or autoregressive flow with an affine map of each feature."""

    @property
    def smoothness(self) -> Smoothness:
        # min(exp(x), 1), an output function of nets.MLP, whose kink is visible only in its code
        if any(type(part).__name__ == "ClampExp" and ours(type(part)) for part in self.module.modules()):
            return Smoothness.KINKED
        return super().smoothness


class MaskedAffineStep(NetworkStep):
    """MaskedAffineFlow; without ``s`` it only shifts."""

    def __init__(self, module: Any, path: str, inverted: bool = False) -> None:
        super().__init__(module, path, inverted)
        if not isinstance(module.s, nn.Module):
            self.reason = VOLUME_PRESERVING


class CouplingStep(NetworkStep):
    """AffineCoupling, on a pair: the second half is transformed, conditioned on the first."""

    n_in = 2
    n_out = 2

    def __init__(self, module: Any, path: str, inverted: bool = False) -> None:
        super().__init__(module, path, inverted)
        if not module.scale:
            self.reason = VOLUME_PRESERVING


@cache
def whole_coupling(mode: str) -> type[CouplingStep]:
    """The step of an AffineCoupling together with the split before and the merge after it, of the same mode.

    They are one step, and one row of the report, since split and merge only reorder features.
    """

    class WholeCouplingStep(CouplingStep):
        n_in = 1
        n_out = 1

        def _call(self, flow: Callable[..., Any], name: str, x: Any, context: Tensor | None) -> tuple[Any, Any]:
            (first, second), log_det = super()._call(flow, name, halves(x, mode), context)
            return joined(first, second, mode), log_det

    return WholeCouplingStep


class RationalSplineStep(PackedSplineStep, NormflowsStep):
    """A rational-quadratic spline."""

    def accepted(self, context: Tensor | None) -> Tensor | None:
        return context if self.conditional else None


class PeriodicStep(NormflowsStep):
    """PeriodicWrap and PeriodicShift: piecewise translations, so the density jumps where the pieces meet."""

    reason = "wraps around: Jacobian 1 almost everywhere, but not affine in x"

    smoothness = Smoothness.JUMPS


class PlanarStep(NormflowsStep):
    """Planar, which has an inverse only with a leaky ReLU."""

    def refusal(self) -> str | None:
        return ONE_WAY if self.inverted and self.module.act != "leaky_relu" else super().refusal()

    @property
    def smoothness(self) -> Smoothness:
        return Smoothness.JUMPS if self.module.act == "leaky_relu" else Smoothness.SMOOTH


class RadialStep(NormflowsStep):
    """Radial. Its score jumps at one point, its centre, which biases integration by parts only in one dimension."""

    @property
    def smoothness(self) -> Smoothness:
        return Smoothness.KINKED if self.module.z_0.numel() == 1 else Smoothness.SMOOTH


class LogitStep(SigmoidStep):
    """transforms.Logit: the inverse is logit(α + (1 - 2α) x), elementwise."""

    def forward_map(self, x: Tensor, context: Tensor | None) -> ElementwiseMap:
        alpha, beta = self.module.alpha, 1 - 2 * self.module.alpha
        curve = super().forward_map(x, context)
        return curve.between((curve.value - alpha) / beta, 1.0, 1.0 / beta, -log(beta))

    def inverse_map(self, y: Tensor, context: Tensor | None) -> ElementwiseMap:
        alpha, beta = self.module.alpha, 1 - 2 * self.module.alpha
        at = logit_map(alpha + beta * y)
        return at.between(at.value, beta, 1.0, log(beta))


class ClassAffineStep(NormflowsStep):
    """CCAffineConst: a scale and shift for each class. No model of normflows passes it the classes that it needs."""

    reason = DEPENDS_ON_CONTEXT

    def call_forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.module(x, self._one_hot(x, context))

    def call_inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.module.inverse(y, self._one_hot(y, context))

    def _one_hot(self, x: Tensor, context: Tensor | None) -> Tensor:
        if context is None:
            raise InputError(f"{self.where} needs the classes of the samples: pass them as context")
        if context.dim() > 1:
            return context.to(x.dtype)
        classes: int = self.module.s_cc.shape[0]
        return x.new_zeros(len(context), classes).scatter_(1, context.long()[:, None], 1.0)


class ResidualStep(NormflowsStep):
    """Residual: its log-det is exact in two dimensions and with exact traces, otherwise a random estimate."""

    reason = "residual block, log-det depends on x"

    def __init__(self, module: Any, path: str, inverted: bool = False) -> None:
        super().__init__(module, path, inverted)
        self._planar = _acts_on_plane(module.iresblock.nnet)
        if self._planar is not True and module.iresblock.exact_trace:
            self.reason = "residual block, log-det a series of exact traces (random after its 20th term in eval mode)"

    @property
    def smoothness(self) -> Smoothness:
        return smoothness_of(self.module)

    def refusal(self) -> str | None:
        return self._estimated(self._planar) or super().refusal()

    def _estimated(self, planar: bool | None) -> str | None:
        """Returns why the log-det is an estimate, or None if it is exact, or may be exact for an unknown dimension."""
        block = self.module.iresblock
        if (block.brute_force or not block.training) and planar is not False:
            return None
        if block.exact_trace and (not block.training or block.n_power_series is not None):
            return None
        if block.exact_trace:
            return "its log-det is a series of random length in training mode; put it in eval(), or set n_power_series"
        if planar is not False:
            return "its log-det is a random estimate in training mode; put it in eval(), or give it brute_force=True"
        if block.training:
            return (
                "its log-det is a random estimate in training mode; build it with exact_trace=True and n_power_series, "
                "or with exact_trace=True and put it in eval()"
            )
        return (
            "its log-det is a random estimate that carries no graph in eval mode, so that the score and all gradients "
            "would miss it; build it with exact_trace=True"
        )

    def encode(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None]:
        why = self._estimated(x.dim() == 2 and x.shape[1] == 2)
        if why is not None:
            raise UnsupportedStepError(f"{self.where}: {why}")
        if torch.is_inference_mode_enabled():  # its log-det needs derivatives
            with torch.inference_mode(False), torch.no_grad():
                return super().encode(x.clone(), context)
        return super().encode(x.view_as(x), context)  # a view, since normflows calls requires_grad_() on its input

    def decode(self, z: Tensor, context: Tensor | None) -> Tensor:
        net = self.module.iresblock.nnet
        if self.module.reverse != self.inverted:
            return z + net(z)
        return self._fixed_point(net, z)

    def _fixed_point(self, net: nn.Module, y: Tensor) -> Tensor:
        """Solves x + net(x) = y to the precision of y. normflows stops when a step is below 3e-3."""
        x: Tensor = y
        change = torch.full_like(y, float("inf"))
        tolerance = 100 * torch.finfo(y.dtype).eps * (1 + y.abs())
        for _ in range(1000):
            x, previous = y - net(x), x
            change = (x - previous).abs()
            if torch.all(change <= tolerance):
                return x
        if torch.all(change <= 1e-3 * (1 + y.abs())):
            return x
        raise UnsupportedStepError(
            f"{self.where}: x + net(x) = y was not solved in 1000 iterations: the Lipschitz constant of the network is "
            "not below 1. Call normflows.utils.update_lipschitz(flow, 50) after each change of its weights."
        )


class BatchNormStep(RefusedStep):
    """BatchNorm, which uses the statistics of the current batch even in eval mode."""

    reason = "couples the samples of a batch, in eval mode too; use ActNorm, or AffineConstFlow with the statistics"


class StochasticStep(RefusedStep):
    """MetropolisHastings and HamiltonianMonteCarlo."""

    reason = "stochastic, has no density of its own; remove it, and move the samples of the wrapped model instead"


def has_inverse(module: object) -> bool:
    """Whether a flow defines ``inverse``; that of the base class Flow raises."""
    if "inverse" in vars(module):
        return True
    owner = next((parent for parent in type(module).__mro__ if "inverse" in vars(parent)), None)
    return owner is not None and not (owner.__name__ == "Flow" and ours(owner))


def _acts_on_plane(net: nn.Module) -> bool | None:
    """Whether a network takes vectors of two entries, by its first layer; None if that does not show it."""
    for layer in net.modules():
        if hasattr(layer, "in_channels"):
            return False
        if isinstance(features := getattr(layer, "in_features", None), int):
            return features == 2
    return None
