"""The parts of the built-in models as zuko LazyTransforms. zuko is made for vectors: it has none for images."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributions import Transform, constraints
from zuko.distributions import DiagNormal
from zuko.flows import GeneralCouplingTransform, MaskedAutoregressiveTransform
from zuko.lazy import Flow, LazyComposedTransform, UnconditionalDistribution, UnconditionalTransform
from zuko.transforms import AdditiveTransform, LULinearTransform, MonotonicAffineTransform, MonotonicRQSTransform

import ebflow_plugin as ebf
from ebflow_examples.kits import Conditioner, Shape, no_layer
from ebflow_examples.triangular import Triangular
from ebflow_plugin.errors import InputError
from ebflow_zuko import FullConv2d, FullLinear, SinhArcsinh, SmoothLeakyReLU

__all__ = ["TriangularLinear", "ZukoKit"]

if TYPE_CHECKING:
    LazyTransform = nn.Module
else:
    from zuko.lazy import LazyTransform


class TriangularMap(Transform):
    """The map of a triangular layer."""

    domain = codomain = constraints.real_vector
    bijective = True

    def __init__(self, layer: Triangular) -> None:
        super().__init__()
        self.layer = layer

    def _call(self, x: Tensor) -> Tensor:
        return self.layer.transform(x)

    def _inverse(self, y: Tensor) -> Tensor:
        return self.layer.invert(y)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns log |det|, for each vector."""
        return self.layer.log_det().expand(x.shape[:-1])


class TriangularLinear(Triangular, LazyTransform):
    """A triangular linear layer as a zuko LazyTransform."""

    def forward(self, c: Tensor | None = None) -> Transform:
        """The map, from data to noise."""
        return TriangularMap(self)


ebf.register_linear(
    TriangularLinear,
    apply=TriangularLinear.transform,
    invert=TriangularLinear.invert,
    log_det=lambda layer, shape: layer.log_det(),
    cost="O(D)",
)


class ZukoKit:
    """The parts as zuko has them, and ours."""

    def linear(self, features: int, kind: str, init: str) -> nn.Module:
        """A linear layer on vectors; ``init`` is that of a full one, and its sign that of the others."""
        sign = -1.0 if init == "negative_identity" else 1.0
        if kind == "full":
            return FullLinear(features, init=init)
        if kind in ("lower", "upper"):
            return TriangularLinear(features, kind == "upper", sign)
        if kind == "lu":
            matrix = UnconditionalTransform(LULinearTransform, LU=sign * torch.eye(features))
            shift = UnconditionalTransform(AdditiveTransform, shift=torch.zeros(features))
            return _module(LazyComposedTransform(matrix, shift))
        raise no_layer("zuko", kind, "vectors", ("full", "lu", "lower", "upper"))

    def convolution(
        self, channels: int, kernel: int, kind: str, init: str, groups: int = 1, circular: bool = False
    ) -> nn.Module:
        if kind == "full":
            mode = "circular" if circular else "zeros"
            return FullConv2d(channels, kernel_size=kernel, groups=groups, padding_mode=mode, init=init)
        raise no_layer("zuko", kind, "images", ("full",))

    def leaky(self, alpha: float, residual: bool = False) -> nn.Module:
        return SmoothLeakyReLU(alpha, residual)

    def sinh_arcsinh(self, features: int) -> nn.Module:
        return SinhArcsinh(features)

    def channel_map(self, channels: int) -> nn.Module:
        return SinhArcsinh(channels, dim=-3)

    def act_norm(self, shape: Shape) -> nn.Module:
        """An affine map for each feature. zuko has none that starts from data: this one starts as the identity."""
        size = (shape[0], *[1] * (len(shape) - 1))
        return _module(
            UnconditionalTransform(MonotonicAffineTransform, shift=torch.zeros(size), scale=torch.zeros(size))
        )

    def squeeze(self) -> nn.Module:
        raise InputError("zuko has no squeeze of images; choose --library nflows or normflows, or a model for vectors")

    def split_prior(self, shape: Shape, net: Conditioner) -> nn.Module:
        return self.coupling(shape, True, net)  # refused: it is of images

    def coupling(self, shape: Shape, flip: bool, net: Conditioner) -> nn.Module:
        if len(shape) != 1:
            raise InputError("zuko has no couplings of images; choose --library nflows or normflows")
        coupling = GeneralCouplingTransform(shape[0], mask=_mask(shape[0], flip), **_network(net))
        for parameter in coupling.hyper[-1].parameters():
            nn.init.zeros_(parameter)
        return _module(coupling)

    def spline(self, features: int, flip: bool, net: Conditioner, bins: int, bound: float) -> nn.Module:
        spline = partial(MonotonicRQSTransform, bound=bound)
        shapes = [(bins,), (bins,), (bins - 1,)]
        mask = _mask(features, flip)
        return _module(GeneralCouplingTransform(features, mask=mask, univariate=spline, shapes=shapes, **_network(net)))

    def autoregressive(self, features: int, net: Conditioner) -> nn.Module:
        return _module(MaskedAutoregressiveTransform(features, **_network(net, least=features)))

    def flow(self, layers: Sequence[nn.Module], latent: Shape) -> nn.Module:
        mean, std = torch.zeros(latent), torch.ones(latent)
        return _module(Flow(layers, UnconditionalDistribution(DiagNormal, mean, std, ndims=len(latent), buffer=True)))


def _module(made: Any) -> nn.Module:
    """What zuko gives has no types."""
    assert isinstance(made, nn.Module)
    return made


def _network(net: Conditioner, least: int = 1) -> dict[str, Any]:
    return {"hidden_features": [max(net.hidden, least)] * (net.blocks + 1), "activation": net.module}


def _mask(features: int, flip: bool) -> Tensor:
    """True for the features that stay as they are: the first half, or the second."""
    constant = torch.arange(features) < (features + 1) // 2
    return ~constant if flip else constant
