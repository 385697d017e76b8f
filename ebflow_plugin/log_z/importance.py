r"""log Z by importance sampling: weighted samples of a proposal, which see the model through its energy alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

from ebflow_plugin.errors import InputError
from ebflow_plugin.linalg.random import at_least, rows_in_chunks, shown
from ebflow_plugin.log_z.estimate import Estimate, log_mean_exp
from ebflow_plugin.log_z.pareto import too_narrow
from ebflow_plugin.log_z.proposals import Gaussian, Proposal, draw_from

__all__ = ["Energy", "finite_weights", "importance", "supported_weights"]

Energy = Callable[[Tensor], Tensor]
Shape = tuple[int, ...]

KEPT = 2**24  # numbers of draws that are kept to be looked at
NARROW = "found the model wider than its draws reach"


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

    Unbiased for Z. The variance grows exponentially with the dimension unless q is close to the model. Three things
    are looked at, any of which makes the standard error inf, with a warning: the effective sample size, the tail of the
    weights, and whether a Gaussian q is wide enough (:mod:`ebflow_plugin.log_z.pareto`).

    Cost: M energies, and as many gradients and energies again for a Gaussian q and M ≥ 4 D.

    Arguments:
        energy: :math:`E`, from ``(B, *shape)`` to ``(B,)``.
        shape: The event shape.
        like: A tensor with the device and dtype to compute in.
        samples: The number M of samples, at least two.
        proposal: The density q; N(0, I) by default.
        batch_size: At most how many samples at a time.
        generator: Draws the samples.
        progress: Shows a bar.

    Example:
        >>> half = lambda x: 0.5 * x.square().sum(1)
        >>> importance(half, (2,), torch.empty(0), samples=10).exp() / (2 * torch.pi)
        tensor(1.0000, dtype=torch.float64)
    """
    count = at_least(2, "samples", samples)
    density = Gaussian.standard(shape, like) if proposal is None else proposal
    weights, kept = [], []
    room = KEPT // max(1, math.prod(shape)) if isinstance(density, Gaussian) else 0
    for part in shown(list(rows_in_chunks(count, batch_size)), progress, "importance sampling"):
        x, log_q = draw_from(density, part.stop - part.start, shape, like, generator)
        weights.append(finite_weights(-energy(x) - log_q))
        kept.append(x[: max(0, room - part.start)])
    looked_at, log_weights = torch.cat(kept), supported_weights(torch.cat(weights))
    # Only a Gaussian reaches everywhere: a stretched draw of another one may lie where the energy is not defined.
    narrow = too_narrow(energy, looked_at, log_weights[: len(looked_at)], batch_size)
    return log_mean_exp(log_weights, "importance", NARROW if narrow else None)


def finite_weights(log_weights: Tensor) -> Tensor:
    """Refuses NaN, which no weight can be."""
    bad = int((torch.isnan(log_weights) | (log_weights == math.inf)).sum())
    if bad:
        raise InputError(
            f"the energy is NaN or -inf at {bad} of {len(log_weights)} draws: the proposal reaches out of the model's "
            "domain, or the model's parameters are not finite. Pass a proposal that stays inside."
        )
    return log_weights


def supported_weights(log_weights: Tensor) -> Tensor:
    """Refuses weights that are all zero; one of zero is a point outside of the model's support."""
    if bool((log_weights == -math.inf).all()):
        raise InputError("the energy is infinite at all draws: the proposal misses the model's support")
    return log_weights
