"""The parts of the built-in models as normflows Flows.

normflows lists its flows from noise to data, and ``inverse`` is the density direction.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import normflows as nf
from torch import Tensor, nn

import ebflow_plugin as ebf
from ebflow_examples.kits import Conditioner, ImageNetwork, Shape, Split, no_layer
from ebflow_examples.triangular import Triangular
from ebflow_normflows import FullConv2d, FullLinear, SinhArcsinh, SmoothLeakyReLU

__all__ = ["NormflowsKit", "TriangularFlow"]

if TYPE_CHECKING:
    Flow = nn.Module
else:
    from normflows.flows import Flow


class TriangularFlow(Triangular, Flow):
    """A triangular linear layer as a normflows Flow."""

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Moves towards data."""
        return self.invert(z), -self.log_det().expand(len(z))

    def inverse(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Moves towards noise."""
        return self.transform(z), self.log_det().expand(len(z))


# The functions are those of its own forward, which is the direction of sampling.
ebf.register_linear(
    TriangularFlow,
    apply=TriangularFlow.invert,
    invert=TriangularFlow.transform,
    log_det=lambda layer, shape: -layer.log_det(),
    cost="O(D)",
)


class NormflowsKit:
    """The parts as normflows has them, and ours."""

    def linear(self, features: int, kind: str, init: str) -> nn.Module:
        """A linear layer on vectors; ``init`` is that of a full one, and its sign that of a triangular one."""
        if kind == "full":
            return FullLinear(features, init=init)
        if kind in ("lower", "upper"):
            return TriangularFlow(features, kind == "upper", -1.0 if init == "negative_identity" else 1.0)
        if kind == "lu":
            return nf.flows.LULinearPermute(features)
        raise no_layer("normflows", kind, "vectors", ("full", "lu", "lower", "upper"))

    def convolution(
        self, channels: int, kernel: int, kind: str, init: str, groups: int = 1, circular: bool = False
    ) -> nn.Module:
        if kind == "full":
            mode = "circular" if circular else "zeros"
            return FullConv2d(channels, kernel_size=kernel, groups=groups, padding_mode=mode, init=init)
        if kind == "lu":
            with warnings.catch_warnings():  # it begins with a function that torch has deprecated
                warnings.filterwarnings("ignore", message=".*torch.lu is deprecated")
                return nf.flows.Invertible1x1Conv(channels, use_lu=True)
        raise no_layer("normflows", kind, "images", ("full", "lu"))

    def leaky(self, alpha: float, residual: bool = False) -> nn.Module:
        return SmoothLeakyReLU(alpha, residual)

    def sinh_arcsinh(self, features: int) -> nn.Module:
        return SinhArcsinh(features)

    def channel_map(self, channels: int) -> nn.Module:
        return SinhArcsinh(channels, dim=-3)

    def act_norm(self, shape: Shape) -> nn.Module:
        return nf.flows.ActNorm((shape[0], *[1] * (len(shape) - 1)))

    def squeeze(self) -> nn.Module:
        return nf.flows.Squeeze()

    def coupling(self, shape: Shape, flip: bool, net: Conditioner) -> nn.Module:
        changed = (shape[0] + 1) // 2 if flip else shape[0] // 2
        sizes = shape[0] - changed, 2 * changed
        mode = "channel_inv" if flip else "channel"
        if len(shape) == 1:
            conditioner = net.start(nf.nets.ResidualNet, *sizes)
            return nf.flows.AffineCouplingBlock(conditioner, scale_map="sigmoid", split_mode=mode)
        conditioner = ImageNetwork(*sizes, net, scales=slice(1, None, 2))
        return nf.flows.AffineCouplingBlock(conditioner, scale_map="exp", split_mode=mode)

    def split_prior(self, shape: Shape, net: Conditioner) -> nn.Module:
        return self.coupling(shape, False, net)  # a MultiscaleFlow finishes the second half

    def spline(self, features: int, flip: bool, net: Conditioner, bins: int, bound: float) -> nn.Module:
        """A coupling by splines with linear tails; normflows alternates the features, and moves all of them."""
        return nf.flows.CoupledRationalQuadraticSpline(
            features, net.blocks, net.hidden, num_bins=bins, tail_bound=bound, activation=net.module, reverse_mask=flip
        )

    def autoregressive(self, features: int, net: Conditioner) -> nn.Module:
        """A masked affine autoregressive flow, turned round: normflows has the density direction take D passes."""
        inner = nf.flows.MaskedAffineAutoregressive(
            features, max(net.hidden, features), num_blocks=net.blocks, activation=net.function
        )
        return nf.flows.Reverse(inner)

    def flow(self, layers: Sequence[nn.Module], latent: Shape) -> nn.Module:
        def base(shape: Shape) -> nn.Module:
            return nf.distributions.DiagGaussian(shape, trainable=False)

        levels = list(Split.levels(layers, latent))[::-1]
        if len(levels) == 1:
            return nf.NormalizingFlow(base(latent), list(layers)[::-1])
        finished = [base(latent), *(base(Split(shape).halved) for _, shape in levels[1:])]
        merges = [nf.flows.Merge("channel") for _ in levels[1:]]
        return nf.MultiscaleFlow(finished, [level[::-1] for level, _ in levels], merges, class_cond=False)
