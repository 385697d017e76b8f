"""Inspection of the networks inside a step: whether they are smooth, and whether they are deterministic.

Couplings and autoregressive steps are as smooth as the network that conditions them, and as deterministic: batch norm
in training mode couples the samples of a batch, and dropout makes the energy random.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

from torch import nn
from torch.nn.utils import parametrize

from ebflow_plugin.plan.registry import Registry, resolve
from ebflow_plugin.plan.smooth_modules import FUNCTIONS, Smoothness, known_smoothness, worst_of

_FUNCTIONS = (FunctionType, BuiltinFunctionType, functools.partial)
# The smoothness of network classes that users registered with register_nonlinear.
REGISTERED_NETWORKS: Registry[type, Smoothness] = Registry("smoothness")
_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
_INSTANCE_NORMS = (nn.modules.instancenorm._InstanceNorm,)
_DROPOUTS = (nn.modules.dropout._DropoutNd,)
_RANDOM_POOLS = (nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


class Ingredient(NamedTuple):
    """A submodule of a network, or a function that a module holds as an attribute (as nflows' networks do)."""

    path: str
    name: str
    smoothness: Smoothness


def ingredients(module: nn.Module) -> Iterator[Ingredient]:
    """The submodules and functions of a network, as far as they can be inspected: not those in the code of ``forward``.

    Those outside the tables, and not registered, have unknown smoothness. Parametrisations act on weights and do not
    count.
    """
    weights = tuple(path for path, part in module.named_modules() if isinstance(part, parametrize.ParametrizationList))
    for path, part in module.named_modules(remove_duplicate=False):
        if any(path == one or path.startswith(f"{one}.") for one in weights) or path.endswith("parametrizations"):
            continue
        registered = _registered(part)
        known, _ = resolve(part, known_smoothness)
        if registered is not None:
            yield Ingredient(path, type(part).__name__, registered)
        else:
            yield Ingredient(path, type(part).__name__, Smoothness.UNKNOWN if known is None else known(part))
        for name, value in vars(part).items():
            if isinstance(value, _FUNCTIONS):
                function_path = f"{path}.{name}".lstrip(".")
                smoothness = _of_function(value)
                if registered is None or smoothness != Smoothness.UNKNOWN:
                    yield Ingredient(function_path, getattr(value, "__name__", repr(value)), smoothness)


def _of_function(value: Any) -> Smoothness:
    try:
        return FUNCTIONS.get(value, Smoothness.UNKNOWN)
    except TypeError:  # a partial with unhashable arguments
        return Smoothness.UNKNOWN


def kinked_parts(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Finds ReLU-like activations: modules, and functions held as attributes.

    Yields the dotted path and the activation's name.

    Example:
        >>> list(kinked_parts(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
        [('1', 'ReLU')]
    """
    return (
        (part.path, part.name)
        for part in ingredients(module)
        if part.smoothness in (Smoothness.KINKED, Smoothness.JUMPS)
    )


def smoothness_of(module: Any) -> Smoothness:
    """The smoothness of a step that is as smooth as the networks inside its module.

    Example:
        >>> str(smoothness_of(nn.Tanh())), str(smoothness_of(nn.ReLU()))
        ('smooth', 'score jumps')
    """
    if not isinstance(module, nn.Module):
        return Smoothness.UNKNOWN
    return worst_of(part.smoothness for part in ingredients(module))


def _registered(part: nn.Module) -> Smoothness | None:
    """The registered smoothness of the class of a network, or of a parent whose map it does not change."""
    return resolve(part, REGISTERED_NETWORKS.get)[0]


def stochastic_parts(module: Any) -> list[Callable[[], str | None]]:
    """Finds submodules that may be random or couple samples: one function each, which returns the reason or None.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        >>> [part() for part in stochastic_parts(net)]
        ["couples the samples of a batch in training mode (BatchNorm1d at '1'); put the model in eval()"]
        >>> [part() for part in stochastic_parts(net.eval())]
        [None]
    """
    if not isinstance(module, nn.Module):
        return []
    refusals: list[Callable[[], str | None]] = []
    for path, part in module.named_modules():
        for kinds, refusal in _STOCHASTIC:
            if isinstance(part, kinds):
                refusals.append(functools.partial(refusal, part, f"{type(part).__name__} at {path!r}"))
    return refusals


def _batch_norm_refusal(part: Any, name: str) -> str | None:
    if part.running_mean is None:
        return f"couples the samples of a batch ({name} keeps no running statistics); remove it"
    if part.training:
        return f"couples the samples of a batch in training mode ({name}); put the model in eval()"
    return None


def _instance_norm_refusal(part: Any, name: str) -> str | None:
    if part.training and part.track_running_stats:
        return f"changes with every call in training mode ({name} keeps running statistics); put the model in eval()"
    return None


def _dropout_refusal(part: Any, name: str) -> str | None:
    return _random(part, name, part.p) if part.p else None


def _random_inside_refusal(part: Any, name: str) -> str | None:
    """Dropout that is no submodule: in attention, and between the layers of a recurrent network."""
    return _random(part, name, part.dropout if getattr(part, "num_layers", 2) > 1 else 0.0)


def _random(part: Any, name: str, p: float) -> str | None:
    if part.training and p:
        return f"is random in training mode ({name}, p={p}); put the model in eval(), or set p to 0"
    return None


def _rrelu_refusal(part: Any, name: str) -> str | None:
    if part.training and part.lower != part.upper:
        return f"is random in training mode ({name} draws its slope); put the model in eval(), or use LeakyReLU"
    return None


def _random_pool_refusal(part: Any, name: str) -> str | None:
    if part._random_samples is None:
        return f"is random in every mode ({name} draws its windows); use MaxPool, or AvgPool, which is smooth"
    return None


_STOCHASTIC: tuple[tuple[tuple[type, ...], Callable[[Any, str], str | None]], ...] = (
    (_BATCH_NORMS, _batch_norm_refusal),
    (_INSTANCE_NORMS, _instance_norm_refusal),
    (_DROPOUTS, _dropout_refusal),
    ((nn.MultiheadAttention, nn.RNNBase), _random_inside_refusal),
    ((nn.RReLU,), _rrelu_refusal),
    (_RANDOM_POOLS, _random_pool_refusal),
)
