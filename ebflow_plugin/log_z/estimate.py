"""A scalar with its standard error."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import torch
from torch import Tensor

from ebflow_plugin.errors import EstimateWarning
from ebflow_plugin.log_z.pareto import largest_believable_k, pareto_k

__all__ = ["TRUSTED", "Estimate", "log_mean_exp", "mean_of"]

# The smallest effective sample size for which a standard error can be trusted: this many, and this share of all draws.
# Below, errors of 10 standard errors were measured.
TRUSTED, TRUSTED_SHARE = 10.0, 0.01


class Estimate(Tensor):
    r"""A scalar tensor with its standard error. Results of operations on it are plain tensors.

    Attributes:
        std_error: The standard error: 0 for an exact value, inf for an unreliable one.
        method: The method of estimation.
        effective_sample_size: The effective sample size of a weighted estimate; else None.
        pareto_k: The shape of the tail of its weights, which is too heavy for a mean from 0.7 on; None if there are
            too few, or no weights. See :func:`~ebflow_plugin.log_z.pareto.pareto_k`.

    Example:
        >>> value = Estimate.of(torch.tensor(2.0), std_error=0.25, method="importance")
        >>> value, value.std_error
        (Estimate(2 ± 0.25, importance), 0.25)
        >>> value + 1
        tensor(3.)
    """

    std_error: float
    method: str
    effective_sample_size: float | None
    pareto_k: float | None

    # As for nn.Parameter: results are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(
        cls,
        value: Tensor,
        std_error: float = 0.0,
        method: str = "exact",
        effective_sample_size: float | None = None,
        pareto_k: float | None = None,
    ) -> Estimate:
        """Attaches an error to a scalar. The value stays attached to its graph."""
        estimate = value.reshape(()).as_subclass(cls)
        estimate.std_error = std_error
        estimate.method = method
        estimate.effective_sample_size = effective_sample_size
        estimate.pareto_k = pareto_k
        return estimate

    def about(self, value: Tensor) -> Estimate:
        """Another value with the error of this one: a copy, or a sum with a known constant."""
        return Estimate.of(value, self.std_error, self.method, self.effective_sample_size, self.pareto_k)

    @property
    def reliable(self) -> bool:
        """Whether the standard error can be trusted; if not, it is inf, and a warning was issued."""
        return math.isfinite(self.std_error)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        if self.is_meta:
            return f"Estimate(meta, {self.method})"
        value = float(self.detach())
        digits = 6
        if self.std_error > 0 and math.isfinite(self.std_error) and value:
            digits = min(9, max(2, 2 + math.floor(math.log10(abs(value))) - math.floor(math.log10(self.std_error))))
        error = f"± {self.std_error:.2g}, {self.method}" if self.reliable else f"± inf, {self.method}, unreliable"
        return f"Estimate({value:.{digits}g} {error})"

    def __format__(self, spec: str) -> str:
        return float(self.detach()).__format__(spec) if spec else repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Estimate:
        return self.about(copy.deepcopy(self.as_subclass(Tensor), memo))


# torch.load with weights_only=True then reads a saved estimate, which holds a tensor, numbers and a name.
torch.serialization.add_safe_globals([Estimate])


def log_mean_exp(log_weights: Tensor, method: str, doubt: str | None = None) -> Estimate:
    r"""Estimates :math:`\log \mathbb{E}[w]` from the logarithms of independent weights.

    The standard error is that of the mean, relative to it (the delta method), plus what the weights' tail may hold
    beyond the largest one drawn. The effective sample size is :math:`(\sum w)^2 / \sum w^2`. If that is below 10, or
    1 % of the sample, or if the tail is too heavy for a mean (:mod:`ebflow_plugin.log_z.pareto`), a few weights
    dominate and the sample does not show what it missed: the value is nearly always too low, and its standard error
    is inf, with a warning.

    Arguments:
        log_weights: The logarithms of the weights, with shape ``(M,)``, at least two.
        method: The name of the method.
        doubt: Another reason not to trust the weights, as the predicate of a sentence.

    Example:
        >>> log_mean_exp(torch.tensor([0.0, 0.0, 0.0]), "importance")
        Estimate(0 ± 0, importance)
    """
    count = len(log_weights)
    log_weights = log_weights.detach().double()
    total = torch.logsumexp(log_weights, 0)
    shares = torch.exp(log_weights - total)  # they sum to one
    spread = ((count * shares - 1.0).square().sum() / (count - 1)).sqrt()
    size = 1.0 / float(shares.square().sum())
    error = float(spread) / math.sqrt(count)
    shape = pareto_k(log_weights)
    if size < min(max(TRUSTED, TRUSTED_SHARE * count), count / 4):
        doubt = f"has an effective sample size of {size:.1f} of {count}"
    elif shape is not None and shape > largest_believable_k(count) and size < count / 2:
        # With an effective sample size above half of the draws, the weights are alike, whatever the fitted shape.
        doubt = f"has weights with too heavy a tail for a mean of {count} (Pareto k = {shape:.2f})"
    elif shape is not None and error > 1e-12:
        # Beyond the largest of M weights a tail of shape k holds, in the mean, a further largest weight / (1 - k).
        error = math.hypot(error, (float(shares.max()) - 1.0 / count) / (1.0 - min(max(shape, 0.0), 0.9)))
    if doubt is not None:
        warnings.warn(
            f"{method} {doubt}: the estimate is unreliable, most likely too low by an unknown amount. Pass a proposal "
            "nearer to the model (proposal=data, or proposal=model.sample(1000)), more steps of annealing, or "
            "method='lanczos'.",
            EstimateWarning,
            stacklevel=2,
        )
        error = math.inf
    return Estimate.of(total - math.log(count), error, method, size, shape)


def mean_of(values: Tensor, method: str) -> Estimate:
    """Estimates a mean from independent values with shape ``(N,)``, at least two.

    Example:
        >>> mean_of(torch.tensor([1.0, 3.0]), "monte carlo")
        Estimate(2 ± 1, monte carlo)
    """
    spread = float(values.detach().double().std()) / math.sqrt(len(values))
    return Estimate.of(values.detach().double().mean().to(values.dtype), spread, method)
