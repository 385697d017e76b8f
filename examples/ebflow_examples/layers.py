"""The layers that the built-in models are made of: those of nflows, ours, and a few that it does not have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from nflows import transforms
from nflows.nn import nets
from torch import Tensor, nn
from torch.nn import functional as F

import ebflow_plugin as ebf
from ebflow_nflows import FullConv2d, FullLinear
from ebflow_nflows.steps import NetworkStep
from ebflow_plugin.adapting import Child, register_networks
from ebflow_plugin.errors import InputError, UnknownNameError, suggest

LINEAR = ("full", "lu", "lower", "upper", "qr", "svd")
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "relu": nn.ReLU,
    "leaky_relu": partial(nn.LeakyReLU, 0.1),
}
Shape = tuple[int, ...]

if TYPE_CHECKING:
    Transform = nn.Module
    AffineCouplingTransform = nn.Module
else:
    from nflows.transforms import AffineCouplingTransform, Transform


@dataclass(frozen=True)
class Conditioner:
    """The network inside of a coupling or autoregressive layer.

    Attributes:
        hidden: Features, or channels, of its hidden layers.
        blocks: How many residual blocks it has; on images, how many 1 x 1 convolutions.
        activation: A name of :data:`ACTIVATIONS`. All but ``relu`` and ``leaky_relu`` are smooth, as SSM needs it.
    """

    hidden: int
    blocks: int
    activation: str

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise UnknownNameError(f"unknown activation {self.activation!r}. {suggest(self.activation, ACTIVATIONS)}")
        if self.hidden < 1 or self.blocks < 0:
            raise InputError(f"a network needs hidden >= 1 and depth >= 0, got {self.hidden} and {self.blocks}")

    def module(self) -> nn.Module:
        """The activation."""
        return ACTIVATIONS[self.activation]()

    def residual(self, inputs: int, outputs: int) -> nn.Module:
        """A residual network on vectors."""
        made: nn.Module = nets.ResidualNet(
            inputs, outputs, self.hidden, num_blocks=self.blocks, activation=self.module()
        )
        return made

    def zero(self, inputs: int, outputs: int) -> nn.Module:
        """The same, but it returns zeros at first, as Glow has it."""
        made = self.residual(inputs, outputs)
        for parameter in made.get_submodule("final_layer").parameters():
            nn.init.zeros_(parameter)
        return made


class ImageNetwork(nn.Module):
    """Glow's network inside of a coupling of images: convolutions of 3 x 3, 1 x 1 and 3 x 3, zero at first.

    Score matching sees the data alone: off it a log-scale could grow without bound, and samples would explode. It is
    bounded as 2·tanh(h / 2), so that no coupling stretches by more than e² = 7.4.

    Arguments:
        inputs: Channels of the half that stays as it is.
        outputs: Twice those of the other half: shifts, then log-scales.
        net: Width, number of 1 x 1 convolutions, and activation.
    """

    bound = 2.0

    def __init__(self, inputs: int, outputs: int, net: Conditioner) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(inputs, net.hidden, 3, padding=1), net.module()]
        for _ in range(net.blocks):
            layers += [nn.Conv2d(net.hidden, net.hidden, 1), net.module()]
        last = nn.Conv2d(net.hidden, outputs, 3, padding=1)
        for parameter in last.parameters():
            nn.init.zeros_(parameter)
        self.layers = nn.Sequential(*layers, last)

    def forward(self, inputs: Tensor, context: Tensor | None = None) -> Tensor:
        """Returns shifts and bounded log-scales."""
        shift, log_scale = self.layers(inputs).chunk(2, dim=1)
        return torch.cat([shift, self.bound * torch.tanh(log_scale / self.bound)], dim=1)


# As smooth as the activation, which wrap() sees for itself; without this nobody could know what forward() adds to it.
ebf.register_nonlinear(ImageNetwork, smoothness="smooth")


class ImageCoupling(AffineCouplingTransform):
    """An affine coupling of images with log-scales as its network bounds them; nflows' own can shrink alone."""

    def _scale_and_shift(self, transform_params: Tensor) -> tuple[Tensor, Tensor]:
        shift, log_scale = transform_params.chunk(2, dim=1)
        return log_scale.exp(), shift


