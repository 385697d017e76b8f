"""The values between the steps of a plan: a stack of tensors, and log-dets with one value per sample."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ebflow_plugin.errors import UnsupportedStepError

Value = Tensor | tuple[Tensor, ...]


def per_sample(log_det: Any, x: Tensor) -> Tensor:
    """A log-det with the shape ``(B,)`` and the device and dtype of x, whatever form a library returns it in.

    Example:
        >>> per_sample(0, torch.zeros(3, 2))
        tensor([0., 0., 0.])
    """
    if not isinstance(log_det, Tensor):
        return x.new_full((x.shape[0],), float(log_det))
    log_det = log_det.to(device=x.device, dtype=x.dtype)
    if log_det.shape == x.shape[:1]:
        return log_det
    if log_det.numel() == 1:
        return log_det.reshape(()).expand(x.shape[0])
    raise UnsupportedStepError(
        f"a log-det has shape {tuple(log_det.shape)} for a batch of {x.shape[0]}: expected one value for each sample. "
        f"Register the class with a log-det of shape (B,)."
    )


def pop(stack: list[Tensor], count: int) -> Value:
    """Pops one tensor, or a tuple of several, from a stack."""
    if count == 1:
        return stack.pop()
    popped = tuple(stack[-count:])
    del stack[-count:]
    return popped


def parts_of(value: Value) -> tuple[Tensor, ...]:
    """The tensors of a value."""
    return (value,) if isinstance(value, Tensor) else value


def shapes_of(value: Value) -> tuple[tuple[int, ...], ...]:
    """The event shape of each tensor of a value."""
    return tuple(tuple(part.shape[1:]) for part in parts_of(value))


def flatten(value: Value) -> Tensor:
    """Concatenates tensors of any shapes to flat rows, with shape ``(B, D)``."""
    return torch.cat([part.flatten(1) for part in parts_of(value)], dim=1)


def unflatten(rows: Tensor, shapes: tuple[tuple[int, ...], ...]) -> Value:
    """The value of these event shapes that :func:`flatten` takes to these rows.

    Example:
        >>> [tuple(part.shape) for part in unflatten(torch.zeros(5, 7), ((3,), (2, 2)))]
        [(5, 3), (5, 2, 2)]
    """
    pieces = rows.split([math.prod(shape) for shape in shapes], dim=1)
    parts = tuple(piece.reshape(-1, *shape) for piece, shape in zip(pieces, shapes, strict=True))
    return parts[0] if len(parts) == 1 else parts


def summed(values: Tensor) -> Tensor:
    """Sums over all but the batch dimension: ``(B, *)`` to ``(B,)``.

    Example:
        >>> summed(torch.ones(2, 3, 4))
        tensor([12., 12.])
    """
    return values.flatten(1).sum(1)
