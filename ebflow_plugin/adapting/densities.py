"""What is known about base densities that no adapter's table holds: torch's distributions, and what users taught."""

from __future__ import annotations

from typing import Any

from torch import distributions, nn

from ebflow_plugin.adapting.teaching import REGISTERED, Registered
from ebflow_plugin.plan.smooth_modules import Smoothness
from ebflow_plugin.plan.smoothness import kinked_parts

__all__ = ["density_smoothness"]

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
    """What a base density of any package does to the score.

    A class that nobody knows, or that overrides a method of one that is known, is unknown; activations with a kink are
    looked for inside of it.

    Example:
        >>> box = distributions.Independent(distributions.Uniform(0.0, 1.0), 0)
        >>> str(density_smoothness(box)), str(density_smoothness(distributions.Normal(0.0, 1.0)))
        ('density jumps', 'smooth')
    """
    taught = REGISTERED.get(type(density))
    if isinstance(taught, Registered):
        return taught.smoothness
    parent = _density_of(density)
    if parent is distributions.Independent:
        return density_smoothness(density.base_dist)
    if isinstance(density, nn.Module) and next(kinked_parts(density), None) is not None:
        return Smoothness.KINKED
    return _KNOWN.get(parent, Smoothness.UNKNOWN)


def _density_of(density: Any) -> type:
    """The class that says what the density is. An object may keep what it computed, so that attributes do not count."""
    return next((parent for parent in type(density).__mro__ if "log_prob" in vars(parent)), object)