# It acts as its parent does, and is as smooth as the network that it holds.
register_networks(("ebflow_examples",), "ImageCoupling")
ebf.register_container(ImageCoupling, lambda coupling: [Child("", coupling, step=NetworkStep)])


class TriangularLinear(Transform):
    r"""z = W y + b with the part of W above, or below, its diagonal masked: the L and U of Fig. A.4.

    The log-determinant is :math:`\sum_i \log |W_{ii}|`. Cost: O(D²) for each vector, both ways; O(D) for the log-det.

    Arguments:
        features: The number D of features.
        upper: Whether W is upper triangular; lower by default.
        sign: What the diagonal begins as, 1 or -1.
    """

    def __init__(self, features: int, upper: bool = False, sign: float = 1.0) -> None:
        super().__init__()
        self.upper = upper
        self.weight = nn.Parameter(sign * torch.eye(features))
        self.bias = nn.Parameter(torch.zeros(features))

    def matrix(self) -> Tensor:
        """W, with its mask."""
        return self.weight.triu() if self.upper else self.weight.tril()

    def transform(self, x: Tensor) -> Tensor:
        """Moves towards noise, without the log-determinant."""
        return F.linear(x, self.matrix(), self.bias)

    def invert(self, y: Tensor) -> Tensor:
        """Moves towards data, without the log-determinant."""
        return torch.linalg.solve_triangular(self.matrix().mT, y - self.bias, upper=not self.upper, left=False)

    def log_det(self) -> Tensor:
        """Returns log |det| of :meth:`transform`, a scalar."""
        return self.weight.diagonal().abs().log().sum()

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


def linear_layer(features: int, kind: str, init: str) -> nn.Module:
    """A linear layer on vectors, of :data:`LINEAR`; ``init`` is that of a full one, its sign that of a triangular."""
    if kind == "full":
        return FullLinear(features, init=init)
    if kind in ("lower", "upper"):
        return TriangularLinear(features, kind == "upper", -1.0 if init == "negative_identity" else 1.0)
    if kind == "lu":
        lu: nn.Module = transforms.LULinear(features)
        return lu
    reflections = features + features % 2  # as many as any rotation needs, and even, as nflows wants it
    made: nn.Module = (transforms.QRLinear if kind == "qr" else transforms.SVDLinear)(features, reflections)
    return made


def convolution(channels: int, kernel: int, kind: str, init: str, **options: Any) -> nn.Module:
    """A linear layer on images: a full convolution with its options, or nflows' 1 × 1 convolution held as LU factors.

    Raises:
        InputError: For another kind.
    """
    if kind == "full":
        return FullConv2d(channels, kernel_size=kernel, init=init, **options)
    if kind == "lu":
        made: nn.Module = transforms.OneByOneConvolution(channels)
        return made
    raise InputError(f"nflows has no {kind!r} linear layer for images; choose one of full, lu")


def coupling(shape: Shape, flip: bool, net: Conditioner) -> nn.Module:
    """Scales and shifts one half of the features or channels by functions of the other, at first by constants."""
    changed = mask(shape[0], flip)
    if len(shape) == 3:
        return ImageCoupling(changed, lambda inputs, outputs: ImageNetwork(inputs, outputs, net))
    made: nn.Module = transforms.AffineCouplingTransform(changed, net.zero)
    return made


def mask(features: int, flip: bool) -> Tensor:
    """1 for the features that a coupling changes: the second half, or the first."""
    changed = torch.arange(features) >= (features + 1) // 2
    return (~changed if flip else changed).int()
