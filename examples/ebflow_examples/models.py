"""The built-in models: the paper's fc, cnn and glow, and the flows that everybody has, in each library.

Where the paper is silent (the networks of Glow, say), the defaults are small enough for a CPU. All networks are
smooth by default, so that SSM is unbiased.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

import ebflow_plugin as ebf
from ebflow_examples.data import DataSet
from ebflow_examples.kits import LIBRARIES, LINEAR, OF_IMAGES, Conditioner, Kit, Shape, Split
from ebflow_plugin.errors import InputError, UnknownNameError, suggest

__all__ = ["LIBRARIES", "LINEAR", "MODELS", "ModelInfo", "build", "flow_for", "preprocessing"]

# How far images are kept from 0 and 1, where the logit is infinite. The paper does not say; these are the values that
# most of the literature has, and with them the paper's σ of DSM, 1.0 and 0.1, is a like part of the logits' range.
ALPHA = 1e-6
ALPHA_OF = {"cifar10": 0.05, "cifar10-jpeg": 0.05}


@dataclass(frozen=True)
class ModelInfo:
    """What there is to know about a model before it is built.

    Attributes:
        about: One line.
        images: True if it takes images alone, False for vectors alone (images are flattened), None for either.
        make: Gives its layers, from data to noise, and the shape of its latents.
        has_linear: Whether it has linear layers that ``linear`` chooses.
        libraries: The libraries that it can be built of.
    """

    about: str
    images: bool | None
    make: Callable[..., tuple[list[nn.Module], Shape]]
    has_linear: bool = True
    libraries: tuple[str, ...] = LIBRARIES

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
    result = [kit.linear(features, linear, init)]
    for _ in range(layers - 1):
        result += [kit.leaky(alpha), kit.linear(features, linear, init)]
    return result, shape


def deep(
    kit: Kit, shape: Shape, linear: str, *, layers: int = 4, init: str = "identity"
) -> tuple[list[nn.Module], Shape]:
    """Full layers with sinh-arcsinh maps between them, which a Gaussianising start fits in closed form."""
    (features,) = shape
    result = [kit.linear(features, linear, init)]
    for _ in range(layers - 1):
        result += [kit.sinh_arcsinh(features), kit.linear(features, linear, init)]
    return result, shape


def cnn(
    kit: Kit,
    shape: Shape,
    linear: str,
    *,
    blocks: int = 3,
    kernel: int | None = None,
    alpha: float = 0.3,
    init: str = "negative_identity",
) -> tuple[list[nn.Module], Shape]:
    """The paper's CNN-based model: blocks of two convolutions around a smooth leaky ReLU, squeezes between them.

    A kernel of 7 x 7 is what gives the paper's numbers of parameters: 0.027 M for MNIST, 0.241 M for CIFAR-10.
    """
    result: list[nn.Module] = []
    size = _kernel(kernel, 7, linear)
    for block in range(blocks):
        if block:
            result.append(kit.squeeze())
            shape = _squeezed(shape, "cnn", f"blocks={block}")
        first, second = (kit.convolution(shape[0], size, linear, init) for _ in range(2))
        result += [first, kit.leaky(alpha), second]
    return result, shape


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
    result: list[nn.Module] = []
    for block in range(blocks):
        result += [kit.act_norm(shape), kit.coupling(shape, block % 2 == 1, net)]
    return result, shape


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
    result: list[nn.Module] = []
    for _ in range(blocks):
        result += [kit.act_norm(shape), kit.linear(features, linear, init), kit.autoregressive(features, net)]
    return result, shape


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
    result: list[nn.Module] = []
    for block in range(blocks):
        spline = kit.spline(features, block % 2 == 1, net, bins, bound)
        result += [kit.act_norm(shape), kit.linear(features, linear, init), spline]
    return result, shape


MODELS: dict[str, ModelInfo] = {
    "fc": ModelInfo("the paper's FC-based model: two full linear layers, a smooth leaky ReLU between them", False, fc),
    "deep": ModelInfo("four full linear layers, sinh-arcsinh maps between them; fitted in closed form", False, deep),
    "cnn": ModelInfo(
        "the paper's CNN-based model: three blocks of two full convolutions, squeezes between",
        True,
        cnn,
        libraries=OF_IMAGES,
    ),
    "glow": ModelInfo("ActNorm, a full linear layer or convolution, affine coupling; ten or sixteen times", None, glow),
    "realnvp": ModelInfo("affine couplings of alternating halves, without linear layers", False, realnvp, False),
    "maf": ModelInfo("a masked autoregressive flow with linear layers between; slow to sample", False, maf),
    "nsf": ModelInfo("a neural spline flow; its score jumps at the knots, so train it by DSM or ML", False, nsf),
}


def build(
    name: str, event_shape: Sequence[int], *, library: str = "nflows", linear: str = "full", **options: Any
) -> nn.Module:
    """Builds a model. ``torch.manual_seed`` decides its weights.

    Arguments:
        name: One of :data:`MODELS`.
        event_shape: The shape of one sample: (D,) for vectors, (C, H, W) for images.
        library: ``nflows``, ``normflows`` or ``zuko``.
        linear: The kind of linear layers, one of :data:`LINEAR`; ``qr`` and ``svd`` are of nflows alone, and images
            have ``full`` and ``lu`` (1 × 1). zuko has no models of images.
        **options: Those of the model: ``MODELS[name].options``.

    Returns:
        The library's own object: a ``Flow`` of nflows or zuko, or a ``NormalizingFlow``.

    Example:
        >>> import ebflow_plugin as ebf
        >>> ebf.wrap(build("fc", (4,))).report.count("linear")
        2
    """
    info = _model(name)
    if linear not in LINEAR:
        raise UnknownNameError(f"unknown linear layer {linear!r}. {suggest(linear, LINEAR)}")
    if not info.has_linear and linear != "full":
        raise InputError(f"{name} has no linear layers, so that linear={linear!r} would do nothing; leave it out")
    for option in options:
        if option not in info.options:
            raise InputError(f"{name} has no option {option!r}. {suggest(option, info.options)}")
    for count in ("layers", "levels", "blocks", "bins", "kernel"):
        if options.get(count) is not None and options[count] < 1:
            raise InputError(f"{count} must be at least 1, got {options[count]}")
    shape = tuple(int(size) for size in event_shape)
    _check_shape(name, info, shape)
    kit = kit_for(library)
    layers, latent = info.make(kit, shape, linear, **options)
    return kit.flow(layers, latent)


def kit_for(library: str) -> Kit:
    """Returns the parts of a library, which is imported here."""
    if library == "nflows":
        from ebflow_examples.nflows_kit import NflowsKit

        return NflowsKit()
    if library == "normflows":
        from ebflow_examples.normflows_kit import NormflowsKit

        return NormflowsKit()
    if library == "zuko":
        from ebflow_examples.zuko_kit import ZukoKit

        return ZukoKit()
    raise UnknownNameError(f"unknown library {library!r}. {suggest(library, LIBRARIES)}")


def flow_for(
    name: str, data: DataSet, *, library: str = "nflows", linear: str = "full", **options: Any
) -> tuple[nn.Module, DataSet]:
    """Builds a model for a data set, and gives the data in the shape that it takes.

    Images are flattened for a model of vectors. Smooth leaky ReLUs have the paper's alpha: 0.6 for CIFAR-10, else 0.3.

    Example:
        >>> from ebflow_examples.data import load
        >>> flow, data = flow_for("fc", load("digits"))
        >>> flow.log_prob(data.test / 17).shape
        torch.Size([179])
    """
    info = _model(name)
    if info.images is False:
        data = data.flattened()
    if "alpha" in info.options and data.name.startswith("cifar10"):
        options = {"alpha": 0.6, **options}
    return build(name, data.event_shape, library=library, linear=linear, **options), data


def preprocessing(data: DataSet, alpha: float | None = None, standardize: bool = False) -> list[nn.Module]:
    """What goes in front of a model of these data: for images, noise, the interval [alpha, 1 - alpha], and a logit.

    Arguments:
        data: The data, as they come or flattened.
        alpha: By default 0.05 for CIFAR-10 and 1e-6 for others, as in most of the literature.
        standardize: Whether rows of numbers are taken in units of the standard deviation of each column.

    Raises:
        InputError: If an option has no meaning for these data, or a column is constant.

    Example:
        >>> from ebflow_examples.data import load
        >>> preprocessing(load("digits"), alpha=0.05)
        [Dequantize(levels=17), Rescale(scale=0.9, shift=0.05), Logit()]
    """
    if data.levels is None:
        if alpha is not None:
            raise InputError(f"alpha is of images, and {data.name} has rows of numbers; leave it out")
        return [_standardize(data)] if standardize else []
    if standardize:
        raise InputError(f"standardize is for rows of numbers, and {data.name} has grey levels; leave it out")
    alpha = ALPHA_OF.get(data.name, ALPHA) if alpha is None else alpha
    if not 0 < alpha < 0.5:
        raise InputError(f"alpha must lie between 0 and 0.5, got {alpha}")
    return [ebf.Dequantize(data.levels), ebf.Rescale(alpha, 1 - alpha), ebf.Logit()]


def _standardize(data: DataSet) -> ebf.Standardize:
    """The scales of the training rows; says which columns have none, or lose theirs to rounding."""
    try:
        step = ebf.Standardize.of(data.train)
    except InputError as error:
        raise InputError(f"{data.name}: {error}") from None
    lost = (step.mean.abs() * torch.finfo(data.train.dtype).eps > 1e-3 * step.std).nonzero().flatten().tolist()
    if lost:
        raise InputError(
            f"{data.name}: columns {', '.join(map(str, lost[:10]))} (counted from 0) vary by less than a thousand "
            "times the rounding of float32 around their mean; take off their mean first"
        )
    return step


def _model(name: str) -> ModelInfo:
    if name not in MODELS:
        raise UnknownNameError(f"unknown model {name!r}. {suggest(name, MODELS)}")
    return MODELS[name]


def _check_shape(name: str, info: ModelInfo, shape: Shape) -> None:
    if len(shape) not in (1, 3) or min(shape) < 1:
        raise InputError(f"a model takes vectors, shape (D,), or images, shape (C, H, W), got {shape}")
    if info.images is True and len(shape) == 1:
        raise InputError(
            f"{name} takes images, shape (C, H, W), but the data are vectors of {shape[0]}; try fc or glow"
        )
    if info.images is False and len(shape) == 3:
        raise InputError(f"{name} takes vectors, but the data are images of {shape}; flatten them to ({prod(shape)},)")
    if shape == (1,) and name not in ("fc", "deep", "maf"):
        raise InputError(f"{name} couples features with one another, and the data have one; try fc or maf")


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
