r"""log Z by annealed importance sampling: chains that move from a Gaussian to the model."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from ebflow_plugin.linalg.random import at_least, gaussian_like, rows_in_chunks, shown, uniform_like
from ebflow_plugin.log_z.estimate import Estimate, log_mean_exp
from ebflow_plugin.log_z.importance import Energy, finite_weights, supported_weights
from ebflow_plugin.log_z.pareto import NARROW, too_narrow
from ebflow_plugin.log_z.proposals import Gaussian, standard_log_prob
from ebflow_plugin.plan.inputs import positive

__all__ = ["annealed"]

Shape = tuple[int, ...]


def annealed(
    energy: Energy,
    shape: Shape,
    like: Tensor,
    *,
    steps: int = 100,
    chains: int = 100,
    leapfrogs: int = 3,
    start: Gaussian | None = None,
    step_size: float | None = None,
    batch_size: int | None = None,
    generator: Generator | None = None,
    progress: bool = False,
) -> Estimate:
    r"""Estimates log Z by annealed importance sampling.

    From a Gaussian q, chains move through :math:`f_t = q^{1 - \beta_t} \exp(-E)^{\beta_t}` with
    :math:`\beta_t` from 0 to 1, one Metropolis-adjusted Hamiltonian transition at each; the weight of a chain is
    :math:`\prod_t f_{t}(x_{t - 1}) / f_{t-1}(x_{t - 1})`. Unbiased for Z, whatever the transitions.

    The chains run in the coordinates in which q is N(0, I), so a fitted q is their preconditioner. The step size at
    each temperature is tuned in a separate pilot run, which keeps the weights unbiased.

    The weights, and the ends of the chains, are checked as for :func:`importance`.

    Cost: ``steps · chains · leapfrogs`` gradients of the energy, and a quarter more for the pilot.

    Arguments:
        energy: :math:`E`, from ``(B, *shape)`` to ``(B,)``, differentiable.
        shape: The event shape.
        like: A tensor with the device and dtype to compute in.
        steps: The number of temperatures.
        chains: The number of chains, at least two.
        leapfrogs: Leapfrog steps in a transition; a single one makes it a Langevin step (MALA).
        start: The Gaussian q; N(0, I) by default.
        step_size: The leapfrog step size; tuned by a pilot run by default.
        batch_size: The largest number of chains at a time.
        generator: Draws the chains.
        progress: Shows a progress bar.

    References:
        | Annealed Importance Sampling (Neal, 1998): https://arxiv.org/abs/physics/9803008

    Example:
        >>> half = lambda x: 0.5 * x.square().sum(1)
        >>> annealed(half, (2,), torch.empty(0), steps=3, chains=4).exp() / (2 * torch.pi)
        tensor(1.0000, dtype=torch.float64)
    """
    count = at_least(2, "chains", chains)
    path = _Path(
        energy, Gaussian.standard(shape, like) if start is None else start, at_least(1, "leapfrogs", leapfrogs)
    )
    betas = [(t + 1) / steps for t in range(at_least(1, "steps", steps))]
    if step_size is None:
        pilot = max(8, count // 4) if batch_size is None else min(max(8, count // 4), batch_size)
        sizes = path.tune(betas, pilot, generator, progress)
    else:
        sizes = [positive("step_size", step_size)] * steps
    chunks = [
        path.weights(betas, sizes, part.stop - part.start, generator, progress)
        for part in rows_in_chunks(count, batch_size)
    ]
    ends, weights = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    log_weights = supported_weights(finite_weights(weights))
    narrow = too_narrow(path.energy, ends, log_weights, batch_size)
    return log_mean_exp(log_weights, "ais", NARROW if narrow else None)


class _Path:
    """The annealing path from the Gaussian to the energy, in the coordinates in which the Gaussian is N(0, I)."""

    target = 0.7  # acceptance rate: between the optima of Langevin (0.574) and of long Hamiltonian paths (0.8)

    def __init__(self, energy: Energy, start: Gaussian, leapfrogs: int) -> None:
        self._energy, self._leapfrogs = energy, leapfrogs
        with torch.inference_mode(False):  # copies, since gradients pass through them
            self._start = Gaussian(start.mean.clone(), start.scale.clone())

    def energy(self, z: Tensor) -> Tensor:
        """The energy in these coordinates, up to a constant."""
        return self._energy(self._start.place(z))

    def weights(
        self, betas: list[float], sizes: list[float], count: int, generator: Generator | None, progress: bool
    ) -> tuple[Tensor, Tensor]:
        """The ends of new chains, and the logarithms of their weights."""
        z = self._noise(count, generator)
        log_weight = torch.zeros_like(z[:, 0])
        gap, slope = self._gap(z)
        before = 0.0
        for beta, size in shown(list(zip(betas, sizes, strict=True)), progress, "annealing"):
            log_weight = log_weight + (beta - before) * gap
            before = beta
            if beta < 1.0:  # a move after the last weight would not change it
                z, gap, slope, _ = self._move(z, gap, slope, beta, size, generator)
        return z, log_weight

    def tune(self, betas: list[float], count: int, generator: Generator | None, progress: bool) -> list[float]:
        """Tunes the step size at each temperature, with separate chains."""
        z = self._noise(count, generator)
        gap, slope = self._gap(z)
        size, sizes = z.shape[1] ** -0.25, []
        for t, beta in enumerate(shown(betas, progress, "pilot")):
            for _ in range(8 if t == 0 else 1):
                z, gap, slope, accepted = self._move(z, gap, slope, beta, size, generator)
                size *= math.exp(accepted - self.target)
            sizes.append(size)
        return sizes

    def _noise(self, count: int, generator: Generator | None) -> Tensor:
        return gaussian_like(self._start.mean.new_empty(count, self._start.mean.numel()), generator)

    def _gap(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The logarithm of exp(-E) over q, in these coordinates, and its gradient."""
        with torch.inference_mode(False), torch.enable_grad():
            z = z.detach().clone().requires_grad_()
            gap = -self.energy(z) + self._start.log_volume - standard_log_prob(z)
            (slope,) = torch.autograd.grad(gap.sum(), z)
        return gap.detach(), slope

    def _move(
        self, z: Tensor, gap: Tensor, slope: Tensor, beta: float, size: float, generator: Generator | None
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        """One Hamiltonian transition that leaves the density at ``beta`` invariant, and its mean acceptance."""
        momentum = gaussian_like(z, generator)
        new, new_gap, new_slope = z, gap, slope
        kick = momentum + 0.5 * size * (beta * slope - z)
        for _ in range(self._leapfrogs):
            new = new + size * kick
            new_gap, new_slope = self._gap(new)
            kick = kick + size * (beta * new_slope - new)
        kick = kick - 0.5 * size * (beta * new_slope - new)
        old = beta * gap - 0.5 * (z.square() + momentum.square()).sum(1)
        change = beta * new_gap - 0.5 * (new.square() + kick.square()).sum(1) - old
        chance = torch.nan_to_num(change, nan=-math.inf).clamp_max(0.0).exp()  # NaN outside the support: reject
        taken = uniform_like(chance, generator) < chance
        z = torch.where(taken[:, None], new, z)
        return z, torch.where(taken, new_gap, gap), torch.where(taken[:, None], new_slope, slope), float(chance.mean())
