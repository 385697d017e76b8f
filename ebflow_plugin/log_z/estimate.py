"""An estimate with its standard error, and the judge of weighted ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ebflow_plugin.chunks import rows_in_chunks, with_progress
from ebflow_plugin.errors import EstimateWarning, warn

# The smallest effective sample size for which a standard error can be trusted: this many, and this share of all draws.
TRUSTED, TRUSTED_SHARE = 10.0, 0.01


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error.

    Attributes:
        value: The estimate.
        std_error: Its standard error: inf if it cannot be trusted.
        method: The method of estimation.
        effective_sample_size: The effective sample size of a weighted estimate; else None.

    Example:
        >>> Estimate(2.0, std_error=0.25, method="importance")
        Estimate(2 ± 0.25, importance)
    """

    value: float
    std_error: float
    method: str
    effective_sample_size: float | None = None

    @property
    def reliable(self) -> bool:
        """Whether the standard error can be trusted; if not, it is inf, and a warning was issued."""
        return math.isfinite(self.std_error)

    def __float__(self) -> float:
        return self.value

    def __repr__(self) -> str:
        digits = 6
        if self.std_error > 0 and self.reliable and self.value:
            size, error = (math.floor(math.log10(abs(number))) for number in (self.value, self.std_error))
            digits = min(9, max(2, 2 + size - error))
        doubt = "" if self.reliable else ", unreliable"
        return f"Estimate({self.value:.{digits}g} ± {self.std_error:.2g}, {self.method}{doubt})"


ADVICE = "Pass a proposal nearer to the model (proposal=data, or proposal=model.sample(1000)), or method='lanczos'."


def log_mean_exp(
    log_weights: Tensor,
    model_weights: Tensor | None,
    rounding: float = 0.0,
    *,
    tail: float | None = None,
    advice: str = ADVICE,
) -> Estimate:
    r"""Estimates log Z, the logarithm of the mean of the weights :math:`w = \exp(-E) / q` over draws of q.

    Draws that missed a part of the model cannot show that they missed it, so draws of the model p itself judge them.
    With :math:`u = w / Z`, each part of the variance is taken from the draws that fall there more often:

    .. math:: \mathrm{Var}_q(u) = \mathbb{E}_q[(u - 1)^2;\ u \le 1] + \mathbb{E}_p[(u - 1)^2 / u;\ u > 1]

    What N draws of the model do not show holds about 1 / N of Z. They also estimate Z, by
    :math:`\mathbb{E}_p[1 / w] = 1 / Z`, and both estimates have to agree.

    The effective sample size is :math:`M / (1 + \mathrm{Var}(u))`. If that is below 10, or 1 % of the sample, if both
    estimates differ by more than four standard errors, or if there are no draws of the model, the value is most likely
    too low, and its standard error is inf, with a warning. Where no draws can exist, the ``tail`` of the weights judges
    in their place.

    Arguments:
        log_weights: The logarithms of the weights of draws of q, with shape ``(M,)``, at least two.
        model_weights: Those of draws of the model, with shape ``(N,)``; None if there are none.
        rounding: The size of the rounding errors of the logarithms, which is included in the standard error.
        tail: The :func:`pareto_k` of the weights, to judge them too; without draws of the model, by it alone.
        advice: What to do about an unreliable estimate, for the warning.

    Example:
        >>> log_mean_exp(torch.zeros(3), torch.zeros(3))
        Estimate(0 ± 0, importance)
    """
    count, log_weights = len(log_weights), log_weights.detach().double()
    value = torch.logsumexp(log_weights, 0) - math.log(count)
    drawn = log_weights - value  # log u
    variance, doubt = float(drawn.exp().var()), None
    if tail is not None and tail > min(0.7, 1.0 - 1.0 / math.log10(max(count, 11))):
        doubt = f"has weights with a heavy tail (Pareto k = {tail:.2f})"
    if model_weights is None and tail is None:
        doubt, advice = "has no draws of the model to judge its own by", "The model has no inverse: use method='exact'."
    elif model_weights is not None:
        model = model_weights.detach().double() - value
        variance = max(variance, _variance(drawn, model))
        gap = float(math.log(len(model)) - torch.logsumexp(-model, 0))  # of the estimate by draws of the model
        error = math.hypot(math.sqrt(variance / count + _variance(-model, -drawn) / len(model)), rounding)
        if not abs(gap) <= 4.0 * error:
            doubt = f"differs by {gap:.2g} from the estimate by draws of the model"
    size = count / (1.0 + variance)
    if not size >= min(max(TRUSTED, TRUSTED_SHARE * count), count / 4):
        doubt = f"has an effective sample size of {size:.1f} of {count}"
    if doubt is not None:
        warn(
            f"log Z by importance {doubt}: the estimate is unreliable, most likely far too low. {advice}",
            EstimateWarning,
        )
    error = math.inf if doubt is not None else math.hypot(math.sqrt(variance / count), rounding)
    return Estimate(float(value), error, "importance", size)


