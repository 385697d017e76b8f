"""What the networks inside a step mean for the energy: are they deterministic, and is their score continuous.

Couplings and autoregressive steps are as smooth as the network that conditions them, and as steady: batch norm in
training mode couples the samples of a batch, dropout makes the energy random.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ebflow_plugin.registry import TypeRegistry, resolve

__all__ = [
    "TAUGHT_NETWORKS",
    "Smoothness",
    "first_reason",
    "kinked_parts",
    "opaque_parts",
    "see_into",
    "smoothness_of",
    "unsteady_parts",
]


class Smoothness(str, Enum):
    """What a step does to the score. Objectives that integrate by parts need a continuous one (contract 9)."""

    SMOOTH = "smooth"
    KINKED = "score jumps"
    JUMPS = "density jumps"
    FALSE = "2nd derivative is wrong"
    UNKNOWN = "unknown"

    __str__ = str.__str__


# Modules whose first derivative jumps. ELU is C1 at its default alpha of 1, so its score is continuous.
_KINKED_MODULES = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.PReLU,
    nn.RReLU,
    nn.Hardtanh,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardshrink,
    nn.Softshrink,
    nn.Threshold,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
)
_KINKED_FUNCTIONS = (
    F.relu,
    F.relu_,
    F.relu6,
    F.leaky_relu,
    F.leaky_relu_,
    F.prelu,
    F.rrelu,
    F.hardtanh,
    F.hardsigmoid,
    F.hardswish,
    F.hardshrink,
    F.softshrink,
    F.threshold,
    torch.relu,
    torch.relu_,
    torch.abs,
)
_SMOOTH = (
    F.celu,
    F.elu,
    F.gelu,
    F.logsigmoid,
    F.mish,
    F.sigmoid,
    F.silu,
    F.softplus,
    F.softsign,
    F.tanh,
    torch.cos,
    torch.exp,
    torch.sigmoid,
    torch.sin,
    torch.tanh,
)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, functools.partial)
# Packages whose networks hold their activations where they can be seen; adapters add those of their libraries.
_SEEN_INTO = {"torch", "ebflow_plugin"}
# What users said about classes of networks of their own: rules.register_nonlinear puts it here.
TAUGHT_NETWORKS: TypeRegistry[Smoothness] = TypeRegistry("smoothness")
_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
_DROPOUTS = (nn.modules.dropout._DropoutNd,)


def kinked_parts(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Finds ReLU-like activations: modules, and functions held as an attribute (as nflows' networks do).

    Gives the dotted path and the activation's name. What a network calls in its code alone cannot be seen.

    Example:
        >>> list(kinked_parts(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
        [('1', 'ReLU')]
    """
    for path, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, _KINKED_MODULES) or (isinstance(part, nn.ELU) and part.alpha != 1.0):
            yield path, type(part).__name__
        for name, value in vars(part).items():
            if any(value is function for function in _KINKED_FUNCTIONS):
                yield f"{path}.{name}".lstrip("."), value.__name__


def opaque_parts(module: nn.Module) -> Iterator[str]:
    """Finds what nobody can see into: modules with a ``forward`` of somebody's own, and functions nobody knows.

    A class that :func:`ebflow_plugin.register_nonlinear` was told about is no secret any more; what is inside of it is
    looked at all the same.

    Example:
        >>> class Mine(nn.Module):
        ...     def forward(self, x):
        ...         return torch.relu(x)
        >>> Mine.__module__ = "a_users_package"
        >>> list(opaque_parts(nn.Sequential(nn.Linear(2, 2), Mine())))
        ['1']
    """
    for path, part in module.named_modules():
        taught = _taught(part)
        if taught == Smoothness.UNKNOWN:
            yield path
        if taught is not None:
            continue
        owner = next(cls for cls in type(part).__mro__ if "forward" in vars(cls))
        if owner.__module__.partition(".")[0] not in _SEEN_INTO:
            yield path
        for name, value in vars(part).items():
            if isinstance(value, _FUNCTIONS) and not any(value is known for known in (*_SMOOTH, *_KINKED_FUNCTIONS)):
                yield f"{path}.{name}".lstrip(".")


def see_into(*packages: str) -> None:
    """Says that the networks of these packages hold their activations where they can be seen, as modules or attributes.

    An adapter says so about its library. The networks of all others are of unknown smoothness.

    Example:
        >>> see_into("torch")
    """
    _SEEN_INTO.update(packages)


def smoothness_of(module: Any) -> Smoothness:
    """The smoothness of a step that is as smooth as the networks inside its module.

    Example:
        >>> str(smoothness_of(nn.Tanh())), str(smoothness_of(nn.ReLU()))
        ('smooth', 'score jumps')
    """
    if not isinstance(module, nn.Module):
        return Smoothness.UNKNOWN
    taught = {_taught(part) for part in module.modules()}
    for worst in (Smoothness.FALSE, Smoothness.JUMPS):
        if worst in taught:
            return worst
    if Smoothness.KINKED in taught or next(kinked_parts(module), None) is not None:
        return Smoothness.KINKED
    return Smoothness.SMOOTH if next(opaque_parts(module), None) is None else Smoothness.UNKNOWN


def _taught(part: nn.Module) -> Smoothness | None:
    """What was said about the class of a network, or about a parent that it does not change."""
    return resolve(part, TAUGHT_NETWORKS.get)[0]


def unsteady_parts(module: Any) -> list[Callable[[], str | None]]:
    """Finds batch norm and dropout inside a module: one question each, which answers with the reason to refuse.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        >>> [part() for part in unsteady_parts(net)]
        ["couples the samples of a batch in training mode (BatchNorm1d at '1'); put the model in eval()"]
        >>> [part() for part in unsteady_parts(net.eval())]
        [None]
    """
    if not isinstance(module, nn.Module):
        return []
    questions: list[Callable[[], str | None]] = []
    for path, part in module.named_modules():
        if isinstance(part, _BATCH_NORMS):
            questions.append(lambda part=part, path=path: _batch_norm_refusal(part, path))  # type: ignore[misc]
        elif isinstance(part, _DROPOUTS):
            questions.append(lambda part=part, path=path: _dropout_refusal(part, path))  # type: ignore[misc]
    return questions


def first_reason(questions: list[Callable[[], str | None]]) -> str | None:
    """The first answer to the questions of :func:`unsteady_parts`.

    Example:
        >>> first_reason([lambda: None, lambda: "is random"])
        'is random'
    """
    for question in questions:
        why = question()
        if why is not None:
            return why
    return None


def _batch_norm_refusal(part: nn.Module, path: str) -> str | None:
    name = f"{type(part).__name__} at {path!r}"
    if part.running_mean is None:
        return f"couples the samples of a batch ({name} keeps no running statistics); remove it"
    if part.training:
        return f"couples the samples of a batch in training mode ({name}); put the model in eval()"
    return None


def _dropout_refusal(part: nn.Module, path: str) -> str | None:
    if part.training and part.p:
        name = f"{type(part).__name__} at {path!r}"
        return f"is random in training mode ({name}, p={part.p}); put the model in eval(), or set p to 0"
    return None
