r"""An unnormalised target density, by samples of a model: importance weights, and independence Metropolis."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from ebflow_plugin.chunks import over_rows
from ebflow_plugin.errors import InputError
from ebflow_plugin.linalg.memo import free_to_read
from ebflow_plugin.linalg.random import uniform_like
from ebflow_plugin.log_z.estimate import Estimate, log_mean_exp, pareto_k, weigh
from ebflow_plugin.model import EBFlow
from ebflow_plugin.options import at_least, check_generator
from ebflow_plugin.plan.inputs import refuse_other_models

LogDensity = Callable[[Tensor], Tensor]


class MetropolisChain(NamedTuple):
    """A chain of independence Metropolis.

    Attributes:
        samples: Its states, ``(n, *)``: a rejected proposal repeats the state before it.
        acceptance: The share of proposals that were accepted.
    """

    samples: Tensor
    acceptance: float


@dataclass(frozen=True, repr=False, eq=False)
class WeightedSamples:
    r"""Samples of a model with their importance weights for a target, from :func:`importance`.

    Attributes:
        samples: Independent samples of the model q, ``(n, *)``.
        log_weights: log f(x) - log q(x) of the unnormalised target f, ``(n,)``, in double precision.
        reference_log_weights: Those of samples of the target, ``(M,)``, which judge the others; None without any.
        rounding: The size of their rounding errors.
    """

    samples: Tensor
    log_weights: Tensor
    reference_log_weights: Tensor | None = None
    rounding: float = 0.0

    @cached_property
    def pareto_k(self) -> float:
        """The shape of the tail of the weights: below 0.7 their mean can be trusted, below 0.5 their variance."""
        return pareto_k(self.log_weights, self.rounding)

    @cached_property
    def log_z(self) -> Estimate:
        r"""The estimate of :math:`\log \int f`, with its standard error. Judged when it is first read, not before."""
        return log_mean_exp(
            self.log_weights,
            self.reference_log_weights,
            self.rounding,
            tail=self.pareto_k,
            advice="Train the model longer, or by forward KL on its weighted samples (see ebflow_plugin.importance).",
        )

    @property
    def weights(self) -> Tensor:
        """The self-normalised weights, ``(n,)``, whose sum is one: for ``ML(model)(samples, weights=weights)``."""
        return self.log_weights.softmax(0)

    @property
    def effective_sample_size(self) -> float:
        r"""The effective sample size, of n: :math:`(\sum w)^2 / \sum w^2`, or less if reference samples say so."""
        assert self.log_z.effective_sample_size is not None
        return self.log_z.effective_sample_size

    @property
    def reliable(self) -> bool:
        """Whether the standard errors can be trusted; if not, they are inf, and a warning was issued."""
        return self.log_z.reliable

    def expectation(self, function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        r"""Estimates the mean of a function under the target, self-normalised, with its standard error.

        .. math:: \mu = \sum_i \bar w_i\, h(x_i), \qquad \sigma^2 = \sum_i \bar w_i^2 (h(x_i) - \mu)^2

        Arguments:
            function: Maps samples ``(n, *)`` to values ``(n, *)`` of any shape.

        Returns:
            The mean and its standard error, with the shape of one value.
        """
        with torch.no_grad():
            values = function(self.samples).double()
        if values.dim() == 0 or len(values) != len(self.samples):
            raise InputError(f"the function must return {len(self.samples)} rows, got shape {tuple(values.shape)}")
        weights = self.weights.reshape(-1, *[1] * (values.dim() - 1))
        values = torch.where(weights == 0, 0.0, values)  # outside the support of the target it may be anything
        mean = (weights * values).sum(0)
        error = (weights * (values - mean)).square().sum(0).sqrt()
        return mean, error if self.reliable else torch.full_like(error, math.inf)

    def metropolis(self, *, generator: Generator | None = None) -> MetropolisChain:
        r"""Runs a chain of independence Metropolis whose proposals are the samples, in their order.

        A proposal x' is accepted with probability :math:`\min(1, w(x') / w(x))`. The density of the chain tends to the
        target, without the bias of self-normalisation. The first sample is the start. Nothing is evaluated again.
        """
        logs, drawn = self.log_weights.cpu(), uniform_like(self.log_weights, generator).log().tolist()
        heights, place, path, accepted = logs.tolist(), 0, [], 0
        while heights[place] == -math.inf:  # a start outside of the support
            place += 1
        for proposal in range(place + 1, len(heights)):
            path.append(place)
            if drawn[proposal] < heights[proposal] - heights[place]:
                place, accepted = proposal, accepted + 1
        path.append(place)
        picked = torch.tensor(path, device=self.samples.device)
        return MetropolisChain(self.samples[picked], accepted / max(1, len(path) - 1))

    def __repr__(self) -> str:
        return (
            f"WeightedSamples({len(self.samples)}, effective {self.effective_sample_size:.1f}, log Z {self.log_z}, "
            f"Pareto k {self.pareto_k:.2f})"
        )


@torch.no_grad()
def importance(
    model: EBFlow,
    log_density: LogDensity,
    n: int,
    *,
    reference: Tensor | None = None,
    batch_size: int | None = None,
    generator: Generator | None = None,
    progress: bool = False,
) -> WeightedSamples:
    r"""Samples an unnormalised density f by importance sampling, with a model as the proposal.

    .. math:: w_i = f(x_i) / q(x_i), \quad x_i \sim q, \qquad Z = \int f \approx \frac1n \sum_i w_i

    The standard errors can be trusted only where the model covers the target. Without ``reference``, the weights alone
    are the judge: if their effective sample size is below 10 or 1 % of n, or the tail of the weights is too heavy
    (Pareto k̂ above :math:`\min(0.7, 1 - 1 / \log_{10} n)`, Vehtari et al. 2024), the errors are inf, with a warning
    when one is first read.
    That shows a part of the target that the model covers too thinly, but no part that no sample has reached: a mode
    that reverse KL dropped. Samples of the target, from a long chain say, show that too.

    Cost: n samples of the model and n values of its log-density, with one factorisation of each linear layer.

    Samples of the model with ``weights`` train it by forward KL, which spreads over the modes that it begins to see::

        drawn = ebf.importance(model, log_density, 4096)
        ebf.objectives.ML(model)(drawn.samples, weights=drawn.weights).backward()

    Arguments:
        model: A wrapped flow (:func:`~ebflow_plugin.wrap`) whose steps all have an inverse.
        log_density: Maps ``(B, *)`` to log f, ``(B,)``; -inf where f is zero.
        n: The number of samples, at least two.
        reference: Samples of the target, ``(M, *)``, which judge the weights.
        batch_size: The largest number of samples at a time.
        generator: Draws the samples, which depend on ``batch_size`` too.
        progress: Shows a progress bar.

    References:
        Pareto smoothed importance sampling (Vehtari et al., 2024), https://arxiv.org/abs/1507.02646

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> drawn = importance(model, lambda x: -0.5 * x.square().sum(1), 1000)
        >>> abs(drawn.log_z.value - math.log(2 * math.pi)) < 1e-4, drawn.reliable
        (True, True)
        >>> mean, error = drawn.expectation(lambda x: x)
        >>> drawn.metropolis().acceptance > 0.99
        True
    """
    refuse_other_models("importance", model)
    refuse_integers("importance", model)
    check_generator(generator)
    count = at_least(2, "n", n)

    samples = []

    def densities(x: Tensor) -> tuple[Tensor, Tensor]:
        return log_density_of(log_density, x, support=True), model.log_prob(x)

    def drawn(rows: int) -> tuple[Tensor, Tensor]:
        samples.append(model.sample(rows, generator=generator))
        return densities(samples[-1])

    def log_weight(x: Tensor, _: Tensor | None) -> Tensor:
        log_f, log_q = densities(x)
        return log_f.double() - log_q.double()

    log_weights, rounding = weigh(drawn, count, batch_size, progress)
    if bool((log_weights == -math.inf).all()):
        raise InputError("log_density is -inf at all samples of the model: the model misses the target's support")
    judge = None
    if reference is not None:
        judge = over_rows(log_weight, model.check(reference), None, batch_size)
    return WeightedSamples(torch.cat(samples), log_weights, judge, rounding)


def log_density_of(log_density: LogDensity, x: Tensor, *, support: bool = False) -> Tensor:
    """Calls a target, and raises on a wrong shape, and on NaN or inf (on the CPU alone: elsewhere, the loss shows it).

    Arguments:
        log_density: The target.
        x: Samples of a model, ``(B, *)``.
        support: Whether -inf is allowed, outside of the support of the target.

    Example:
        >>> log_density_of(lambda x: x, torch.zeros(3, 2))
        Traceback (most recent call last):
        ebflow_plugin.errors.InputError: log_density must return shape (3,), one value for each sample, got (3, 2)
    """
    values = log_density(x)
    if not isinstance(values, Tensor) or values.shape != x.shape[:1]:
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise InputError(f"log_density must return shape ({len(x)},), one value for each sample, got {got}")
    if free_to_read(values):
        good = torch.isfinite(values) | (values == -math.inf) if support else torch.isfinite(values)
        if not bool(good.all()):
            raise InputError(
                f"log_density is NaN or inf at {int((~good).sum())} of {len(x)} samples of the model, where the target "
                "needs a finite value"
            )
    return values


def refuse_integers(name: str, model: EBFlow) -> None:
    """Raises if the data of a model are integers, which have no density."""
    if model.dequantize is not None:
        raise InputError(f"{name} needs a model with a density, and the data of this one are integers (Dequantize)")
