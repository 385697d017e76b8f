"""The architectures of the built-in models: layers from data to noise, of the parts that a kit has."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ebflow_examples.kits import Conditioner, Kit, Shape, Split
from ebflow_plugin.errors import InputError

__all__ = ["CNN_KERNEL", "MODELS", "ModelInfo"]

CNN_KERNEL = 7  # of the paper's CNN-based model


@dataclass(frozen=True)
class ModelInfo:
    """What there is to know about a model before it is built.

    Attributes:
        about: One line.
        images: True if it takes images alone, False for vectors alone (images are flattened), None for either.
        make: Gives its layers, from data to noise, and the shape of its latents.
        has_linear: Whether it has linear layers that ``linear`` chooses.
    """

    about: str
    images: bool | None
    make: Callable[..., tuple[list[nn.Module], Shape]]
    has_linear: bool = True

    @property
    def options(self) -> dict[str, Any]:
        """The names of its own options, with their defaults."""
        parameters = inspect.signature(self.make).parameters.values()
        return {item.name: item.default for item in parameters if item.kind is item.KEYWORD_ONLY}


def fc(
    kit: Kit,
    shape: Shape,
    linear: str,
    *,
    layers: int = 2,
    alpha: float = 0.3,
    init: str = "negative_identity",
) -> tuple[list[nn.Module], Shape]:
    """The paper's FC-based model: fully-connected layers with a smooth leaky ReLU between them."""
    (features,) = shape
    first = kit.linear(features, linear, init)
    return [first, *_stacked(layers - 1, lambda _: [kit.leaky(alpha), kit.linear(features, linear, init)])], shape


def deep(
    kit: Kit, shape: Shape, linear: str, *, layers: int = 4, init: str = "identity"
) -> tuple[list[nn.Module], Shape]:
    """Full layers with sinh-arcsinh maps between them, which a Gaussianising start fits in closed form."""
    (features,) = shape
    first = kit.linear(features, linear, init)
    rest = _stacked(layers - 1, lambda _: [kit.sinh_arcsinh(features), kit.linear(features, linear, init)])
    return [first, *rest], shape


def cnn(
    kit: Kit,
    shape: Shape,
    linear: str,
    *,
    blocks: int = 3,
    kernel: int | None = None,
    alpha: float = 0.3,
    residual: bool = False,
    init: str = "negative_identity",
) -> tuple[list[nn.Module], Shape]:
    """The paper's CNN-based model: blocks of two convolutions around a smooth leaky ReLU, squeezes between them.

    A kernel of 7 x 7 is what gives the paper's numbers of parameters: 0.027 M for MNIST, 0.241 M for CIFAR-10. With
    ``residual`` the nonlinearity is x + αx + (1 - α) softplus(x), and stands after every convolution but the last, in
    front of the squeezes too: so it is in the authors' code.
    """
    result: list[nn.Module] = []
    size = _kernel(kernel, CNN_KERNEL, linear)
    for block in range(blocks):
        if block:
            result += [kit.leaky(alpha, residual), kit.squeeze()] if residual else [kit.squeeze()]
            shape = _squeezed(shape, "cnn", f"blocks={block}")
        first, second = (kit.convolution(shape[0], size, linear, init) for _ in range(2))
        result += [first, kit.leaky(alpha, residual), second]
    return result, shape


def conv(
    kit: Kit, shape: Shape, linear: str, *, layers: int = 4, kernel: int | None = None, init: str = "identity"
) -> tuple[list[nn.Module], Shape]:
    """Full circular convolutions with sinh-arcsinh maps between them, which a Gaussianising start fits in closed form.

    The first map comes after an affine map of each channel. On a torus log-determinants are exact by Fourier transform.
    """
    channels, size = shape[0], 3 if kernel is None else kernel
    if size > min(shape[1:]):
        raise InputError(f"conv has kernels of {size} x {size} pixels, and the images {shape[1]} x {shape[2]}")

    def block(_: int) -> list[nn.Module]:
        return [kit.channel_map(channels), kit.convolution(channels, size, linear, init, circular=True)]

    return [kit.convolution(channels, 1, linear, init, groups=channels), *_stacked(layers - 1, block)], shape


