"""The parts of the built-in models as nflows Transforms."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from nflows import distributions, flows, transforms
from nflows.nn import nets
from torch import Tensor, nn

import ebflow_plugin as ebf
from ebflow_examples.kits import Conditioner, ImageNetwork, Shape, Split, no_layer
from ebflow_examples.triangular import Triangular
from ebflow_nflows import FullConv2d, FullLinear, SinhArcsinh, SmoothLeakyReLU
from ebflow_nflows.steps import NetworkStep
from ebflow_plugin.adapting import Child, register_networks

__all__ = ["NflowsKit", "TriangularLinear"]

if TYPE_CHECKING:
    Transform = nn.Module
    AffineCouplingTransform = nn.Module
else:
    from nflows.transforms import AffineCouplingTransform, Transform


class TriangularLinear(Triangular, Transform):
    """A triangular linear layer as an nflows Transform."""

    def forward(self, inputs: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Moves towards noise."""
        return self.transform(inputs), self.log_det().expand(len(inputs))

    def inverse(self, inputs: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Moves towards data."""
        return self.invert(inputs), -self.log_det().expand(len(inputs))


# All that ebf.wrap() needs to know about a class of one's own: it is affine in x, and what it does without its log-det.
ebf.register_linear(
    TriangularLinear,
    apply=TriangularLinear.transform,
    invert=TriangularLinear.invert,
    log_det=lambda layer, shape: layer.log_det(),
    cost="O(D)",
)


class ImageCoupling(AffineCouplingTransform):
    """An affine coupling of images with log-scales as its network bounds them; nflows' own can shrink alone."""

    def _scale_and_shift(self, transform_params: Tensor) -> tuple[Tensor, Tensor]:
        shift, log_scale = transform_params.chunk(2, dim=1)
        return log_scale.exp(), shift


# It acts as its parent does, and is as smooth as the network that it holds.
register_networks(("ebflow_examples",), "ImageCoupling")
ebf.register_container(ImageCoupling, lambda coupling: [Child("", coupling, step=NetworkStep)])


class NflowsKit:
    """The parts as nflows has them, and ours."""

    def linear(self, features: int, kind: str, init: str) -> nn.Module:
        """A linear layer on vectors; ``init`` is that of a full one, and its sign that of a triangular one."""
        if kind == "full":
            return FullLinear(features, init=init)
        if kind in ("lower", "upper"):
            return TriangularLinear(features, kind == "upper", -1.0 if init == "negative_identity" else 1.0)
        if kind == "lu":
            return transforms.LULinear(features)
        reflections = features + features % 2  # as many as any rotation needs, and even, as nflows wants it
        return (transforms.QRLinear if kind == "qr" else transforms.SVDLinear)(features, reflections)

    def convolution(
        self, channels: int, kernel: int, kind: str, init: str, groups: int = 1, circular: bool = False
    ) -> nn.Module:
        if kind == "full":
            mode = "circular" if circular else "zeros"
            return FullConv2d(channels, kernel_size=kernel, groups=groups, padding_mode=mode, init=init)
        if kind == "lu":
            return transforms.OneByOneConvolution(channels)
        raise no_layer("nflows", kind, "images", ("full", "lu"))

    def leaky(self, alpha: float, residual: bool = False) -> nn.Module:
        return SmoothLeakyReLU(alpha, residual)

    def sinh_arcsinh(self, features: int) -> nn.Module:
        return SinhArcsinh(features)

    def channel_map(self, channels: int) -> nn.Module:
        return SinhArcsinh(channels, dim=-3)

    def act_norm(self, shape: Shape) -> nn.Module:
        return transforms.ActNorm(shape[0])

    def squeeze(self) -> nn.Module:
        return transforms.SqueezeTransform()

    def coupling(self, shape: Shape, flip: bool, net: Conditioner) -> nn.Module:
        mask = _mask(shape[0], flip)
        if len(shape) == 1:
            return transforms.AffineCouplingTransform(mask, lambda *sizes: net.start(nets.ResidualNet, *sizes))

        def network(inputs: int, outputs: int) -> nn.Module:
            return ImageNetwork(inputs, outputs, net, scales=slice(outputs // 2, None))

        return ImageCoupling(mask, network)

    def split_prior(self, shape: Shape, net: Conditioner) -> nn.Module:
        return self.coupling(shape, True, net)  # nflows finishes the first half

    def spline(self, features: int, flip: bool, net: Conditioner, bins: int, bound: float) -> nn.Module:
        return transforms.PiecewiseRationalQuadraticCouplingTransform(
            _mask(features, flip),
            lambda *sizes: net.make(nets.ResidualNet, *sizes),
            num_bins=bins,
            tails="linear",
            tail_bound=bound,
        )

    def autoregressive(self, features: int, net: Conditioner) -> nn.Module:
        return transforms.MaskedAffineAutoregressiveTransform(
            features, max(net.hidden, features), num_blocks=net.blocks, activation=net.function
        )

    def flow(self, layers: Sequence[nn.Module], latent: Shape) -> nn.Module:
        levels = list(Split.levels(layers, latent))
        if len(levels) == 1:
            return flows.Flow(transforms.CompositeTransform(layers), distributions.StandardNormal(latent))
        transform = transforms.MultiscaleCompositeTransform(len(levels))
        for level, shape in levels:
            transform.add_transform(transforms.CompositeTransform(level), shape)
        size = sum(prod(shape) for shape in transform._output_shapes)
        return flows.Flow(transform, distributions.StandardNormal([size]))


def _mask(features: int, flip: bool) -> Tensor:
    """1 for the features that are changed: the second half, or the first."""
    changed = torch.arange(features) >= (features + 1) // 2
    return (~changed if flip else changed).int()
