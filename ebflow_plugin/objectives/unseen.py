"""The search for parameters that score matching cannot train: those that the score does not depend on.

A class prior is an example: it adds a constant to the energy. ``verify`` runs the search, which copies the model.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from math import prod, sqrt
from typing import TypeVar

import torch
from torch import Generator, Tensor, nn

from ebflow_plugin.errors import EBFlowError
from ebflow_plugin.linalg.random import gaussian_like
from ebflow_plugin.model import EBFlow
from ebflow_plugin.plan.registry import altered_part

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def perturbed(model: M, seed: int = 0) -> M:
    """A copy of a model with perturbed parameters: a freshly initialised layer may hide its dependencies.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> bool((perturbed(layer).weight == layer.weight).any())
        False
    """
    copied = copy.deepcopy(model)
    generator = Generator("cpu").manual_seed(seed)
    for parameter in copied.parameters():
        if parameter.is_floating_point():
            noise = gaussian_like(parameter.new_empty(parameter.shape, dtype=torch.float32), generator).to(parameter)
            parameter.add_(noise, alpha=0.1 / sqrt(max(1, prod(parameter.shape[1:]))))
    return copied


def unseen_parameters(model: EBFlow, u: Tensor, context: Tensor | None = None) -> list[str]:
    """The names of the trainable parameters that the score does not depend on, at these points or at random ones.

    The random points are for data in the tails of a spline, where its parameters have no effect. Cost: two energies and
    four backward passes.

    Arguments:
        model: A model, which is not changed: a copy is perturbed.
        u: Points of the matched variable.
        context: Their context.

    Raises:
        EBFlowError: If the score of the copy is not finite, or a part of the flow is hooked or patched.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> class Prior(distributions.StandardNormal):
        ...     def __init__(self, shape):
        ...         super().__init__(shape)
        ...         self.level = nn.Parameter(torch.zeros(()))
        ...     def _log_prob(self, inputs, context):
        ...         return super()._log_prob(inputs, context) + self.level
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), Prior([2])))
        >>> unseen_parameters(model, torch.randn(4, 2))
        ['_distribution.level']
    """
    if (part := altered_part(model.flow)) is not None:
        raise EBFlowError(f"{part} is hooked or patched: a copy would still act through the original's parameters")
    model = perturbed(model)
    named = {name: p for name, p in model.flow.named_parameters() if p.requires_grad and p.numel()}
    seen = _seen(model, named, u, context)
    if len(seen) < len(named):
        elsewhere = gaussian_like(u, Generator("cpu").manual_seed(2))
        with suppress(Exception):  # random points may lie outside of the domain of the flow, whose error is any
            seen |= _seen(model, named, elsewhere, context)
    return [name for name in named if name not in seen]


def _seen(model: EBFlow, named: dict[str, nn.Parameter], u: Tensor, context: Tensor | None) -> set[str]:
    """The parameters with a nonzero gradient of the score along a random direction."""
    direction = gaussian_like(u, Generator("cpu").manual_seed(1))
    with torch.enable_grad():
        along = (model.core.score(u, context) * direction).sum()
    if not bool(torch.isfinite(along)):
        raise EBFlowError("the score of a perturbed copy is not finite")
    if not named or not along.requires_grad:
        return set()
    gradients = torch.autograd.grad(along, list(named.values()), allow_unused=True)
    return {name for name, g in zip(named, gradients, strict=True) if g is not None and bool(g.count_nonzero())}
