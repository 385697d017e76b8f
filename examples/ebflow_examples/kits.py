"""The parts that the built-in models are made of, whichever library they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ebflow_plugin as ebf
from ebflow_plugin.errors import InputError, UnknownNameError, suggest

__all__ = ["ACTIVATIONS", "LIBRARIES", "LINEAR", "Conditioner", "ImageNetwork", "Kit", "Split", "no_layer"]

LIBRARIES = ("nflows", "normflows")
LINEAR = ("full", "lu", "lower", "upper", "qr", "svd")
# As a function, and as a module: the libraries want both.
ACTIVATIONS: dict[str, tuple[Callable[..., Any], Callable[[], nn.Module]]] = {
    "tanh": (torch.tanh, nn.Tanh),
    "silu": (F.silu, nn.SiLU),
    "softplus": (F.softplus, nn.Softplus),
    "relu": (F.relu, nn.ReLU),
    "leaky_relu": (partial(F.leaky_relu, negative_slope=0.1), partial(nn.LeakyReLU, 0.1)),
}
Shape = tuple[int, ...]


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

    @property
    def function(self) -> Callable[..., Any]:
        """The activation as a function."""
        return ACTIVATIONS[self.activation][0]

    @property
    def module(self) -> Callable[[], nn.Module]:
        """Makes the activation as a module."""
        return ACTIVATIONS[self.activation][1]

    def make(self, network: Callable[..., Any], inputs: int, outputs: int) -> nn.Module:
        """Builds a residual network of nflows or normflows, whose arguments are the same."""
        return network(inputs, outputs, self.hidden, num_blocks=self.blocks, activation=self.function)

    def start(self, network: Callable[..., Any], inputs: int, outputs: int) -> nn.Module:
        """Builds a network that gives zeros at first, as Glow has it."""
        made = self.make(network, inputs, outputs)
        for parameter in made.get_submodule("final_layer").parameters():
            nn.init.zeros_(parameter)
        return made


class ImageNetwork(nn.Module):
    """Glow's network inside of a coupling of images: convolutions of 3 x 3, 1 x 1 and 3 x 3, zero at first.

    Score matching sees the data alone: off it a log-scale could grow without bound, and samples would explode. It is
    bounded as 2·tanh(h / 2), so that no coupling stretches by more than e² = 7.4.

    Arguments:
        inputs: Channels of the half that stays as it is.
        outputs: Twice those of the other half.
        net: Width, number of 1 x 1 convolutions, and activation.
        scales: Which of the outputs are log-scales.
    """

    bound = 2.0
    is_scale: Tensor

    def __init__(self, inputs: int, outputs: int, net: Conditioner, scales: slice) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(inputs, net.hidden, 3, padding=1), net.module()]
        for _ in range(net.blocks):
            layers += [nn.Conv2d(net.hidden, net.hidden, 1), net.module()]
        last = nn.Conv2d(net.hidden, outputs, 3, padding=1)
        for parameter in last.parameters():
            nn.init.zeros_(parameter)
        self.layers = nn.Sequential(*layers, last)
        is_scale = torch.zeros(outputs, 1, 1, dtype=torch.bool)
        is_scale[scales] = True
        self.register_buffer("is_scale", is_scale, persistent=False)

    def forward(self, inputs: Tensor, context: Tensor | None = None) -> Tensor:
        """Returns log-scales and shifts, in the order of the library."""
        free = self.layers(inputs)
        return torch.where(self.is_scale, self.bound * torch.tanh(free / self.bound), free)


# As smooth as the activation, which wrap() sees for itself; without this nobody could know what forward() adds to it.
ebf.register_nonlinear(ImageNetwork, smoothness="smooth")


class Split(nn.Module):
    """Marks a place among the layers of a model of images where half of the channels are finished.

    Arguments:
        shape: The shape of an image there.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape

    @property
    def halved(self) -> Shape:
        """The shape of either half.

        Example:
            >>> Split((4, 14, 14)).halved
            (2, 14, 14)
        """
        return (self.shape[0] // 2, *self.shape[1:])

    @staticmethod
    def levels(layers: Sequence[nn.Module], latent: Shape) -> Iterator[tuple[list[nn.Module], Shape]]:
        """The layers between the marks, and the shape after them."""
        level: list[nn.Module] = []
        for layer in layers:
            if isinstance(layer, Split):
                yield level, layer.shape
                level = []
            else:
                level.append(layer)
        yield level, latent


class Kit(Protocol):
    """The layers of one library, by what they do. All are given in the density direction, from data to noise."""

    def linear(self, features: int, kind: str, init: str) -> nn.Module:
        """A linear layer on vectors; ``kind`` is one of :data:`LINEAR`."""

    def convolution(
        self, channels: int, kernel: int, kind: str, init: str, groups: int = 1, circular: bool = False
    ) -> nn.Module:
        """A linear layer on images: a full convolution, or a 1 × 1 convolution held as LU factors."""

    def leaky(self, alpha: float, residual: bool = False) -> nn.Module:
        """The smooth leaky ReLU; with ``residual``, added to its input."""

    def sinh_arcsinh(self, features: int) -> nn.Module:
        """The learnable elementwise map that bends both tails."""

    def channel_map(self, channels: int) -> nn.Module:
        """The same map of images, with parameters for each channel."""

    def act_norm(self, shape: Shape) -> nn.Module:
        """An affine map for each feature of a vector, or each channel of an image, that starts from the data."""

    def split_prior(self, shape: Shape, net: Conditioner) -> nn.Module:
        """A coupling that scales and shifts the half of the channels that a :class:`Split` finishes by the other half.

        On a standard normal it is the same as a normal prior of that half given the other: log p(z₂ | z₁).
        """

    def squeeze(self) -> nn.Module:
        """Trades 2 × 2 pixels for four times the channels."""

    def coupling(self, shape: Shape, flip: bool, net: Conditioner) -> nn.Module:
        """Scales and shifts one half of the features or channels by functions of the other, at first by constants."""

    def spline(self, features: int, flip: bool, net: Conditioner, bins: int, bound: float) -> nn.Module:
        """A coupling by rational-quadratic splines on vectors."""

    def autoregressive(self, features: int, net: Conditioner) -> nn.Module:
        """Scales and shifts each feature by functions of those before it, in one pass in the density direction."""

    def flow(self, layers: Sequence[nn.Module], latent: Shape) -> nn.Module:
        """The model: layers from data to noise, on a standard normal base with the given shape.

        Where a :class:`Split` stands half of the channels go to the base, and the layers after it see the other half.
        """


def no_layer(library: str, kind: str, where: str, possible: Sequence[str]) -> InputError:
    """The error of a kind of linear layer that a library does not have."""
    return InputError(f"{library} has no {kind!r} linear layer for {where}; choose one of {', '.join(possible)}")
