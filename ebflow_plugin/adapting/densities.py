"""Base densities outside the adapters' tables: torch's, and those that users registered."""

from __future__ import annotations

from typing import Any

from torch import distributions, nn

from ebflow_plugin.adapting.rules import registered_smoothness
from ebflow_plugin.plan.smooth_modules import Smoothness
from ebflow_plugin.plan.smoothness import kinked_parts
from ebflow_plugin.plan.step import Gaussian

_SMOOTH = (
    *(distributions.Normal, distributions.MultivariateNormal, distributions.LowRankMultivariateNormal),
    *(distributions.StudentT, distributions.Cauchy, distributions.Gumbel),
)
_JUMPS = (distributions.Uniform, distributions.Exponential, distributions.HalfNormal, distributions.HalfCauchy)
_KNOWN: dict[type, Smoothness] = {
    **dict.fromkeys(_SMOOTH, Smoothness.SMOOTH),
    **dict.fromkeys(_JUMPS, Smoothness.JUMPS),
    distributions.Laplace: Smoothness.KINKED,
}


def density_smoothness(density: Any) -> Smoothness:
    """The smoothness of a base density of any package.

    A class outside the tables, or one that overrides ``log_prob`` of a known class, is unknown, unless a network inside
    it has kinked activations.

    Example:
        >>> box = distributions.Independent(distributions.Uniform(0.0, 1.0), 0)
        >>> str(density_smoothness(box)), str(density_smoothness(distributions.Normal(0.0, 1.0)))
        ('density jumps', 'smooth')
    """
    registered = registered_smoothness(type(density))
    if registered is not None:
        return registered
    parent = _density_of(density)
    if parent is distributions.Independent:
        return density_smoothness(density.base_dist)
    if isinstance(density, nn.Module) and next(kinked_parts(density), None) is not None:
        return Smoothness.KINKED
    return _KNOWN.get(parent, Smoothness.UNKNOWN)


def gaussian_of(density: Any) -> Gaussian | None:
    """Mean and standard deviation of a Normal of ``torch.distributions``; None for anything else.

    Example:
        >>> gaussian_of(distributions.Normal(2.0, 1.0)), gaussian_of(distributions.Uniform(0.0, 1.0))
        (((tensor(2.), tensor(1.)),), None)
    """
    parent = _density_of(density)
    if parent is distributions.Independent:
        return gaussian_of(density.base_dist)
    return ((density.mean, density.stddev),) if parent is distributions.Normal else None


def _density_of(density: Any) -> type:
    """The class that defines the density. Instance attributes do not count: they may hold cached values."""
    return next((parent for parent in type(density).__mro__ if "log_prob" in vars(parent)), object)
