"""The architectures of the built-in models, of layers of nflows, from data to noise."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from nflows import distributions, flows, transforms
from torch import nn

from ebflow_examples.layers import Conditioner, Shape, convolution, coupling, linear_layer, mask
from ebflow_nflows import SinhArcsinh, SmoothLeakyReLU
from ebflow_plugin.errors import InputError

CNN_KERNEL = 7  # of the paper's CNN-based model


@dataclass(frozen=True)
class ModelInfo:
    """What there is to know about a model before it is built.

    Attributes:
        about: One line.
        images: True if it takes images alone, False for vectors alone (images are flattened), None for either.
        make: Builds it, from the shape of the data and the kind of its linear layers.
        has_linear: Whether it has linear layers that ``linear`` chooses.
    """

    about: str
    images: bool | None
    make: Callable[..., nn.Module]
    has_linear: bool = True

    @property
    def options(self) -> dict[str, Any]:
        """The names of its own options, with their defaults."""
        parameters = inspect.signature(self.make).parameters.values()
        return {item.name: item.default for item in parameters if item.kind is item.KEYWORD_ONLY}


def fc(shape: Shape, linear: str, *, layers: int = 2, alpha: float = 0.3, init: str = "negative_identity") -> nn.Module:
    """The paper's FC-based model: fully-connected layers with a smooth leaky ReLU between them."""
    return _between(shape, linear, init, layers, lambda: SmoothLeakyReLU(alpha))


def deep(shape: Shape, linear: str, *, layers: int = 4, init: str = "identity") -> nn.Module:
    """Full layers with sinh-arcsinh maps between them, which a Gaussianising start fits in closed form."""
    return _between(shape, linear, init, layers, lambda: SinhArcsinh(*shape))


def _between(shape: Shape, linear: str, init: str, layers: int, make: Callable[[], nn.Module]) -> nn.Module:
    """Linear layers on vectors, with what make returns between them."""
    steps = [linear_layer(shape[0], linear, init)]
    for _ in range(layers - 1):
        steps += [make(), linear_layer(shape[0], linear, init)]
    return _flow(steps, shape)


def cnn(
    shape: Shape,
    linear: str,
    *,
    blocks: int = 3,
    kernel: int | None = None,
    alpha: float = 0.3,
    residual: bool = False,
    init: str = "negative_identity",
) -> nn.Module:
    """The paper's CNN-based model: blocks of two convolutions around a smooth leaky ReLU, squeezes between them.

    A kernel of 7 x 7 is what gives the paper's numbers of parameters: 0.027 M for MNIST, 0.241 M for CIFAR-10. With
    ``residual`` the nonlinearity is x + αx + (1 - α) softplus(x), and stands after every convolution but the last, in
    front of the squeezes too: so it is in the authors' code.
    """
    steps: list[nn.Module] = []
    size = _kernel(kernel, CNN_KERNEL, linear)
    for block in range(blocks):
        if block:
            steps += [*[SmoothLeakyReLU(alpha, residual)] * residual, transforms.SqueezeTransform()]
            shape = _squeezed(shape, "cnn", f"blocks={block}")
        first, second = (convolution(shape[0], size, linear, init) for _ in range(2))
        steps += [first, SmoothLeakyReLU(alpha, residual), second]
    return _flow(steps, shape)


def conv(shape: Shape, linear: str, *, layers: int = 4, kernel: int | None = None, init: str = "identity") -> nn.Module:
    """Full circular convolutions with sinh-arcsinh maps between them, which a Gaussianising start fits in closed form.

    The first map comes after an affine map of each channel. On a torus log-determinants are exact by Fourier transform.
    """
    channels, size = shape[0], 3 if kernel is None else kernel
    if size > min(shape[1:]):
        raise InputError(f"conv has kernels of {size} x {size} pixels, and the images {shape[1]} x {shape[2]}")
    steps = [convolution(channels, 1, linear, init, groups=channels)]
    for _ in range(layers - 1):
        full = convolution(channels, size, linear, init, padding_mode="circular")
        steps += [SinhArcsinh(channels, dim=-3), full]
    return _flow(steps, shape)


