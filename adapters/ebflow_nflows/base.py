"""The base distributions of nflows, and any object with ``log_prob``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ebflow_plugin.adapting import (
    Base,
    Gaussian,
    Shapes,
    Smoothness,
    density_smoothness,
    gaussian_of,
    takes_context,
)


class NflowsBase(Base):
    """A base distribution with its own ``log_prob`` and ``sample``."""

    def __init__(self, module: Any, path: str) -> None:
        shapes = self.known_shapes(module)
        self._density_takes_context = takes_context(module.log_prob)
        super().__init__(module, path, shapes)

    def known_shapes(self, module: Any) -> Shapes | None:
        """The event shape, if the distribution defines it."""
        shape = getattr(module, "_shape", None)
        return (tuple(shape),) if isinstance(shape, torch.Size) else None

    def log_prob(self, latents: tuple[Tensor, ...], context: Tensor | None) -> Tensor:
        (z,) = latents
        if self._density_takes_context:
            return self.module.log_prob(z, context=context)
        log_prob = self.module.log_prob(z)
        return log_prob

    def sample(self, n: int, context: Tensor | None, like: Tensor) -> tuple[Tensor, ...]:
        if not hasattr(self.module, "sample"):
            raise NotImplementedError
        if context is None or not takes_context(self.module.sample):
            drawn = self.module.sample((n,) if isinstance(self.module, torch.distributions.Distribution) else n)
        else:
            drawn = self.module.sample(1, context=context).flatten(0, 1)
        return (drawn.to(like),)


class ForeignBase(NflowsBase):
    """A base density of the user, of torch, or of a subclass that changes one of nflows."""

    @property
    def smoothness(self) -> Smoothness:
        return density_smoothness(self.module)

    def gaussian(self, context: Tensor | None) -> Gaussian | None:
        return gaussian_of(self.module)


class ChangedBase(ForeignBase):
    """A subclass that overrides methods of a distribution of nflows: its shape may differ from that of its parent."""

    def known_shapes(self, module: Any) -> Shapes | None:
        return None


class NormalBase(NflowsBase):
    """A Gaussian of nflows. It samples itself: nflows samples in float32, and its DiagonalNormal cannot sample."""

    smoothness = Smoothness.SMOOTH  # the network of the context is no function of x

    def gaussian(self, context: Tensor | None) -> Gaussian:
        kinds = {parent.__name__ for parent in type(self.module).__mro__}
        if "DiagonalNormal" in kinds:
            shape = self.module._shape
            return ((self.module.mean_.reshape(1, *shape), self.module.log_std_.exp().reshape(1, *shape)),)
        if "ConditionalDiagonalNormal" in kinds:
            mean, log_std = self.module._compute_params(context)
            return ((mean, log_std.exp()),)
        return ((0.0, 1.0),)

    def sample(self, n: int, context: Tensor | None, like: Tensor) -> tuple[Tensor, ...]:
        ((mean, std),) = self.gaussian(context)
        noise = torch.randn(n, *self.module._shape, device=like.device, dtype=like.dtype)
        return (mean + std * noise,)


class MixtureBase(NflowsBase):
    """MADEMoG, an autoregressive mixture of Gaussians. nflows samples it only in float32 and with a context."""

    def known_shapes(self, module: Any) -> Shapes | None:
        return ((module._made.features,),)

    def sample(self, n: int, context: Tensor | None, like: Tensor) -> tuple[Tensor, ...]:
        made = self.module._made
        z = like.new_zeros(n, made.features)
        for feature in range(made.features):
            parameters = made.forward(z, context).reshape(n, made.features, made.num_mixture_components, 3)
            logits, means, spreads = parameters[:, feature].unbind(-1)
            component = torch.multinomial(torch.softmax(logits, -1), 1)
            std = torch.nn.functional.softplus(spreads.gather(1, component)) + made.epsilon
            z[:, feature] = (means.gather(1, component) + std * torch.randn_like(std)).squeeze(1)
        return (z,)
