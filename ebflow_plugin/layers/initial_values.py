"""Initial weights of full layers."""

from __future__ import annotations

from torch import Generator, Tensor, nn

from ebflow_plugin.errors import InputError, suggest

__all__ = ["INITS", "fill_orthogonal", "known_init"]

INITS = ("identity", "negative_identity", "normal", "orthogonal")


def known_init(name: str) -> str:
    """Returns the name, or raises if it is not in :data:`INITS`."""
    if name not in INITS:
        raise InputError(f"unknown init {name!r}. {suggest(name, INITS)}")
    return name


def fill_orthogonal(matrix: Tensor, init: str, generator: Generator | None) -> None:
    """Fills a square matrix with a random rotation, or with plus or minus the identity."""
    if init == "orthogonal":
        nn.init.orthogonal_(matrix, generator=generator)
    else:
        nn.init.eye_(matrix).mul_(-1 if init == "negative_identity" else 1)
