r"""log Z by importance sampling: weighted samples of a proposal, which need only the model's energy."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Generator, Tensor

from ebflow_plugin.chunks import over_rows, rows_in_chunks, with_progress
from ebflow_plugin.errors import InputError, NoInverseError
from ebflow_plugin.log_z.estimate import Estimate, log_mean_exp, rounding_error
from ebflow_plugin.log_z.proposals import Gaussian, Proposal, draw_from, log_density
from ebflow_plugin.options import at_least, check_generator
from ebflow_plugin.plan.inverse import draw
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.step import Shape

__all__ = ["importance"]


@torch.no_grad()
def importance(
    prefix: Plan,
    core: Plan,
    event_shape: Shape,
    like: Tensor,
    *,
    samples: int = 1000,
    proposal: Tensor | Gaussian | Proposal | None = None,
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
    if proposal is None:
        q: Gaussian | Proposal = Gaussian.standard(shape, like)
    elif isinstance(proposal, Tensor):
        q = Gaussian.fit(proposal)
    elif all(hasattr(proposal, name) for name in ("sample", "log_prob")):
        q = proposal
    else:
        kind = type(proposal).__name__
        raise InputError(f"proposal must be a tensor of data, or have sample and log_prob, got {kind}")

    def energy(x: Tensor) -> Tensor:
        return core.energy(x, None if context is None else context.expand(len(x), *context.shape[1:]))

    weights, sizes = [], []
    for part in with_progress(list(rows_in_chunks(count, batch_size)), progress, "importance sampling"):
        x, log_q = draw_from(q, part.stop - part.start, shape, like, generator)
        cost = energy(x)
        weights.append(-cost - log_q)
        sizes.append(cost.abs() + log_q.abs())
    log_weights = torch.cat(weights)
    _refuse_weights(log_weights)
    try:
        draws = draw(core, count, context, generator, like, batch_size=batch_size).reshape(count, *shape)
    except NoInverseError:
        model_weights = None
    else:
        model_weights = over_rows(lambda x, _: -energy(x) - log_density(q, x), draws, None, batch_size)
    rounding = rounding_error(log_weights, torch.cat(sizes), like.dtype)
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
