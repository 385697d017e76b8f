r"""log Z by importance sampling: weighted samples of a proposal, which need only the model's energy."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Generator, Tensor
from torch.distributions import Distribution, Independent, MultivariateNormal, Normal, TransformedDistribution
from torch.distributions.transforms import ReshapeTransform

from ebflow_plugin.chunks import over_rows
from ebflow_plugin.errors import InputError, NoInverseError
from ebflow_plugin.linalg.random import seeded_by
from ebflow_plugin.log_z.estimate import Estimate, log_mean_exp, weigh
from ebflow_plugin.options import at_least, check_generator
from ebflow_plugin.plan.inverse import draw
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.step import Shape


@torch.no_grad()
def importance(
    prefix: Plan,
    core: Plan,
    event_shape: Shape,
    like: Tensor,
    *,
    samples: int = 1000,
    proposal: Tensor | Proposal | None = None,
    context: Tensor | None = None,
    batch_size: int | None = None,
    generator: Generator | None = None,
    progress: bool = False,
) -> Estimate:
    r"""Estimates log Z by importance sampling (Eqs. A5 and A6 of the paper).

    .. math:: Z \approx \frac1M \sum_j \frac{\exp(-E(x_j))}{q(x_j)}, \qquad x_j \sim q

    Unbiased for Z. The variance grows exponentially with the dimension unless q is close to the model. As many samples
    of the model, by its inverse, judge the standard error, which is inf, with a warning, if it cannot be trusted, or if
    the model has no inverse (:func:`~ebflow_plugin.log_z.estimate.log_mean_exp`).

    Cost: M samples of the model, and 2 M energies.

    Arguments:
        prefix: The plan of the model's preprocessing.
        core: The plan of the matched variable.
        event_shape: The shape of one data point.
        like: A tensor with the device and dtype of the model.
        samples: The number M of samples, at least two.
        proposal: The density q of the matched variable: N(0, I) by default; points, to which a Gaussian is fitted; or
            anything with ``sample`` and ``log_prob``, such as a ``torch.distributions.Distribution``.
        context: A context, of one row, since log Z is the same for all.
        batch_size: The largest number of samples at a time.
        generator: Draws the samples.
        progress: Shows a progress bar.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(8), distributions.StandardNormal([8])))
        >>> found = importance(model.prefix, model.core, (8,), model.like())
        >>> found.reliable, abs(found.value) < 1e-5
        (True, True)
    """
    check_generator(generator)
    count = at_least(2, "samples", samples)
    if context is not None and (not isinstance(context, Tensor) or context.dim() == 0 or len(context) != 1):
        got = tuple(context.shape) if isinstance(context, Tensor) else type(context).__name__
        raise InputError(f"log_z needs a context of one row, got {got}; log Z is the same for all contexts")
    shape = prefix.latent_shapes(event_shape)[0]
    q = gaussian(shape, like) if proposal is None else proposal
    if isinstance(q, Tensor):
        q = gaussian_of(q)
    if not all(hasattr(q, name) for name in ("sample", "log_prob")):
        raise InputError(f"proposal must be a tensor of data, or have sample and log_prob, got {type(q).__name__}")

    def energy(x: Tensor) -> Tensor:
        return core.energy(x, None if context is None else context.expand(len(x), *context.shape[1:]))

    def drawn(rows: int) -> tuple[Tensor, Tensor]:
        x, log_q = draw_from(q, rows, shape, like, generator)
        return -energy(x), log_q

    log_weights, rounding = weigh(drawn, count, batch_size, progress)
    _refuse_weights(log_weights)
    try:
        draws = draw(core, count, context, generator, like, batch_size=batch_size).reshape(count, *shape)
    except NoInverseError:
        model_weights = None
    else:
        model_weights = over_rows(lambda x, _: -energy(x) - log_density(q, x), draws, None, batch_size)
    estimate = log_mean_exp(log_weights, model_weights, rounding)
    fixed = sum(float(log_det) for _, log_det in prefix.log_dets(event_shape, like))  # of the preprocessing
    return replace(estimate, value=estimate.value - fixed)


def _refuse_weights(log_weights: Tensor) -> None:
    """Raises if a weight is NaN or infinite, or if all are zero: a weight of zero is a draw outside the support."""
    bad = int((torch.isnan(log_weights) | (log_weights == math.inf)).sum())
    if bad:
        raise InputError(
            f"the energy is NaN or -inf at {bad} of {len(log_weights)} draws: the proposal reaches out of the model's "
            "domain, or the model's parameters are not finite. Pass a proposal inside the domain."
        )
    if bool((log_weights == -math.inf).all()):
        raise InputError("the energy is infinite at all draws: the proposal misses the model's support")


class Proposal(Protocol):
    """Any object with these two methods over complete events, such as a ``torch.distributions.Distribution``."""

    def sample(self, sample_shape: Any) -> Tensor:
        """Draws samples with shape ``(*sample_shape, *event_shape)``."""

    def log_prob(self, value: Tensor) -> Tensor:
        """The log-density of each sample, with shape ``sample_shape``."""


def gaussian(shape: Shape, like: Tensor, mean: Tensor | float = 0.0, scale: Tensor | None = None) -> Distribution:
    r"""A Gaussian over events of this shape, with the device and dtype of ``like``: N(0, I) by default.

    Arguments:
        shape: The event shape.
        like: A tensor.
        mean: The mean, with shape ``(D,)``.
        scale: The standard deviations, with shape ``(D,)``, or a lower triangle L, with shape ``(D, D)``, for the
            covariance :math:`L L^\top`.

    Example:
        >>> gaussian((2,), torch.empty(0)).log_prob(torch.zeros(1, 2)).exp() * 2 * torch.pi
        tensor([1.0000])
    """
    size = math.prod(shape)
    mean, scale = like.new_zeros(size) + mean, like.new_ones(size) if scale is None else scale
    if scale.dim() == 1:
        flat: Distribution = Independent(Normal(mean, scale, validate_args=False), 1, validate_args=False)
    else:
        flat = MultivariateNormal(mean, scale_tril=scale, validate_args=False)
    return TransformedDistribution(flat, ReshapeTransform(torch.Size((size,)), torch.Size(shape)), validate_args=False)


def gaussian_of(data: Tensor) -> Distribution:
    """The Gaussian with the moments of data ``(N, *)``: with a full covariance if N ≥ 2 D, else a diagonal one.

    Cost: O(N·D² + D³) for a full covariance, O(N·D) for a diagonal one.
    """
    rows = data.detach().flatten(1)
    if len(rows) < 2:
        raise InputError(f"a Gaussian is fitted to at least 2 data points, got {len(rows)}")
    mean, scale = rows.mean(0), rows.std(0)
    if not bool(((scale > 0) & torch.isfinite(scale)).all()):
        raise InputError("no Gaussian fits the data: a feature is constant, or not finite")
    if len(rows) >= 2 * rows.shape[1]:
        scaled = (rows - mean) / scale  # correlations, so that features of any scale are treated alike
        lower, failed = torch.linalg.cholesky_ex(scaled.mT @ scaled / (len(rows) - 1))
        if bool(failed):
            raise InputError("no Gaussian fits the data: its features are linearly dependent")
        scale = lower * scale[:, None]
    return gaussian(tuple(data.shape[1:]), rows, mean, scale)


def draw_from(
    proposal: Proposal, count: int, shape: tuple[int, ...], like: Tensor, generator: Generator | None
) -> tuple[Tensor, Tensor]:
    """Draws samples ``(count, *shape)`` and their log-densities ``(count,)``, and raises on other shapes.

    Example:
        >>> x, log_q = draw_from(gaussian((2,), torch.empty(0)), 3, (2,), torch.empty(0), None)
        >>> x.shape, log_q.shape
        (torch.Size([3, 2]), torch.Size([3]))
    """
    with seeded_by(generator, like.device):
        x = proposal.sample((count,)).to(like)
    if x.shape != (count, *shape):
        raise InputError(f"the proposal draws samples of shape {tuple(x.shape[1:])}, the model takes {shape}")
    return x, log_density(proposal, x)


def log_density(proposal: Proposal, x: Tensor) -> Tensor:
    """The log-density of each row of x, ``(B,)``: -inf outside the support of a ``torch.distributions`` proposal.

    Example:
        >>> unit = torch.distributions.Uniform(torch.zeros(2), torch.ones(2))
        >>> log_density(torch.distributions.Independent(unit, 1), torch.tensor([[0.5, 0.5], [0.5, 1.5]]))
        tensor([0., -inf])
    """
    inside = x.new_ones(len(x), dtype=torch.bool)
    if isinstance(proposal, Distribution):
        with suppress(NotImplementedError):  # of one that does not define its support
            found = proposal.support.check(x)  # type: ignore[union-attr]
            inside = found if found.shape == inside.shape else inside
    rows = x[inside]
    density = proposal.log_prob(rows)
    if density.shape != (len(rows),):
        raise InputError(
            f"the proposal's log_prob returns shape {tuple(density.shape)} for {len(rows)} samples, not "
            f"({len(rows)},): wrap it in torch.distributions.Independent"
        )
    return x.new_full((len(x),), -math.inf).masked_scatter(inside, density.to(x))