def glow(
    shape: Shape, linear: str, *, blocks: int | None = None, levels: int = 2, kernel: int | None = None,
    hidden: int | None = None, activation: str = "silu",
) -> nn.Module:  # fmt: skip
    """Glow: blocks of ActNorm, a linear layer and an affine coupling.

    On vectors ten blocks (Section 5.1) of networks 64 wide; on images eight at each of two levels, a squeeze before
    each (Section 5.4), of Glow's own networks with 32 channels; the authors have sixteen and 512. Half of the channels
    are finished between two levels, with a normal prior of their own given the other half.
    """
    images = len(shape) == 3
    net = Conditioner((32 if images else 64) if hidden is None else hidden, 1, activation)
    count = (8 if images else 10) if blocks is None else blocks
    if not images:
        if kernel is not None:
            raise InputError(f"glow has convolutions on images alone, not on vectors of {shape[0]}; leave out kernel")
        return _flow(_blocks(shape, linear, count, lambda flip: coupling(shape, flip, net)), shape)
    size = _kernel(kernel, 1, linear)
    parts: list[tuple[list[nn.Module], Shape]] = []  # steps, and the shape of the latents that they finish
    for level in range(levels):
        shape = _squeezed(shape, "glow", f"levels={level}")
        make = partial(coupling, shape, net=net)
        steps = [transforms.SqueezeTransform(), *_blocks(shape, linear, count, make, size)]
        if level < levels - 1:
            # A coupling that moves the half that is finished: on a standard normal, log p(z₁ | z₂) of a normal prior.
            steps.append(make(True))
        parts.append((steps, shape))
        shape = (shape[0] // 2, *shape[1:])
    if levels == 1:
        return _flow(*parts[0])
    transform = transforms.MultiscaleCompositeTransform(levels)
    for steps, latent in parts:
        transform.add_transform(transforms.CompositeTransform(steps), latent)
    return _on_normal(transform, (sum(prod(latent) for latent in transform._output_shapes),))


def _blocks(
    shape: Shape, linear: str | None, count: int, make: Callable[[bool], nn.Module], kernel: int = 1
) -> list[nn.Module]:
    """Blocks of ActNorm, a linear layer if there is one, and what make returns, which turns about each time."""
    steps: list[nn.Module] = []
    for block in range(count):
        steps.append(transforms.ActNorm(shape[0]))
        if linear is not None and len(shape) == 3:
            steps.append(convolution(shape[0], kernel, linear, "orthogonal"))
        elif linear is not None:
            steps.append(linear_layer(shape[0], linear, "orthogonal"))
        steps.append(make(block % 2 == 1))
    return steps


def realnvp(shape: Shape, linear: str, *, blocks: int = 8, hidden: int = 64, activation: str = "silu") -> nn.Module:
    """RealNVP on vectors: affine couplings of alternating halves, each after an ActNorm."""
    net = Conditioner(hidden, 2, activation)
    return _flow(_blocks(shape, None, blocks, lambda flip: coupling(shape, flip, net)), shape)


def maf(shape: Shape, linear: str, *, blocks: int = 5, hidden: int = 64, activation: str = "silu") -> nn.Module:
    """A masked autoregressive flow: ActNorm, a linear layer and an affine autoregressive step, in turn."""
    net = Conditioner(hidden, 2, activation)

    def step(flip: bool) -> nn.Module:
        made: nn.Module = transforms.MaskedAffineAutoregressiveTransform(
            *shape, max(net.hidden, *shape), num_blocks=net.blocks, activation=net.module()
        )
        return made

    return _flow(_blocks(shape, linear, blocks, step), shape)


def nsf(shape: Shape, linear: str, *, blocks: int = 5, hidden: int = 64, activation: str = "silu") -> nn.Module:
    """A neural spline flow: ActNorm, a linear layer and a coupling by rational-quadratic splines, in turn."""
    net = Conditioner(hidden, 2, activation)

    def step(flip: bool) -> nn.Module:
        made: nn.Module = transforms.PiecewiseRationalQuadraticCouplingTransform(
            mask(shape[0], flip), net.residual, num_bins=8, tails="linear", tail_bound=5.0
        )
        return made

    return _flow(_blocks(shape, linear, blocks, step), shape)


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


def _flow(steps: list[nn.Module], latent: Shape) -> nn.Module:
    """The model: layers from data to noise, on a standard normal base with the shape of the latents."""
    return _on_normal(transforms.CompositeTransform(steps), latent)


def _on_normal(transform: nn.Module, latent: Shape) -> nn.Module:
    flow: nn.Module = flows.Flow(transform, distributions.StandardNormal(latent))
    return flow


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
