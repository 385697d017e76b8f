r"""The tail of importance weights, which decides whether their mean can be trusted.

References:
    | A New and Efficient Estimation Method for the Generalized Pareto Distribution (Zhang and Stephens, 2009)
    | Pareto Smoothed Importance Sampling (Vehtari, Simpson, Gelman, Yao and Gabry, 2015)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ebflow_plugin.linalg.random import over_rows, rows_in_chunks

__all__ = ["NARROW", "largest_believable_k", "pareto_k", "too_narrow"]

FEWEST = 5  # the smallest number of tail weights to fit a shape to
ENOUGH = 50  # the smallest number of draws for a standard error
NARROW = "found the model wider than its draws reach"  # why an estimate is not reliable
STRETCH = 1.5  # the ratio of a wide enough Gaussian has a small variance here (0.2), and a too narrow one shows
SIGNIFICANT = 3.5  # standard errors of both halves together; about 1 in 200 false alarms (measured)
LARGEST = 2000  # the largest dimension: its D x D matrix of gradients is decomposed in a second


def pareto_k(log_weights: Tensor) -> float | None:
    r"""Fits a generalised Pareto distribution to the largest weights and returns its shape :math:`\hat k`.

    Weights have :math:`1 / k` finite moments: for k below 1/2 their mean has a standard error, from 1 on the mean
    does not exist. The tail is the largest :math:`\min(M / 5, 3 \sqrt M)` of M weights. The shape is a posterior mean,
    with a prior at 1/2 that has the weight of ten observations.

    Arguments:
        log_weights: Logarithms of the weights, with shape ``(M,)``.

    Returns:
        The shape; 0 if the weights of the tail are all equal; None if there are too few.

    Example:
        >>> uniform = torch.rand(100_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> round(pareto_k(-0.9 * uniform.log()), 1)  # weights u^-0.9 have 1 / 0.9 moments
        0.9
    """
    count = len(log_weights)
    size = math.ceil(min(count / 5, 3 * math.sqrt(count)))
    if size < FEWEST:
        return None
    logs = log_weights.detach().double().sort(descending=True).values[: size + 1]
    weights = (logs - logs[0]).exp()
    excess = (weights[:size] - weights[size]).flip(0)  # ascending
    quartile = excess[max(0, round(size / 4) - 1)]
    if not float(quartile) > 1e-12:
        equal = float(excess[-1]) <= 1e-12
        return 0.0 if equal else math.inf  # the largest weights are far from the rest
    steps = 20 + math.isqrt(size)
    grid = torch.arange(1, steps + 1, dtype=excess.dtype, device=excess.device) - 0.5
    rates = 1.0 / excess[-1] + (1.0 - (steps / grid).sqrt()) / (3.0 * quartile)
    shapes = torch.log1p(-rates[:, None] * excess).mean(1)
    likelihood = size * ((-rates / shapes).log() - shapes - 1.0)
    rate = (torch.softmax(likelihood, 0) * rates).sum()
    shape = float(torch.log1p(-rate * excess).mean())
    return (size * shape + 5.0) / (size + 10.0)


def largest_believable_k(count: int) -> float:
    """The largest shape for which the mean of ``count`` weights has a small and known error: 0.5 to 0.7.

    Example:
        >>> largest_believable_k(100), largest_believable_k(100_000)
        (0.5, 0.7)
    """
    return min(max(1.0 - 1.0 / math.log10(count), 0.5), 0.7)


def too_narrow(
    energy: Callable[[Tensor], Tensor], x: Tensor, log_weights: Tensor, batch_size: int | None = None
) -> bool:
    r"""Whether weighted draws are too narrow for :math:`\exp(-E) / Z` in the direction in which it is flattest.

    The weights can look harmless if no draw came near the tails. But whatever Z is, stretching one direction v about a
    centre m by a factor c preserves the integral:

    .. math:: \mathbb{E}\Big[ c\, \frac{e^{-E(x')}}{e^{-E(x)}} \Big] = 1, \qquad
              x' = x + (c - 1)\, v\, v^\top (x - m)

    and for draws that are too narrow the mean is larger, up to c. The direction is the one with the smallest gradients.
    It is found on one half of the draws and tested on the other, and vice versa.

    Cost: one gradient and one energy for each draw, and :math:`O(M D^2 + D^3)`.

    Arguments:
        energy: :math:`E`, from ``(B, *shape)`` to ``(B,)``.
        x: Draws, with shape ``(M, *shape)``.
        log_weights: Their log-weights, with shape ``(M,)``.
        batch_size: The largest number of draws at a time.

    Returns:
        Whether the draws are too narrow, by more than 3.5 standard errors. False if there are fewer than 4·D draws,
        which are too few for the test.

    Example:
        >>> x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
        >>> [too_narrow(lambda x: 0.5 * (x / s).square().sum(1), x, torch.zeros(200)) for s in (0.9, 1.0, 5.0)]
        [False, False, True]
    """
    rows, logs = x.flatten(1), log_weights.double()
    half, dim = len(rows) // 2, rows.shape[1]
    if half < max(2 * dim, ENOUGH) or dim > LARGEST:
        return False
    gradient = torch.cat([_gradients(energy, x[part]) for part in rows_in_chunks(len(x), batch_size)])

    def difference(pairs: Tensor, _: Tensor | None) -> Tensor:
        return energy(pairs[:, 0]) - energy(pairs[:, 1])

    halves, score = (slice(0, half), slice(half, None)), 0.0
    for fit, test in (halves, halves[::-1]):
        slopes = gradient[fit]
        direction = torch.linalg.eigh(slopes.mT @ slopes)[1][:, 0].to(rows.dtype)
        shares = torch.softmax(logs[test], 0)
        points = rows[test]
        along = (points - shares.to(points.dtype) @ points) @ direction
        stretched = (points + (STRETCH - 1.0) * along[:, None] * direction).reshape(x[test].shape)
        change = over_rows(difference, torch.stack((x[test], stretched), 1), None, batch_size).double()
        # Draws of weight zero are ignored; a stretched draw outside the support has density zero.
        ratios = STRETCH * torch.where(shares > 0, change.nan_to_num(-math.inf), -math.inf).exp()
        mean = float(shares @ ratios)
        error = math.sqrt(float(shares.square() @ (ratios - mean).square()))
        score += (mean - 1.0) / (error + 1e-3) / math.sqrt(2.0)
    return score > SIGNIFICANT


def _gradients(energy: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The gradients of the energy as flat rows in double precision; zeros if it has none."""
    with torch.inference_mode(False), torch.enable_grad():
        x = x.clone().detach().requires_grad_()
        total = energy(x).sum()
        if not total.requires_grad:
            return torch.zeros_like(x, dtype=torch.float64, requires_grad=False).flatten(1)
        (gradient,) = torch.autograd.grad(total, x, allow_unused=True, materialize_grads=True)
    return gradient.flatten(1).double().nan_to_num(0.0, 0.0, 0.0)
