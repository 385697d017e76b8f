"""The values between the steps of a plan: a stack of tensors, and log-dets with one value per sample."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ebflow_plugin.errors import UnsupportedStepError

__all__ = ["Value", "dot", "per_sample", "pop", "summed"]

Value = Tensor | tuple[Tensor, ...]


def per_sample(log_det: Any, x: Tensor) -> Tensor:
    """A log-det with the shape ``(B,)`` and the device and dtype of x, whatever form a library returns it in.

    Example:
        >>> import torch
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


def dot(a: Tensor, b: Tensor) -> Tensor:
    """The inner product of each sample: ``(B, *)`` and ``(B, *)`` to ``(B,)``.

    Example:
        >>> import torch
        >>> dot(torch.ones(2, 3, 4), torch.ones(2, 3, 4))
        tensor([12., 12.])
    """
    return summed(a * b)


def summed(values: Tensor) -> Tensor:
    """Sums over all but the batch dimension: ``(B, *)`` to ``(B,)``.

    Example:
        >>> import torch
        >>> summed(torch.ones(2, 3, 4))
        tensor([12., 12.])
    """
    return values.flatten(1).sum(1)