def glow(
    kit: Kit,
    shape: Shape,
    linear: str,
    *,
    blocks: int | None = None,
    levels: int = 2,
    kernel: int | None = None,
    hidden: int | None = None,
    depth: int = 1,
    activation: str = "silu",
    init: str = "orthogonal",
    split: bool = True,
) -> tuple[list[nn.Module], Shape]:
    """Glow: blocks of ActNorm, a linear layer and an affine coupling.

    On vectors ten blocks (Section 5.1) of networks 64 wide; on images eight at each of two levels, a squeeze before
    each (Section 5.4), of Glow's own networks with 32 channels; the authors have sixteen and 512. With ``split`` half
    of the channels are finished between two levels, with a normal prior of their own given the other half.
    """
    images = len(shape) == 3
    net = Conditioner((32 if images else 64) if hidden is None else hidden, depth, activation)
    count = (8 if images else 10) if blocks is None else blocks
    if not images and kernel is not None:
        raise InputError(f"glow has convolutions on images alone, not on vectors of {shape[0]}; leave out kernel")
    size = _kernel(kernel, 1, linear)
    result: list[nn.Module] = []
    for level in range(levels if images else 1):
        if images:
            result.append(kit.squeeze())
            shape = _squeezed(shape, "glow", f"levels={level}")
        for block in range(count):
            mixing = kit.convolution(shape[0], size, linear, init) if images else kit.linear(shape[0], linear, init)
            result += [kit.act_norm(shape), mixing, kit.coupling(shape, block % 2 == 1, net)]
        if split and images and level < levels - 1:
            result += [kit.split_prior(shape, net), Split(shape)]
            shape = Split(shape).halved
    return result, shape


def realnvp(
    kit: Kit,
    shape: Shape,
    linear: str,
    *,
    blocks: int = 8,
    hidden: int = 64,
    depth: int = 2,
    activation: str = "silu",
) -> tuple[list[nn.Module], Shape]:
    """RealNVP on vectors: affine couplings of alternating halves, each after an ActNorm."""
    net = Conditioner(hidden, depth, activation)

    def block(place: int) -> list[nn.Module]:
        return [kit.act_norm(shape), kit.coupling(shape, place % 2 == 1, net)]

    return _stacked(blocks, block), shape


def maf(
    kit: Kit,
    shape: Shape,
    linear: str,
    *,
    blocks: int = 5,
    hidden: int = 64,
    depth: int = 2,
    activation: str = "silu",
    init: str = "orthogonal",
) -> tuple[list[nn.Module], Shape]:
    """A masked autoregressive flow: ActNorm, a linear layer and an affine autoregressive step, in turn."""
    (features,) = shape
    net = Conditioner(hidden, depth, activation)

    def block(place: int) -> list[nn.Module]:
        return [kit.act_norm(shape), kit.linear(features, linear, init), kit.autoregressive(features, net)]

    return _stacked(blocks, block), shape


def nsf(
    kit: Kit,
    shape: Shape,
    linear: str,
    *,
    blocks: int = 5,
    hidden: int = 64,
    depth: int = 2,
    bins: int = 8,
    bound: float = 5.0,
    activation: str = "silu",
    init: str = "orthogonal",
) -> tuple[list[nn.Module], Shape]:
    """A neural spline flow: ActNorm, a linear layer and a coupling by rational-quadratic splines, in turn."""
    (features,) = shape
    net = Conditioner(hidden, depth, activation)

    def block(place: int) -> list[nn.Module]:
        spline = kit.spline(features, place % 2 == 1, net, bins, bound)
        return [kit.act_norm(shape), kit.linear(features, linear, init), spline]

    return _stacked(blocks, block), shape


MODELS: dict[str, ModelInfo] = {
    "fc": ModelInfo("the paper's FC-based model: two full linear layers, a smooth leaky ReLU between them", False, fc),
    "deep": ModelInfo("four full linear layers, sinh-arcsinh maps between them; fitted in closed form", False, deep),
    "cnn": ModelInfo("the paper's CNN-based model: three blocks of two full convolutions, squeezes between", True, cnn),
    "conv": ModelInfo(
        "circular convolutions, sinh-arcsinh maps of channels between; fitted in closed form", True, conv, False
    ),
    "glow": ModelInfo("ActNorm, a full linear layer or convolution, affine coupling; ten or sixteen times", None, glow),
    "realnvp": ModelInfo("affine couplings of alternating halves, without linear layers", False, realnvp, False),
    "maf": ModelInfo("a masked autoregressive flow with linear layers between; slow to sample", False, maf),
    "nsf": ModelInfo("a neural spline flow; its score jumps at the knots, so train it by DSM or ML", False, nsf),
}


def _stacked(blocks: int, make: Callable[[int], list[nn.Module]]) -> list[nn.Module]:
    """The layers of some blocks, one after the other; ``make`` is told the place of each."""
    return [layer for place in range(blocks) for layer in make(place)]


def _kernel(asked: int | None, usual: int, linear: str) -> int:
    """The size of the convolutions: those that are no full ones act on single pixels."""
    if linear == "full":
        return usual if asked is None else asked
    if asked not in (None, 1):
        raise InputError(f"convolutions with linear={linear!r} are 1 x 1; leave out kernel={asked}, or take 'full'")
    return 1


def _squeezed(shape: Shape, name: str, fewer: str) -> Shape:
    """The shape after a squeeze."""
    channels, height, width = shape
    if height % 2 or width % 2:
        raise InputError(
            f"{name} squeezes 2 x 2 pixels, but has {height} x {width} of them there; use {fewer}, or pad the images"
        )
    return 4 * channels, height // 2, width // 2
