"""Tables of the smoothness of the modules and functions that networks are made of.

Anything outside these tables is unknown. The classes of torch.nn are classified by measurement: a test searches each of
them for jumps of the value and of its slope.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Smoothness(str, Enum):
    """The smoothness of a step. Objectives that integrate by parts need a continuous score (contract 9)."""

    SMOOTH = "smooth"
    KINKED = "score jumps"
    JUMPS = "density jumps"
    WRONG = "2nd derivative is wrong"
    UNKNOWN = "unknown"

    __str__ = str.__str__


def worst_of(parts: Iterable[Smoothness]) -> Smoothness:
    """The smoothness of a composition: the worst of its parts.

    Example:
        >>> str(worst_of([Smoothness.SMOOTH, Smoothness.UNKNOWN, Smoothness.KINKED]))
        'score jumps'
    """
    kinds = set(parts)
    order = (Smoothness.WRONG, Smoothness.JUMPS, Smoothness.KINKED, Smoothness.UNKNOWN)
    return next((kind for kind in order if kind in kinds), Smoothness.SMOOTH)


_SMOOTH_MODULES = (
    # containers, padding and reordering
    *(nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict, nn.Identity, nn.Flatten),
    *(nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle, nn.Fold, nn.Unfold, nn.ZeroPad1d),
    *(nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d, nn.ReflectionPad1d),
    *(nn.ReflectionPad2d, nn.ReflectionPad3d, nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d),
    *(nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d, nn.Upsample, nn.UpsamplingNearest2d),
    nn.UpsamplingBilinear2d,
    # linear maps and means
    *(nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d),
    *(nn.ConvTranspose3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d),
    nn.AdaptiveAvgPool3d,
    # activations with a continuous slope
    *(nn.CELU, nn.GELU, nn.GLU, nn.LogSigmoid, nn.LogSoftmax, nn.Mish, nn.SiLU, nn.Sigmoid, nn.Softmax, nn.Softmax2d),
    *(nn.Softmin, nn.Softplus, nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.MultiheadAttention),
    # normalisations and dropout, which are refused in modes where they are no function of a single sample
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d),
    *(nn.InstanceNorm3d, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.CrossMapLRN2d, nn.Dropout),
    *(nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
)
_KINKED_MODULES = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.SELU, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish),
    *(nn.Softshrink, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d),
    *(nn.AdaptiveMaxPool3d, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d, nn.LPPool1d, nn.LPPool2d, nn.LPPool3d),
)


def _of_threshold(module: Any) -> Smoothness:
    return Smoothness.KINKED if module.value == module.threshold else Smoothness.JUMPS


_BY_OPTION: dict[type, Callable[[Any], Smoothness]] = {
    nn.ELU: lambda module: Smoothness.SMOOTH if module.alpha == 1.0 else Smoothness.KINKED,
    nn.Threshold: _of_threshold,
    nn.Hardshrink: lambda module: Smoothness.JUMPS if module.lambd else Smoothness.SMOOTH,
    # without an eps it is a sign function near zero
    nn.RMSNorm: lambda module: Smoothness.SMOOTH if module.eps else Smoothness.UNKNOWN,
    nn.RNN: lambda module: Smoothness.SMOOTH if module.nonlinearity == "tanh" else Smoothness.KINKED,
    nn.LSTM: lambda module: Smoothness.SMOOTH,
    nn.GRU: lambda module: Smoothness.SMOOTH,
}
_MODULES: dict[type, Callable[[Any], Smoothness]] = {
    **{cls: lambda module: Smoothness.SMOOTH for cls in _SMOOTH_MODULES},
    **{cls: lambda module: Smoothness.KINKED for cls in _KINKED_MODULES},
    **_BY_OPTION,
}

# Networks whose activations are all modules or attributes, which can be inspected: class names by package, since
# libraries are copied into several packages. Adapters add those of their libraries.
_NETWORKS: dict[str, set[str]] = {"ebflow_plugin": {"Smooth"}}
_EVERY = "*"

_SMOOTH_FUNCTIONS = (
    *(F.celu, F.elu, F.gelu, F.glu, F.logsigmoid, F.log_softmax, F.mish, F.sigmoid, F.silu, F.softmax, F.softplus),
    *(F.softsign, F.tanh, F.tanhshrink, F.linear, torch.atan, torch.asinh, torch.cos, torch.erf, torch.exp),
    *(torch.expm1, torch.sigmoid, torch.sin, torch.sinh, torch.softmax, torch.square, torch.tanh, torch.zeros_like),
)
_KINKED_FUNCTIONS = (
    *(F.relu, F.relu_, F.relu6, F.leaky_relu, F.leaky_relu_, F.prelu, F.rrelu, F.selu, F.selu_, F.hardtanh),
    *(F.hardtanh_, F.hardsigmoid, F.hardswish, F.softshrink, torch.relu, torch.relu_, torch.selu, torch.selu_),
    *(torch.abs, torch.clamp, torch.prelu, torch.rrelu),
)
_JUMPING_FUNCTIONS = (F.hardshrink, F.threshold, torch.sign, torch.round, torch.floor, torch.ceil, torch.threshold)
FUNCTIONS: dict[Any, Smoothness] = {
    **dict.fromkeys(_SMOOTH_FUNCTIONS, Smoothness.SMOOTH),
    **dict.fromkeys(_KINKED_FUNCTIONS, Smoothness.KINKED),
    **dict.fromkeys(_JUMPING_FUNCTIONS, Smoothness.JUMPS),
}


def known_smoothness(cls: type) -> Callable[[Any], Smoothness] | None:
    """A function for the smoothness of modules of exactly this class, without their submodules; None if unknown.

    Example:
        >>> str(known_smoothness(nn.ELU)(nn.ELU(alpha=0.5))), known_smoothness(nn.Transformer)
        ('score jumps', None)
    """
    if cls in _MODULES:
        return _MODULES[cls]
    inspectable = _NETWORKS.get(cls.__module__.partition(".")[0], ())
    if cls.__name__ in inspectable or _EVERY in inspectable:
        return lambda module: Smoothness.SMOOTH
    return None


def register_networks(packages: Iterable[str], *networks: str) -> None:
    """Declares that networks hold all of their activations as modules or attributes, where they can be inspected.

    Adapters declare this for the networks of their libraries. All other networks have unknown smoothness.

    Arguments:
        packages: The packages of the classes.
        networks: The names of the classes; all classes of the packages by default.

    Example:
        >>> register_networks(["my_flows"], "MyResidualNet")
    """
    for package in packages:
        _NETWORKS.setdefault(package, set()).update(networks or (_EVERY,))
