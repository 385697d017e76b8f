r"""Divergences of a model from a known density, as in the paper's synthetic experiments."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

import ebflow_plugin as ebf


def fisher_divergence(model: ebf.EBFlow, x: Tensor, true_score: Tensor, batch_size: int | None = None) -> ebf.Estimate:
    r"""Estimates the Fisher divergence, :math:`\tfrac12\, \mathbb{E}_p \| \nabla \log p(x) - \nabla \log q(x) \|^2`.

    Arguments:
        model: The model q.
        x: Samples of the true density p, with shape ``(B, *)``, at least two.
        true_score: :math:`\nabla \log p(x)`, with the shape of x.
        batch_size: The largest number of samples at a time.

    Example:
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.IdentityTransform(), distributions.StandardNormal([2])))
        >>> x = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
        >>> fisher_divergence(model, x, 1.0 - x)
        Estimate(1 ± 0, monte carlo)
    """
    return _mean(0.5 * _difference(model.score, x, true_score, batch_size).flatten(1).square().sum(1))


def kl_divergence(model: ebf.EBFlow, x: Tensor, true_log_prob: Tensor, batch_size: int | None = None) -> ebf.Estimate:
    r"""Estimates the Kullback-Leibler divergence, :math:`\mathbb{E}_p [ \log p(x) - \log q(x) ]`.

    Arguments:
        model: The model q.
        x: Samples of the true density p, with shape ``(B, *)``, at least two.
        true_log_prob: :math:`\log p(x)`, with shape ``(B,)``.
        batch_size: The largest number of samples at a time.

    Example:
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.IdentityTransform(), distributions.StandardNormal([2])))
        >>> x = torch.randn(100, 2)
        >>> kl_divergence(model, x, model.log_prob(x))
        Estimate(0 ± 0, monte carlo)
    """
    return _mean(_difference(model.log_prob, x, true_log_prob, batch_size))


@torch.no_grad()
def _difference(function: Callable[[Tensor], Tensor], x: Tensor, truth: Tensor, batch_size: int | None) -> Tensor:
    """The known values at x minus those of the model."""
    ours = torch.cat([function(rows) for rows in x.split(batch_size or len(x))])
    if truth.shape != ours.shape:
        raise ValueError(f"the known values must have shape {tuple(ours.shape)}, got {tuple(truth.shape)}")
    return truth.to(ours) - ours


def _mean(values: Tensor) -> ebf.Estimate:
    wide = values.double()
    return ebf.Estimate(float(wide.mean()), float(wide.std()) / math.sqrt(len(wide)), "monte carlo")
