"""Parts that several adapters share: steps of classes that one library copied from another, and helpers.

An adapter derives from these, and adds its class that calls the library's modules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ebflow_plugin.adapting.adapter import comes_from
from ebflow_plugin.plan.elementwise import ElementwiseMap, ElementwiseStep, sigmoid_map
from ebflow_plugin.plan.linear import PermutationStep
from ebflow_plugin.plan.matrices import TriangularStep
from ebflow_plugin.plan.smooth_modules import Smoothness
from ebflow_plugin.plan.smoothness import smoothness_of
from ebflow_plugin.plan.step import NonlinearStep

# Reasons shown in reports.
VOLUME_PRESERVING = "volume-preserving, but not affine in x"
DEPENDS_ON_CONTEXT = "affine in x, but its log-det depends on the context"


class ConditionedStep(NonlinearStep):
    """A coupling or autoregressive transform: as smooth as its network."""

    reason = "conditioned on its input"

    @property
    def smoothness(self) -> Smoothness:
        return smoothness_of(self.module)


class BoundedStep(ElementwiseStep):
    """An elementwise map into an interval: the derivative of its inverse explodes at the ends."""

    @property
    def match_after(self) -> bool:
        return self.inverted


class SigmoidStep(BoundedStep):
    """A sigmoid. Its inverse is reported as a Logit."""

    @property
    def class_name(self) -> str:
        return "Logit" if self.inverted else super().class_name

    def forward_map(self, x: Tensor, context: Tensor | None) -> ElementwiseMap:
        return sigmoid_map(x)


class IndexedPermutationStep(PermutationStep):
    """A permutation of nflows, and its copy in normflows: both have ``_permutation`` and ``_dim``."""

    def order(self) -> tuple[Tensor, int]:
        return self.module._permutation, self.module._dim


class PackedLUStep(TriangularStep):
    """An LULinear of nflows, and its copy in normflows, which unpack their factors from vectors of entries."""

    def __init__(self, module: Any, path: str, inverted: bool = False) -> None:
        super().__init__(module, path, inverted)
        self._indices = _packed_indices(module.features, module.lower_entries.device)

    def lower_upper(self) -> tuple[Tensor, Tensor]:
        """Unpacks L and U. The libraries copy the indices from numpy on every call; here they are cached."""
        module, size, entries = self.module, self.module.features, self.module.lower_entries
        if self._indices[0].device != entries.device:  # the model was moved
            self._indices = _packed_indices(size, entries.device)
        packed = torch.cat([entries, entries.new_ones(size)]), torch.cat([module.upper_entries, module.upper_diag])
        flat = [entries.new_zeros(size * size).scatter(0, *pair) for pair in zip(self._indices, packed, strict=True)]
        return flat[0].view(size, size), flat[1].view(size, size)

    @property
    def features(self) -> int:
        return self.module.features

    def log_diagonal(self) -> Tensor:
        return torch.log(self.module.upper_diag)


def drop_caches(flow: nn.Module, packages: tuple[str, ...]) -> None:
    """Empties the caches of linear layers (``using_cache``) of nflows and normflows, whose graphs cannot be copied.

    Arguments:
        flow: The flow with the layers.
        packages: The packages of the layers.
    """
    module: Any
    for module in flow.modules():
        if comes_from(type(module), packages) and hasattr(module, "using_cache"):
            module.cache.invalidate()


def lazy_layers(package: str, names: Collection[str]) -> Callable[[str], object]:
    """A module ``__getattr__`` for an adapter's package, which imports its layers on first use.

    The layers derive from classes of the flow library, which need not be installed.

    Arguments:
        package: The package, with a module ``layers``.
        names: The names of the layers.

    Example:
        >>> find = lazy_layers("ebflow_plugin", ["FullLinear"])
        >>> find("FullLinear").__name__
        'FullLinear'
    """

    def find(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return vars(import_module(f"{package}.layers"))[name]

    return find


def takes_context(function: Callable[..., Any] | None) -> bool:
    """Whether a function can be called with ``context=``.

    Example:
        >>> takes_context(lambda x, context=None: x), takes_context(lambda x: x), takes_context(None)
        (True, False, False)
    """
    if function is None:
        return False
    parameters = signature(function).parameters.values()
    return any(parameter.name == "context" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _packed_indices(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The indices of the packed entries of L and of U in a flat matrix, each followed by the diagonal."""
    rows, columns = torch.tril_indices(size, size, -1, device=device)
    up_rows, up_columns = torch.triu_indices(size, size, 1, device=device)
    diagonal = torch.arange(size, device=device) * (size + 1)
    return torch.cat([rows * size + columns, diagonal]), torch.cat([up_rows * size + up_columns, diagonal])
