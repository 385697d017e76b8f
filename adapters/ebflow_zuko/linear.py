"""The linear classes of zuko: where each stores its parameters, in its own forward direction.

Each step calls its lazy module once per call, and reads the parameters from the transform. Vectors are in the last
dimension, as in zuko.
"""

from __future__ import annotations

from math import log
from typing import Any

import torch
from torch import Tensor, nn

from ebflow_plugin.adapting import (
    ElementwiseAffineStep,
    IdentityStep,
    Linearization,
    OrthogonalStep,
    PermutationStep,
    TranslationStep,
    TriangularStep,
)
from ebflow_zuko.transforms import bare, known_name, unwrapped


def factory_of(module: Any) -> Any:
    """The class or function with which an unconditional lazy module builds its transform or distribution."""
    return unwrapped(getattr(module, "f", getattr(module, "meta", None)))


def built_name(module: Any) -> str | None:
    """The name of the class that an unconditional lazy module builds, if it is of zuko or of torch."""
    return known_name(factory_of(module))


def accepted_context(module: Any, context: Tensor | None) -> Tensor | None:
    """The context, or None for an unconditional ElementWiseTransform or GMM, for which zuko would raise."""
    return None if "phi" in getattr(module, "_modules", ()) else context


def held(module: Any) -> list[Tensor]:
    """The tensors of an unconditional lazy module, or of a transform."""
    if isinstance(module, nn.Module):
        return [*module.parameters(), *module.buffers()]
    return [value for value in vars(module).values() if isinstance(value, Tensor)]


class LazyPart:
    """A part of a plan whose module is a lazy module, or a transform itself."""

    module: Any

    @property
    def class_name(self) -> str:
        """The class that is built, for modules that can build any class."""
        kind = type(self.module).__name__
        name = getattr(factory_of(self.module), "__name__", None) if kind.startswith("Unconditional") else None
        return name or kind

    def build(self, context: Tensor | None = None) -> Any:
        """The transform, or the distribution, for a context."""
        return self.module(context) if isinstance(self.module, nn.Module) else self.module


class SameStep(LazyPart, IdentityStep):
    """IdentityTransform."""


class AffineStep(LazyPart, ElementwiseAffineStep):
    """MonotonicAffineTransform without a context, and torch's AffineTransform."""

    def numbers(self) -> tuple[Tensor | float, Tensor | float, Tensor | float]:
        """Scale, shift and log|scale|."""
        transform = bare(self.build())
        if hasattr(transform, "log_scale"):
            return transform.scale, transform.shift, transform.log_scale
        scale = transform.scale
        return scale, transform.loc, torch.log(torch.abs(scale)) if isinstance(scale, Tensor) else log(abs(scale))

    def scale_shift(self, x: Tensor) -> tuple[Tensor | float, Tensor | float]:
        return self.numbers()[:2]

    def log_scale(self) -> Tensor | float:
        return self.numbers()[2]


class AdditiveStep(LazyPart, TranslationStep):
    """AdditiveTransform, whose shift is a parameter or depends on the context: its log-det is 0 in either case."""

    def shift(self, x: Tensor, context: Tensor | None) -> Tensor:
        return bare(self.build(accepted_context(self.module, context))).shift


class OrderStep(LazyPart, PermutationStep):
    """PermutationTransform."""

    def order(self) -> tuple[Tensor, int]:
        return self.build().order, -1


class RotationStep(LazyPart, OrthogonalStep):
    """RotationTransform: R = exp(A - Aᵀ), with log-det 0. The exponential is computed on each call, in O(D³)."""

    reason = "rotation: no log-det, but a matrix exponential each call"

    def apply(self, x: Tensor) -> Tensor:
        return x @ self.build().R.mT

    def invert(self, y: Tensor) -> Tensor:
        return y @ self.build().R

    def linearize(self, x: Tensor, context: Tensor | None) -> Linearization:
        rotation = self.build().R.mT if self.inverted else self.build().R
        return Linearization(x @ rotation.mT, lambda tangent: tangent @ rotation.mT, lambda adjoint: adjoint @ rotation)


class TriangularMatrixStep(LazyPart, TriangularStep):
    """LULinearTransform, in which L has the diagonal, and U has ones."""

    def lower_upper(self) -> tuple[Tensor, Tensor]:
        transform = self.build()
        return transform.L, transform.U

    def log_diagonal(self) -> Tensor:
        lower: Tensor = self.build().L
        return lower.diagonal().abs().log()

    @property
    def features(self) -> int:
        return held(self.module)[0].shape[-1]
