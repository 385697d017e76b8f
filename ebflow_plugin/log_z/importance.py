r"""log Z by importance sampling: weighted samples of a proposal, which need only the model's energy."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

from ebflow_plugin.errors import InputError
from ebflow_plugin.linalg.random import at_least, rows_in_chunks, shown
from ebflow_plugin.log_z.estimate import Estimate, log_mean_exp
from ebflow_plugin.log_z.pareto import NARROW, too_narrow
from ebflow_plugin.log_z.proposals import Gaussian, Proposal, draw_from

__all__ = ["Energy", "finite_weights", "importance", "supported_weights"]

Energy = Callable[[Tensor], Tensor]
Shape = tuple[int, ...]

KEPT = 2**24  # the largest number of elements of the draws to test for their width


@torch.no_grad()
def importance(
    energy: Energy,
    shape: Shape,
    like: Tensor,
    *,
    samples: int = 1000,
    proposal: Gaussian | Proposal | None = None,
    batch_size: int | None = None,
    generator: Generator | None = None,
    progress: bool = False,
) -> Estimate:
    r"""Estimates log Z by importance sampling (Eqs. A5 and A6 of the paper).

    .. math:: Z \approx \frac1M \sum_j \frac{\exp(-E(x_j))}{q(x_j)}, \qquad x_j \sim q

    Unbiased for Z. The variance grows exponentially with the dimension unless q is close to the model. Three checks
    can make the standard error inf, with a warning: of the effective sample size, of the tail of the weights, and of
    whether a Gaussian q is wide enough (:mod:`ebflow_plugin.log_z.pareto`).

    Cost: M energies, and as many gradients and energies again for a Gaussian q and M ≥ 4 D.

    Arguments:
        energy: :math:`E`, from ``(B, *shape)`` to ``(B,)``.
        shape: The event shape.
        like: A tensor with the device and dtype to compute in.
        samples: The number M of samples, at least two.
        proposal: The density q; N(0, I) by default.
        batch_size: The largest number of samples at a time.
        generator: Draws the samples.
        progress: Shows a progress bar.

    Example:
        >>> half = lambda x: 0.5 * x.square().sum(1)
        >>> importance(half, (2,), torch.empty(0), samples=10).exp() / (2 * torch.pi)
        tensor(1.0000, dtype=torch.float64)
    """
    count = at_least(2, "samples", samples)
    density = Gaussian.standard(shape, like) if proposal is None else proposal
    weights, tested = [], []
    room = KEPT // max(1, math.prod(shape)) if isinstance(density, Gaussian) else 0
    for part in shown(list(rows_in_chunks(count, batch_size)), progress, "importance sampling"):
        x, log_q = draw_from(density, part.stop - part.start, shape, like, generator)
        weights.append(finite_weights(-energy(x) - log_q))
        tested.append(x[: max(0, room - part.start)])
    draws, log_weights = torch.cat(tested), supported_weights(torch.cat(weights))
    # Only a Gaussian has full support: a stretched draw of another one may lie where the energy is not defined.
    narrow = too_narrow(energy, draws, log_weights[: len(draws)], batch_size)
    return log_mean_exp(log_weights, "importance", NARROW if narrow else None)


def finite_weights(log_weights: Tensor) -> Tensor:
    """Raises if a weight is NaN or infinite."""
    bad = int((torch.isnan(log_weights) | (log_weights == math.inf)).sum())
    if bad:
        raise InputError(
            f"the energy is NaN or -inf at {bad} of {len(log_weights)} draws: the proposal reaches out of the model's "
            "domain, or the model's parameters are not finite. Pass a proposal inside the domain."
        )
    return log_weights


def supported_weights(log_weights: Tensor) -> Tensor:
    """Raises if all weights are zero. A weight of zero is a draw outside the model's support."""
    if bool((log_weights == -math.inf).all()):
        raise InputError("the energy is infinite at all draws: the proposal misses the model's support")
    return log_weights
