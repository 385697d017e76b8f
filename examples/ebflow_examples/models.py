"""The built-in models: the paper's fc, cnn and glow, and the flows that everybody has, of nflows.

Where the paper is silent (the networks of Glow, say), the defaults are small enough for a CPU. All networks are
smooth by default, so that SSM is unbiased.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import nn

import ebflow_plugin as ebf
from ebflow_examples.architectures import MODELS, ModelInfo
from ebflow_examples.data import DataSet
from ebflow_examples.layers import LINEAR, Shape
from ebflow_plugin.errors import InputError, UnknownNameError, suggest
from ebflow_plugin.options import positive

# How far images are kept from 0 and 1, where the logit is infinite: the values that most of the literature has. The
# paper's tables (`ebflow reproduce`) have 1e-6 on CIFAR-10 too, as the authors' code.
ALPHA = 1e-6
ALPHA_OF = {"cifar10": 0.05, "cifar10-jpeg": 0.05}


def build(name: str, event_shape: Sequence[int], *, linear: str = "full", **options: Any) -> nn.Module:
    """Builds a model. ``torch.manual_seed`` decides its weights.

    Arguments:
        name: One of :data:`MODELS`.
        event_shape: The shape of one sample: (D,) for vectors, (C, H, W) for images.
        linear: The kind of linear layers, one of :data:`LINEAR`; images have ``full`` and ``lu`` (1 × 1).
        **options: Those of the model: ``MODELS[name].options``.

    Returns:
        A ``Flow`` of nflows.

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
    for count in ("layers", "levels", "blocks", "kernel"):
        if options.get(count) is not None and options[count] < 1:
            raise InputError(f"{count} must be at least 1, got {options[count]}")
    shape = tuple(int(size) for size in event_shape)
    _check_shape(name, info, shape)
    return info.make(shape, linear, **options)


def flow_for(name: str, data: DataSet, *, linear: str = "full", **options: Any) -> tuple[nn.Module, DataSet]:
    """Builds a model for a data set, and gives the data in the shape that it takes.

    Images are flattened for a model of vectors. Smooth leaky ReLUs have the paper's alpha: 0.6 for CIFAR-10, else 0.3.
    A ``cnn`` of textures has one block, which can learn them exactly.

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
    if name == "cnn" and data.name.startswith("textures"):
        options = {"blocks": 1, **options}  # what they are made by
    return build(name, data.event_shape, linear=linear, **options), data


def preprocessing(
    data: DataSet,
    alpha: float | None = None,
    standardize: bool = False,
    temperature: float | None = None,
    dequantize: str | None = None,
) -> list[nn.Module]:
    """What goes in front of a model of these data: for images, noise, the interval [alpha, 1 - alpha], and a logit.

    Arguments:
        data: The data, as they come or flattened.
        alpha: By default 0.05 for CIFAR-10 and 1e-6 for others, as in most of the literature.
        standardize: Whether rows of numbers are taken in units of the standard deviation of each column.
        temperature: What the logits are divided by, 1 by default. It moves no NLL, but it is the unit of DSM's noise
            and FDSSM's difference if the matched variable begins after it.
        dequantize: The noise that makes grey levels continuous: uniform by default, or smooth.

    Raises:
        InputError: If an option has no meaning for these data, or a column is constant.

    Example:
        >>> from ebflow_examples.data import load
        >>> preprocessing(load("digits"), alpha=0.05)
        [Dequantize(levels=17), Rescale(scale=0.9, shift=0.05), Logit()]
    """
    if data.levels is None:
        for name, value in (("alpha", alpha), ("temperature", temperature), ("dequantize", dequantize)):
            if value is not None:
                raise InputError(f"{name} is of images with grey levels, and {data.name} has none; leave it out")
        return [_standardize(data)] if standardize else []
    if standardize:
        raise InputError(f"standardize is for rows of numbers, and {data.name} has grey levels; leave it out")
    alpha = ALPHA_OF.get(data.name, ALPHA) if alpha is None else alpha
    if not 0 < alpha < 0.5:
        raise InputError(f"alpha must lie between 0 and 0.5, got {alpha}")
    steps = [ebf.Dequantize(data.levels, dequantize or "uniform"), ebf.Rescale(alpha, 1 - alpha), ebf.Logit()]
    if temperature in (None, 1.0):
        return steps
    return [*steps, ebf.Rescale(0.0, 1.0 / positive("temperature", temperature))]


def _standardize(data: DataSet) -> ebf.Standardize:
    """The scales of the training rows; says which columns have none, or lose theirs to rounding."""
    if len(data.train) < 2:
        raise InputError(
            f"{data.name} has {len(data.train)} row to train on, which has no scale; 2 are needed at least"
        )
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
