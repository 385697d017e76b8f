"""A number with its error bar."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import torch
from torch import Tensor

__all__ = ["TRUSTED", "Estimate", "log_mean_exp", "mean_of"]

# From which effective sample size on an error bar means something: this many, and this share of all. Below, errors of
# 10 standard errors were measured.
TRUSTED, TRUSTED_SHARE = 10.0, 0.01


class Estimate(Tensor):
    r"""A scalar tensor that knows how far it may be off. Whatever is computed from it is a plain tensor.

    Attributes:
        std_error: The standard error: 0 for an exact value.
        method: How the value was found.
        effective_sample_size: How many independent draws the weights of a weighted estimate are worth; else None.

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

    # As for nn.Parameter: results are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(
        cls, value: Tensor, std_error: float = 0.0, method: str = "exact", effective_sample_size: float | None = None
    ) -> Estimate:
        """Gives a scalar its error. The graph of the value, if it has one, stays."""
        estimate = value.reshape(()).as_subclass(cls)
        estimate.std_error = std_error
        estimate.method = method
        estimate.effective_sample_size = effective_sample_size
        return estimate

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        if self.is_meta:
            return f"Estimate(meta, {self.method})"
        value = float(self.detach())
        digits = 6
        if self.std_error > 0 and math.isfinite(self.std_error) and value:
            digits = min(9, max(2, 2 + math.floor(math.log10(abs(value))) - math.floor(math.log10(self.std_error))))
        return f"Estimate({value:.{digits}g} ± {self.std_error:.2g}, {self.method})"

    def __format__(self, spec: str) -> str:
        return float(self.detach()).__format__(spec) if spec else repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Estimate:
        value = copy.deepcopy(self.as_subclass(Tensor), memo)
        return Estimate.of(value, self.std_error, self.method, self.effective_sample_size)


def log_mean_exp(log_weights: Tensor, method: str) -> Estimate:
    r"""Estimates :math:`\log \mathbb{E}[w]` from the logarithms of independent weights.

    The standard error is that of the mean, relative to it (the delta method), and the effective sample size is
    :math:`(\sum w)^2 / \sum w^2`. Where that is below 10, or 1 % of the sample, a few weights stand for all and the
    sample cannot tell what it missed: the value is nearly always too low, and its standard error is inf, with a
    warning.

    Arguments:
        log_weights: With shape ``(M,)``, at least two.
        method: The name that the estimate gets.

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
    if size < min(max(TRUSTED, TRUSTED_SHARE * count), count / 4):
        warnings.warn(
            f"{method} has an effective sample size of {size:.1f} of {count}: the estimate is too low, by nobody knows "
            "how much. Use a proposal nearer to the model (proposal=data), more steps of annealing, or "
            "method='lanczos'.",
            stacklevel=2,
        )
        error = math.inf
    return Estimate.of(total - math.log(count), error, method, size)


def mean_of(values: Tensor, method: str) -> Estimate:
    """Estimates a mean from independent values with shape ``(N,)``, at least two.

    Example:
        >>> mean_of(torch.tensor([1.0, 3.0]), "monte carlo")
        Estimate(2 ± 1, monte carlo)
    """
    spread = float(values.detach().double().std()) / math.sqrt(len(values))
    return Estimate.of(values.detach().double().mean().to(values.dtype), spread, method)