def weigh(
    draw: Callable[[int], tuple[Tensor, Tensor]], count: int, batch_size: int | None, progress: bool
) -> tuple[Tensor, float]:
    """Draws in chunks, and returns log f - log q of each draw, and the size of the rounding errors of log Z.

    Draws far from the target have densities of any size, and no weight: their rounding does not count.

    Arguments:
        draw: Makes this many draws; returns log f and log q of each, as they were computed.
        count: The number of all draws.
        batch_size: The largest number at a time.
        progress: Shows a progress bar.

    Example:
        >>> weights, rounding = weigh(lambda n: (torch.tensor([2.0, -1e30]), torch.zeros(n)), 2, None, False)
        >>> rounding == 2.0 * torch.finfo(torch.float32).eps
        True
    """
    parts = [
        draw(part.stop - part.start)
        for part in with_progress(list(rows_in_chunks(count, batch_size)), progress, "importance sampling")
    ]
    log_f, log_q = (torch.cat(each) for each in zip(*parts, strict=True))
    eps, log_f, log_q = torch.finfo(log_q.dtype).eps, log_f.double(), log_q.double()
    shares = (log_f - log_q).softmax(0)
    rounding = eps * float(torch.where(shares == 0, 0.0, shares * (log_f.abs() + log_q.abs())).sum())
    return log_f - log_q, rounding


def _variance(log_ratio: Tensor, other: Tensor) -> float:
    """The variance of a ratio of densities, a / b, from its logarithms at draws of b, and, where it is large, of a."""
    small = torch.where(log_ratio <= 0, torch.expm1(log_ratio).square(), 0.0).mean()
    large = torch.where(other > 0, (2.0 * torch.sinh(0.5 * other)).square(), 0.0).mean()  # (u - 1)² / u
    return float(small + large)


def pareto_k(log_weights: Tensor, rounding: float = 0.0) -> float:
    r"""The shape k̂ of a generalised Pareto distribution, fitted to the largest weights (Zhang and Stephens, 2009).

    Weights have about 1 / k̂ finite moments. Fitted to the largest :math:`\min(n / 5, 3 \sqrt n)` of them, with the weak
    prior of Vehtari et al. (2024). Fewer than five distinct ones, or equal ones, have no tail: -inf. So have weights
    that differ by no more than a hundred times the ``rounding`` error of their logarithms, those of a perfect model.

    Example:
        >>> uniform = torch.rand(100_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> round(pareto_k(-0.4 * uniform.log()), 1)  # 1 / u^0.4
        0.4
    """
    logs = log_weights.detach().double().cpu()
    size = math.ceil(min(0.2 * len(logs), 3.0 * math.sqrt(len(logs))))
    if size < 5:
        return -math.inf
    top = torch.topk(logs, size + 1).values.flip(0)
    excess = (top[1:] - top[-1]).exp() - (top[0] - top[-1]).exp()  # over the largest weight left out
    if not bool(excess[-1] > max(1e-12, 100.0 * rounding)) or not bool(excess[0] >= 0):
        return -math.inf
    excess = excess.clamp_min(torch.finfo(excess.dtype).tiny)
    grid = 30 + int(math.sqrt(size))
    steps = torch.arange(1, grid + 1, dtype=excess.dtype, device=excess.device)
    quartile = excess[max(0, int(size / 4 + 0.5) - 1)].clamp_min(1e-12 * float(excess[-1]))
    theta = 1.0 / excess[-1] + (1.0 - (grid / (steps - 0.5)).sqrt()) / (3.0 * quartile)
    shapes = torch.log1p(-theta[:, None] * excess).mean(1)
    likelihood = size * ((-theta / shapes).log() - shapes - 1.0)
    mean = float((theta * likelihood.softmax(0)).sum())
    shape = float(torch.log1p(-mean * excess).mean())
    return (shape * size + 5.0) / (size + 10.0)
