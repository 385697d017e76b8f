"""The splines of nflows, and their copies in normflows: the modules' own networks and parameters, our arithmetic.

Only classes of these two packages are computed here, and only as they are: a fork, a transform of the identity features
that is no plain spline, unknown tails, or x outside of the domain are left to the module's own code.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import expm1, log, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ebflow_plugin.adapting.adapter import comes_from
from ebflow_plugin.linalg.memo import free_to_read
from ebflow_plugin.plan.registry import altered_part
from ebflow_plugin.plan.smooth_modules import Smoothness
from ebflow_plugin.plan.splines import cubic, knots, linear, quadratic, rational_quadratic, shares, within
from ebflow_plugin.plan.step import NonlinearStep
from ebflow_plugin.plan.values import summed

PACKAGES = ("nflows", "normflows")
CURVES = ("RationalQuadratic", "Quadratic", "Cubic", "Linear")  # in the order in which they are looked for
OWN = {  # the parameters of a spline that is the same for all x
    "RationalQuadratic": ("unnormalized_widths", "unnormalized_heights", "unnormalized_derivatives"),
    "Quadratic": ("unnormalized_widths", "unnormalized_heights"),
    "Cubic": ("unnormalized_widths", "unnormalized_heights", "unnorm_derivatives_left", "unnorm_derivatives_right"),
    "Linear": ("unnormalized_pdf",),
}


class PackedSplineStep(NonlinearStep):
    """A piecewise transform: of each entry, of half of the features (coupling), or autoregressive.

    The score of a rational-quadratic one jumps at every knot.
    """

    reason = "spline"

    smoothness = Smoothness.KINKED

    def __init__(self, module: Any, path: str, inverted: bool = False) -> None:
        super().__init__(module, path, inverted)
        owners = [
            parent for parent in type(module).__mro__ if comes_from(parent, PACKAGES) and "Piecewise" in parent.__name__
        ]
        name = owners[0].__name__ if owners else ""
        self._curve = next((curve for curve in CURVES if curve in name), "")
        self._form = next((form for form in ("CDF", "Coupling", "Autoregressive") if form in name), "")
        self._identity: PackedSplineStep | None = None  # of the features that a coupling does not condition on others
        self._circular = torch.empty(0)
        other = getattr(module, "unconditional_transform", None)
        if other is not None:
            plain = comes_from(type(other), PACKAGES) and type(other).__name__ == f"Piecewise{self._curve}CDF"
            if plain and altered_part(other) is None:
                self._identity = type(self)(other, f"{path}.unconditional_transform")
            else:
                self._form = ""

    def accepted(self, context: Tensor | None) -> Tensor | None:
        """The context for the network."""
        return context

    def call_forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Any]:
        if not self._computed(x):
            return super().call_forward(x, context)  # type: ignore[safe-super]
        return self._map(x, self.accepted(context), False)

    def call_inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Any]:
        if not self._computed(y):
            return super().call_inverse(y, context)  # type: ignore[safe-super]
        return self._map(y, self.accepted(context), True)

    def _computed(self, x: Tensor) -> bool:
        """Whether the map is computed here. Values are read on the CPU alone; elsewhere, bad ones become NaN."""
        tails = getattr(self.module, "tails", None)
        if not self._form or (self._form == "Coupling" and x.dim() not in (2, 4)):
            return False
        if isinstance(tails, (list, tuple)) or tails == "circular":
            return self._curve == "RationalQuadratic"
        if tails is None and free_to_read(x):
            return not bool(((x < 0) | (x > 1)).any())
        return tails in (None, "linear")

    def _map(self, x: Tensor, context: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        """The value, and the log-det of each sample."""
        if self._form == "CDF":
            value, log_slope = self._spline(x, [getattr(self.module, name) for name in OWN[self._curve]], inverse)
        elif self._form == "Coupling":
            return self._coupling(x, context, inverse)
        else:
            net, value = self.module.autoregressive_net, torch.zeros_like(x) if inverse else x
            for _ in range(x.shape[1] if inverse else 1):
                parameters = net(value, context).unflatten(1, (x.shape[1], -1))
                found, log_slope = self._spline(x, self._unpacked(parameters, net), inverse)
                value = found if inverse else value
            value = found
        return value, summed(log_slope)

    def _coupling(self, x: Tensor, context: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        module = self.module
        fixed, changed = (x.index_select(1, of) for of in (module.identity_features, module.transform_features))
        given, log_det = fixed, x.new_zeros(x.shape[0])
        if self._identity is not None:
            fixed, log_det = self._identity._map(fixed, context, inverse)
            given = fixed if inverse else given
            x = x.index_copy(1, module.identity_features, fixed)
        parameters = module.transform_net(given, context).unflatten(1, (changed.shape[1], -1)).movedim(2, -1)
        changed, log_slope = self._spline(changed, self._unpacked(parameters, module.transform_net), inverse)
        return x.index_copy(1, module.transform_features, changed), log_det + summed(log_slope)

    def _unpacked(self, parameters: Tensor, net: Any) -> Sequence[Tensor]:
        """The output of a network in parts, those of a softmax divided as in the libraries."""
        if self._curve == "Linear":
            return (parameters,)
        bins: int = self.module.num_bins
        rest = parameters.shape[-1] - 2 * bins
        sizes = {"Cubic": (bins, bins, 1, 1), "Quadratic": (bins, rest + bins)}.get(self._curve, (bins, bins, rest))
        widths, heights, *others = parameters.split(sizes, -1)
        hidden = getattr(net, "hidden_features", None)
        if hidden is None and self._form == "Coupling" and self._curve == "RationalQuadratic":
            hidden = getattr(net, "hidden_channels", None)
        if hidden is not None:
            scale = 1.0 / sqrt(hidden)
            widths = widths * scale
            if not (self._curve == "Quadratic" and self._form == "Autoregressive"):  # as in nflows
                heights = heights * scale
        return (widths, heights, *others)

    def _spline(self, x: Tensor, parameters: Sequence[Tensor], inverse: bool) -> tuple[Tensor, Tensor]:
        """The spline of each entry, and the log of its slope."""
        module = self.module
        tails, bound = getattr(module, "tails", None), getattr(module, "tail_bound", None)
        if self._curve == "RationalQuadratic":
            return self._rational(x, parameters, inverse)
        bound = None if tails is None else bound
        if self._curve == "Linear":
            heights = shares(parameters[0])
            return within(x, lambda point: linear(point, heights, inverse), bound)
        narrow, low = (
            (1e-3, 1e-3)
            if self._form == "Autoregressive" and self._curve == "Cubic"
            else (
                module.min_bin_width,
                module.min_bin_height,
            )
        )
        widths = shares(parameters[0], narrow)
        if self._curve == "Quadratic":
            return within(x, lambda point: quadratic(point, widths, parameters[1], low, inverse), bound)
        heights = shares(parameters[1], low)
        return within(x, lambda point: cubic(point, widths, heights, parameters[2], parameters[3], inverse), bound)

    def _rational(self, x: Tensor, parameters: Sequence[Tensor], inverse: bool) -> tuple[Tensor, Tensor]:
        widths, heights, derivatives = parameters
        module = self.module
        tails, least = module.tails, module.min_derivative
        xs, ys = knots(shares(widths, module.min_bin_width)), knots(shares(heights, module.min_bin_height))
        if tails is not None:
            bound = module.tail_bound
            bound = bound.unsqueeze(-1) if isinstance(bound, Tensor) else bound
            xs, ys = 2.0 * bound * xs - bound, 2.0 * bound * ys - bound
            derivatives = self._with_ends(derivatives, tails, log(expm1(1.0 - least)))
        value, log_slope = rational_quadratic(x, xs, ys, least + F.softplus(derivatives), inverse)
        if tails is None or isinstance(tails, (list, tuple)):  # normflows maps to 0 there, for a list of tails
            inside = (x >= xs[..., 0]) & (x <= xs[..., -1])
            value = torch.where(inside, value, torch.full_like(x, torch.nan) if tails is None else torch.zeros_like(x))
        return value, log_slope

    def _with_ends(self, derivatives: Tensor, tails: Any, one: float) -> Tensor:
        """The parameters of the slopes at all knots: 1 at both ends for linear tails, equal ones for circular tails."""
        if tails == "linear":
            return F.pad(derivatives, (1, 1), value=one)
        if tails == "circular":
            return torch.cat([derivatives, derivatives[..., :1]], -1)
        if self._circular.device != derivatives.device or len(self._circular) != len(tails):
            self._circular = torch.tensor([[kind == "circular"] for kind in tails], device=derivatives.device)
        end = torch.where(self._circular, derivatives[..., :1], torch.full_like(derivatives[..., :1], one))
        return torch.cat([end, derivatives[..., 1:-1], end], -1)
