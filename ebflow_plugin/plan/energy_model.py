"""The interface of :class:`~ebflow_plugin.EBFlow` for the packages below it: energies, and the matched variable."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from math import prod, sqrt
from typing import TypeVar

import torch
from torch import Generator, Tensor, nn

from ebflow_plugin.errors import InputError
from ebflow_plugin.plan.plan import Plan

__all__ = ["EnergyModel", "perturbed", "refuse_other_models"]

M = TypeVar("M", bound=nn.Module)


class EnergyModel(nn.Module, ABC):
    """An unnormalised density. :class:`~ebflow_plugin.EBFlow` implements it; sampling and log Z need no more."""

    @property
    @abstractmethod
    def plan(self) -> Plan:
        """The steps from data to noise, and the base."""

    @property
    @abstractmethod
    def prefix(self) -> Plan:
        """The fixed steps before the matched variable."""

    @property
    @abstractmethod
    def core(self) -> EnergyModel:
        """The model of the matched variable; the model itself without preprocessing."""

    @abstractmethod
    def energy(self, x: Tensor, context: Tensor | None = None, *, generator: Generator | None = None) -> Tensor:
        """E(x), with shape ``(B,)``."""

    @abstractmethod
    def score(self, x: Tensor, context: Tensor | None = None, *, generator: Generator | None = None) -> Tensor:
        """-dE/dx, with the shape of x."""

    @abstractmethod
    def log_z(self, event_shape: tuple[int, ...] | None = None) -> Tensor:
        """Log Z, exactly."""

    @abstractmethod
    def preprocess(self, x: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        """The matched variable, and the log-det of the preprocessing."""

    @abstractmethod
    def like(self) -> Tensor:
        """An empty tensor with the device and dtype of the model."""

    @abstractmethod
    def check(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Raises on input that the model cannot take, and returns x."""


def refuse_other_models(name: str, model: object) -> None:
    """Raises if a model is not a wrapped flow.

    Example:
        >>> refuse_other_models("langevin", nn.Tanh())
        Traceback (most recent call last):
        ebflow_plugin.errors.InputError: langevin needs an EBFlow, got Tanh; wrap it first: ebflow_plugin.wrap(flow)
    """
    if not isinstance(model, EnergyModel):
        raise InputError(f"{name} needs an EBFlow, got {type(model).__name__}; wrap it first: ebflow_plugin.wrap(flow)")


@torch.no_grad()
def perturbed(model: M, seed: int = 0) -> M:
    """A copy of a model with perturbed parameters: a freshly initialised layer may hide its dependencies.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> bool((perturbed(layer).weight == layer.weight).any())
        False
    """
    copied = copy.deepcopy(model)
    generator = Generator().manual_seed(seed)
    for parameter in copied.parameters():
        if parameter.is_floating_point():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.add_(noise, alpha=0.1 / sqrt(max(1, prod(parameter.shape[1:]))))
    return copied
