"""The weights of the rows of a batch: importance weights of samples, say."""

from __future__ import annotations

import torch
from torch import Tensor

from ebflow_plugin.errors import InputError
from ebflow_plugin.linalg.memo import free_to_read, is_readable

__all__ = ["check_weights", "counted_rows", "refuse_weights", "resampled_rows", "weighted_mean"]


def check_weights(weights: Tensor, x: Tensor) -> Tensor:
    """Returns the weights of the rows of x, over the largest of them, so that equal weights become exact ones.

    Values are checked on the CPU alone: elsewhere, where a check would synchronise with the device, weights that are
    negative, NaN, inf or all zero return NaN, and so does the loss.

    Example:
        >>> check_weights(torch.tensor([0.0, 0.3, 0.3]), torch.zeros(3, 2))
        tensor([0., 1., 1.])
        >>> check_weights(torch.tensor([0.5, -0.5]), torch.zeros(2, 2))
        Traceback (most recent call last):
        ebflow_plugin.errors.InputError: weights must be at least 0, finite, and not all 0, got 1 of 2 that are not
    """
    refuse_weights(weights, x)
    if weights.device != x.device:
        raise InputError(f"weights are on {weights.device}, x is on {x.device}; move one with .to()")
    if len(weights) == 0:
        return weights.detach()
    weights = weights.detach().to(x.dtype if x.is_floating_point() else torch.get_default_dtype())
    if free_to_read(weights) and not bool(weights.any()):
        raise InputError(f"weights must be at least 0, finite, and not all 0, got {len(weights)} zeros")
    scaled = weights / weights.amax()
    return torch.where((weights >= 0).all(), scaled, torch.full_like(scaled, torch.nan))


def refuse_weights(weights: Tensor, x: Tensor, read: bool = False) -> None:
    """Raises if weights have a wrong shape, or are negative, NaN or inf. They may all be zero.

    Arguments:
        weights: The weights.
        x: The rows.
        read: Reads the values on any device, not on the CPU alone.

    Example:
        >>> refuse_weights(torch.ones(2, 1), torch.zeros(2, 3))
        Traceback (most recent call last):
        ebflow_plugin.errors.InputError: weights must be a real tensor of shape (2,), one for each row of x, got (2, 1)
    """
    if not isinstance(weights, Tensor) or weights.shape != x.shape[:1] or weights.is_complex():
        got = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise InputError(f"weights must be a real tensor of shape ({len(x)},), one for each row of x, got {got}")
    if not (is_readable if read else free_to_read)(weights):
        return
    bad = int((~(torch.isfinite(weights) & (weights >= 0))).sum())
    if bad:
        raise InputError(f"weights must be at least 0, finite, and not all 0, got {bad} of {len(weights)} that are not")


def counted_rows(weights: Tensor) -> Tensor:
    """Indices that replace the rows of weight zero by the heaviest one, so that nothing of them enters a graph.

    A zero times a gradient that is NaN would be NaN.

    Example:
        >>> counted_rows(torch.tensor([0.5, 0.0, 1.0, 0.2]))
        tensor([0, 2, 2, 3])
    """
    return torch.where(weights == 0, weights.argmax(), torch.arange(len(weights), device=weights.device))


def resampled_rows(weights: Tensor) -> Tensor:
    """Indices that repeat each row as often as its weight asks, for a start that cannot weight its rows.

    Example:
        >>> resampled_rows(torch.tensor([0.0, 1.0, 1.0, 2.0]))
        tensor([1, 2, 3, 3])
    """
    edges = weights.double().cumsum(0)
    places = (torch.arange(len(weights), device=weights.device, dtype=edges.dtype) + 0.5) * (edges[-1] / len(weights))
    return torch.searchsorted(edges, places).clamp_max(len(weights) - 1)


def weighted_mean(values: Tensor, weights: Tensor | None) -> Tensor:
    """The mean of one value per row, ``(B,)``, self-normalised; without weights, or with equal ones, the plain mean.

    Example:
        >>> weighted_mean(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 0.5]))
        tensor(2.)
    """
    return values.mean() if weights is None else (weights * values).sum() / weights.sum()
