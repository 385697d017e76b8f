"""The parameters of full layers, and their initial values."""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn

from ebflow_plugin.errors import InputError, suggest

__all__ = ["INITS", "empty_parameters", "fill_orthogonal", "known_init"]

INITS = ("identity", "negative_identity", "normal", "orthogonal")


def known_init(name: str) -> str:
    """Returns the name, or raises if it is not in :data:`INITS`."""
    if name not in INITS:
        raise InputError(f"unknown init {name!r}. {suggest(name, INITS)}")
    return name


def empty_parameters(
    shape: tuple[int, ...], bias: bool, device: torch.device | str | None, dtype: torch.dtype | None
) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Returns an uninitialised weight of this shape and, if ``bias``, a bias with one entry for each of its rows."""
    weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
    return weight, nn.Parameter(weight.new_empty(shape[0])) if bias else None


def fill_orthogonal(matrix: Tensor, init: str, generator: Generator | None) -> None:
    """Fills a square matrix with a random rotation, or with plus or minus the identity."""
    if init == "orthogonal":
        nn.init.orthogonal_(matrix, generator=generator)
    else:
        nn.init.eye_(matrix).mul_(-1 if init == "negative_identity" else 1)
