"""The base distributions of zuko: lazy modules that build a ``torch.distributions`` object from a context."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ebflow_plugin.adapting import (
    Base,
    Gaussian,
    Shapes,
    Smoothness,
    registered_smoothness,
    summed,
)
from ebflow_zuko.linear import LazyPart, accepted_context, built_name
from ebflow_zuko.transforms import ours

SMOOTHNESS = {
    **dict.fromkeys(("Cauchy", "DiagNormal", "GMM", "Gumbel", "Normal", "StudentT"), Smoothness.SMOOTH),
    **dict.fromkeys(("LowRankMultivariateNormal", "MultivariateNormal"), Smoothness.SMOOTH),
    "Laplace": Smoothness.KINKED,
    **dict.fromkeys(("BoxUniform", "Maximum", "Minimum", "Sort", "TopK"), Smoothness.JUMPS),
    **dict.fromkeys(("TransformedUniform", "Truncated", "Uniform"), Smoothness.JUMPS),
}


class ZukoBase(LazyPart, Base):
    """A lazy distribution, which builds one for each context. Log-probabilities of independent entries are summed."""

    def __init__(self, module: Any, path: str) -> None:
        super().__init__(module, path, _shapes(module))

    @property
    def smoothness(self) -> Smoothness:
        registered = registered_smoothness(type(self.module))
        if registered is not None:
            return registered
        return SMOOTHNESS.get(self.class_name, Smoothness.UNKNOWN) if ours(type(self.module)) else Smoothness.UNKNOWN

    def build(self, context: Tensor | None = None) -> Any:
        return super().build(accepted_context(self.module, context))

    def log_prob(self, latents: tuple[Tensor, ...], context: Tensor | None) -> Tensor:
        return _log_prob(self.build(context), latents[0])

    def sample(self, n: int, context: Tensor | None, like: Tensor) -> tuple[Tensor, ...]:
        distribution = self.build(context)
        one_each = context is not None and distribution.batch_shape[:1] == (n,)
        return (distribution.sample(torch.Size([] if one_each else [n])).to(like),)


class NormalBase(ZukoBase):
    """A Gaussian of independent entries."""

    def gaussian(self, context: Tensor | None) -> Gaussian:
        distribution = self.build(context)
        return ((distribution.mean, distribution.stddev),)


def base_of(module: Any, path: str) -> ZukoBase:
    """The base density of a lazy distribution."""
    unconditional = type(module).__name__ in ("UnconditionalDistribution", "Unconditional") and ours(type(module))
    return (NormalBase if unconditional and built_name(module) in ("DiagNormal", "Normal") else ZukoBase)(module, path)


def _log_prob(distribution: Any, z: Tensor) -> Tensor:
    log_prob: Tensor = distribution.log_prob(z)
    return summed(log_prob) if log_prob.dim() > 1 else log_prob


def _shapes(module: Any) -> Shapes | None:
    """The event shape, if it is known without a context."""
    if not ours(type(module)) or not (hasattr(module, "f") or hasattr(module, "meta") or hasattr(module, "phi")):
        return None
    distribution = module()
    return (tuple(distribution.batch_shape + distribution.event_shape),)
