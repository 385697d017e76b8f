r"""Divergences of a model from a known density, as in the paper's synthetic experiments."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ebflow_plugin.errors import InputError
from ebflow_plugin.linalg.random import over_rows
from ebflow_plugin.log_z.estimate import Estimate, mean_of
from ebflow_plugin.plan.energy_model import EnergyModel, refuse_other_models
from ebflow_plugin.plan.inputs import is_number

__all__ = ["fisher_divergence", "kl_divergence"]

Known = Tensor | Callable[[Tensor], Tensor]


def fisher_divergence(
    model: EnergyModel, x: Tensor, true_score: Known, *, context: Tensor | None = None, batch_size: int | None = None
) -> Estimate:
    r"""Estimates the Fisher divergence, :math:`\tfrac12\, \mathbb{E}_p \| \nabla \log p(x) - \nabla \log q(x) \|^2`.

    Cost: one score for each sample.

    Arguments:
        model: The model q.
        x: Samples of the true density p, with shape ``(B, *)``.
        true_score: :math:`\nabla \log p(x)`: a tensor with the shape of x, or a function of a batch.
        context: The context of the model, with ``B`` rows.
        batch_size: The largest number of samples at a time.

    Returns:
        A scalar with ``.std_error``.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.IdentityTransform(), distributions.StandardNormal([2])))
        >>> fisher_divergence(model, torch.tensor([[0.0, 1.0], [2.0, 3.0]]), lambda x: 1.0 - x)
        Estimate(1 ± 0, monte carlo)
    """
    _check(model, x, "fisher_divergence")
    truth = _known("true_score", true_score, x, x.shape, batch_size)
    score = over_rows(model.score, x, context, batch_size)
    return mean_of(0.5 * (truth - score).flatten(1).square().sum(1), "monte carlo")


def kl_divergence(
    model: EnergyModel,
    x: Tensor,
    true_log_prob: Known,
    *,
    context: Tensor | None = None,
    log_z: Tensor | float | None = None,
    batch_size: int | None = None,
) -> Estimate:
    r"""Estimates the Kullback-Leibler divergence, :math:`\mathbb{E}_p [ \log p(x) - \log q(x) ]`.

    Cost: one log-density for each sample, and log Z once.

    Arguments:
        model: The model q.
        x: Samples of the true density p, with shape ``(B, *)``.
        true_log_prob: :math:`\log p(x)`: a tensor with shape ``(B,)``, or a function of a batch.
        context: The context of the model, with ``B`` rows.
        log_z: The model's log Z, if the exact one is too expensive: a number, or ``model.log_z(method="lanczos")``,
            whose standard error is included.
        batch_size: The largest number of samples at a time.

    Returns:
        A scalar with ``.std_error``.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.IdentityTransform(), distributions.StandardNormal([2])))
        >>> x = torch.randn(100, 2)
        >>> kl_divergence(model, x, model.log_prob(x))
        Estimate(0 ± 0, monte carlo)
    """
    _check(model, x, "kl_divergence")
    truth = _known("true_log_prob", true_log_prob, x, x.shape[:1], batch_size)
    energy = over_rows(model.energy, x, context, batch_size)
    with torch.no_grad():
        constant = model.log_z(tuple(x.shape[1:])) if log_z is None else log_z
    if not is_number(constant) and not (isinstance(constant, Tensor) and constant.numel() == 1):
        raise InputError(f"log_z must be a number, or a tensor with one, got {constant!r}")
    gap = mean_of(truth + energy + float(constant), "monte carlo")
    extra = constant.std_error if isinstance(constant, Estimate) else 0.0
    return Estimate.of(gap.as_subclass(Tensor), math.hypot(gap.std_error, extra), gap.method)


def _check(model: EnergyModel, x: Tensor, name: str) -> None:
    refuse_other_models(name, model)
    if not isinstance(x, Tensor) or x.dim() < 2 or len(x) < 2:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"{name} needs at least 2 samples, with shape (B, *), got {got}")


def _known(name: str, known: Known, x: Tensor, shape: torch.Size, batch_size: int | None) -> Tensor:
    values = known.detach() if isinstance(known, Tensor) else over_rows(lambda x, _: known(x), x, None, batch_size)
    if values.shape != shape:
        raise InputError(f"{name} must have shape {tuple(shape)}, got {tuple(values.shape)}")
    return values.detach().to(x)
