"""The parts that the built-in models are made of, whichever library they come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from ebflow_plugin.errors import InputError, UnknownNameError, suggest

__all__ = ["ACTIVATIONS", "LIBRARIES", "LINEAR", "Conditioner", "Kit", "kit_for"]

LIBRARIES = ("nflows", "normflows")
LINEAR = ("full", "lu", "lower", "upper", "qr", "svd")
# As a function, and as a module: the libraries want both.
ACTIVATIONS: dict[str, tuple[Callable[..., Any], type[nn.Module]]] = {
    "tanh": (torch.tanh, nn.Tanh),
    "silu": (F.silu, nn.SiLU),
    "softplus": (F.softplus, nn.Softplus),
    "relu": (F.relu, nn.ReLU),
}
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Conditioner:
    """The network inside of a coupling or autoregressive layer.

    Attributes:
        hidden: Features, or channels, of its hidden layers.
        blocks: How many residual blocks it has.
        activation: A name of :data:`ACTIVATIONS`. All but ``relu`` are smooth, as SSM needs it.
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
    def module(self) -> type[nn.Module]:
        """The activation as a class of modules."""
        return ACTIVATIONS[self.activation][1]

    def make(self, network: Callable[..., Any], inputs: int, outputs: int) -> nn.Module:
        """Builds a residual network of either library, whose arguments are the same."""
        return network(inputs, outputs, self.hidden, num_blocks=self.blocks, activation=self.function)

    def start(self, network: Callable[..., Any], inputs: int, outputs: int) -> nn.Module:
        """Builds a network that gives zeros at first, as Glow has it."""
        made = self.make(network, inputs, outputs)
        for parameter in made.get_submodule("final_layer").parameters():
            nn.init.zeros_(parameter)
        return made


class Kit(Protocol):
    """The layers of one library, by what they do. All are given in the density direction, from data to noise."""

    def linear(self, features: int, kind: str, init: str) -> nn.Module:
        """A linear layer on vectors; ``kind`` is one of :data:`LINEAR`."""

    def convolution(self, channels: int, kernel: int, kind: str, init: str) -> nn.Module:
        """A linear layer on images: a full convolution, or a 1 × 1 convolution held as LU factors."""

    def leaky(self, alpha: float) -> nn.Module:
        """The smooth leaky ReLU."""

    def act_norm(self, shape: Shape) -> nn.Module:
        """An affine map for each feature of a vector, or each channel of an image, that starts from the data."""

    def squeeze(self) -> nn.Module:
        """Trades 2 × 2 pixels for four times the channels."""

    def coupling(self, shape: Shape, flip: bool, net: Conditioner) -> nn.Module:
        """Scales and shifts one half of the features or channels by functions of the other, at first by constants."""

    def spline(self, features: int, flip: bool, net: Conditioner, bins: int, bound: float) -> nn.Module:
        """A coupling by rational-quadratic splines on vectors."""

    def autoregressive(self, features: int, net: Conditioner) -> nn.Module:
        """Scales and shifts each feature by functions of those before it, in one pass in the density direction."""

    def flow(self, layers: Sequence[nn.Module], latent: Shape) -> nn.Module:
        """The model: layers from data to noise, on a standard normal base with the given shape."""


def kit_for(library: str) -> Kit:
    """Gives the parts of a library, which is imported here."""
    if library == "nflows":
        from ebflow_examples.nflows_kit import NflowsKit

        return NflowsKit()
    if library == "normflows":
        from ebflow_examples.normflows_kit import NormflowsKit

        return NormflowsKit()
    raise UnknownNameError(f"unknown library {library!r}. {suggest(library, LIBRARIES)}")


def no_layer(library: str, kind: str, where: str, possible: Sequence[str]) -> InputError:
    """The error of a kind of linear layer that a library does not have."""
    return InputError(f"{library} has no {kind!r} linear layer for {where}; choose one of {', '.join(possible)}")
