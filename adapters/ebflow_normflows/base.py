"""The base distributions of normflows, and any object with ``log_prob``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from inspect import Parameter, signature
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
    is_a,
    known_class,
    per_sample,
    worst_of,
)
from ebflow_plugin.errors import InputError

PACKAGES = ("normflows", "ebflow_normflows")
# The networks of these are functions of the context, or of a constant, and not of x.
BASES: dict[str, Smoothness] = {
    **dict.fromkeys(("DiagGaussian", "ConditionalDiagGaussian", "ClassCondDiagGaussian"), Smoothness.SMOOTH),
    **dict.fromkeys(("GlowBase", "AffineGaussian", "GaussianMixture", "GaussianPCA"), Smoothness.SMOOTH),
    **dict.fromkeys(("Uniform", "UniformGaussian"), Smoothness.JUMPS),
}


class NormflowsBase(Base):
    """A base distribution with its own ``log_prob`` and ``forward``.

    Arguments:
        module: The distribution.
        path: Its path in the model.
        conditional: Whether the model passes it a context. A distribution that needs a context gets it from any model.
    """

    def __init__(self, module: Any, path: str, conditional: bool) -> None:
        self._kind = known_class(module, PACKAGES, BASES)
        changed = self._kind is None and is_a(module, BASES, PACKAGES)
        super().__init__(module, path, None if changed else _shapes(module))
        self.classes: int | None = getattr(module, "num_classes", None)
        self.needs_context = self.classes is not None or hasattr(module, "context_encoder")
        self.takes_context = conditional or self.needs_context
        self._names = [_context_name(module.log_prob), _context_name(getattr(module, "forward", None))]

    @property
    def smoothness(self) -> Smoothness:
        return density_smoothness(self.module) if self._kind is None else BASES[self._kind]

    def refusal(self) -> str | None:
        if "Resampled" in self.class_name and self.module.training:  # of the package larsflow
            return "its normaliser is a random estimate in training mode; put it in eval()"
        return super().refusal()

    def log_prob(self, latents: tuple[Tensor, ...], context: Tensor | None) -> Tensor:
        (z,) = latents
        if context is None and self.needs_context:
            raise InputError(f"{self.where} is conditional: pass the context (class labels, say) of the samples")
        return per_sample(self.module.log_prob(z, **self._given(self._names[0], context, z)), z)

    def gaussian(self, context: Tensor | None) -> Gaussian | None:
        if self._kind != "DiagGaussian":
            return gaussian_of(self.module)
        temperature = 1.0 if self.module.temperature is None else self.module.temperature
        return ((self.module.loc, torch.exp(self.module.log_scale) * temperature),)

    def sample(self, n: int, context: Tensor | None, like: Tensor) -> tuple[Tensor, ...]:
        if context is None and self.needs_context and self.classes is None:
            raise InputError(f"{self.where} is conditional: pass the context to sample for")
        if callable(self.module):
            drawn = self.module(n, **self._given(self._names[1], context, like))[0]
        else:
            drawn = self.module.sample((n,))
        return (drawn.to(like),)

    def sample_at(self, temperature: float, n: int, context: Tensor | None, like: Tensor) -> tuple[Tensor, ...]:
        """Uses the temperature of normflows' own distributions, in a copy, since other threads may use the original."""
        if not hasattr(self.module, "temperature"):
            return super().sample_at(temperature, n, context, like)
        scaled = copy.copy(self)
        scaled.module = copy.copy(self.module)
        own = self.module.temperature
        scaled.module.temperature = temperature if own is None else own * temperature
        return scaled.sample(n, context, like)

    def _given(self, name: str | None, context: Tensor | None, like: Tensor) -> dict[str, Tensor]:
        """The context in the form of normflows: labels as integers, or one-hot in the dtype of the model."""
        if context is None or name is None or not self.takes_context:
            return {}
        if self.classes is not None:
            context = context.long() if context.dim() == 1 else context.to(like.dtype)
        return {name: context}


class LevelsBase(Base):
    """The base distributions of a MultiscaleFlow, one for each level.

    In a plan, the latents of the last level come first, since they are the first to be done.
    """

    def __init__(self, module: Sequence[Any], path: str, conditional: bool) -> None:
        self.parts = [NormflowsBase(part, f"{path}.{level}", conditional) for level, part in enumerate(module)][::-1]
        shapes = [part.shapes for part in self.parts]
        known = None if None in shapes else tuple(shape for one in shapes if one is not None for shape in one)
        super().__init__(module, path, known)
        self.takes_context = any(part.takes_context for part in self.parts)

    @property
    def smoothness(self) -> Smoothness:
        return worst_of(part.smoothness for part in self.parts)

    @property
    def class_name(self) -> str:
        return " + ".join(part.class_name for part in self.parts)

    def refusal(self) -> str | None:
        return next((why for part in self.parts if (why := part.refusal())), None)

    def log_prob(self, latents: tuple[Tensor, ...], context: Tensor | None) -> Tensor:
        parts = [part.log_prob((z,), context) for part, z in zip(self.parts, latents, strict=True)]
        return torch.stack(parts).sum(0)

    def gaussian(self, context: Tensor | None) -> Gaussian | None:
        levels = [part.gaussian(context) for part in self.parts]
        known = [pair for level in levels if level is not None for pair in level]
        return known if len(known) == len(levels) else None

    def sample(self, n: int, context: Tensor | None, like: Tensor) -> tuple[Tensor, ...]:
        context = self._one_class_each(n, context, like)
        return tuple(part.sample(n, context, like)[0] for part in self.parts)

    def sample_at(self, temperature: float, n: int, context: Tensor | None, like: Tensor) -> tuple[Tensor, ...]:
        context = self._one_class_each(n, context, like)
        return tuple(part.sample_at(temperature, n, context, like)[0] for part in self.parts)

    def _one_class_each(self, n: int, context: Tensor | None, like: Tensor) -> Tensor | None:
        """The context, or a random class for each sample, shared by all levels: normflows would draw one per level."""
        classes = next((part.classes for part in self.parts if part.classes is not None), None)
        if context is None and classes is not None:
            context = torch.randint(classes, (n,), device=like.device)
        return context


def _shapes(module: Any) -> Shapes | None:
    shape = getattr(module, "shape", None)
    if isinstance(shape, (tuple, list)):
        return (tuple(int(size) for size in shape),)
    for name in ("dim", "ndim", "d"):  # GaussianMixture and GaussianPCA, UniformGaussian, ResampledGaussian
        if isinstance(size := getattr(module, name, None), int):
            return ((size,),)
    return None


def _context_name(function: Callable[..., Any] | None) -> str | None:
    """The name of a function's context parameter: its second one, ``context`` or ``y`` in normflows."""
    if function is None:
        return None
    parameters = list(signature(function).parameters.values())
    if any(parameter.name == "context" or parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
        return "context"
    return parameters[1].name if len(parameters) > 1 else None
