"""Langevin chains on an energy: the moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from ebflow_plugin.chunks import with_progress
from ebflow_plugin.errors import EBFlowError, InputError
from ebflow_plugin.linalg.random import gaussian_like, uniform_like
from ebflow_plugin.sampling.preconditioning import Preconditioner, check_covariance

__all__ = ["Chains", "run_chains"]

TARGET = 0.574  # the optimal acceptance rate of Metropolis-adjusted Langevin steps in many dimensions


@dataclass(frozen=True)
class Chains:
    """The result of :func:`~ebflow_plugin.sampling.langevin.langevin`.

    Attributes:
        samples: The last states of the chains, with shape ``(B, *)``.
        trajectory: Every ``thin``-th state, with shape ``(S, B, *)``; None if there are none.
        energies: The energy at the start and after each step, including the burn-in, with shape
            ``(burn_in + steps + 1, B)``. It is that of the variable in which the chains ran.
        acceptance: The fraction of accepted proposals after the burn-in, with shape ``(B,)``; ones if not adjusted.
        step_sizes: The step size of each chain after the burn-in, with shape ``(B,)``.
    """

    samples: Tensor
    trajectory: Tensor | None
    energies: Tensor
    acceptance: Tensor
    step_sizes: Tensor

    def __repr__(self) -> str:
        return (
            f"Chains({len(self.acceptance)} chains, {len(self.energies) - 1} steps, acceptance "
            f"{float(self.acceptance.mean()):.2f}, step size {float(self.step_sizes.mean()):.3g})"
        )


def run_chains(
    energy: Callable[[Tensor], Tensor],
    x: Tensor,
    frozen: Tensor | None,
    *,
    steps: int,
    step_size: float,
    burn_in: int,
    adjusted: bool,
    adapt: bool,
    thin: int | None,
    covariance: Tensor | None,
    generator: Generator | None,
    progress: bool,
) -> Chains:
    """Runs a chain from each row of x, on an energy from ``(B, *)`` to ``(B,)``; frozen entries do not change.

    The options are those of :func:`~ebflow_plugin.sampling.langevin.langevin`.
    """
    sizes = torch.full_like(x.flatten(1)[:, 0], step_size)
    wide = (-1, *[1] * (x.dim() - 1))
    units = None
    if covariance is not None:
        stays = torch.zeros_like(x, dtype=torch.bool) if frozen is None else frozen
        units = Preconditioner(check_covariance(covariance, x), stays)

    def value_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
        """The energy at x, and its gradient in the variable of the moves."""
        with torch.inference_mode(False), torch.enable_grad():
            x = x.detach().clone().requires_grad_()
            value = energy(x)
            (slope,) = torch.autograd.grad(value.sum(), x, allow_unused=True, materialize_grads=True)
        slope = slope if frozen is None else slope.masked_fill(frozen, 0.0)
        return value.detach(), slope if units is None else units.pull(slope)

    value, slope = value_and_slope(x)
    if not bool(torch.isfinite(value).all()):
        raise InputError(f"the energy is NaN or inf at {int((~torch.isfinite(value)).sum())} of {len(x)} starts")
    energies, kept = [value], []
    accepted, tuned, counted = torch.zeros_like(sizes), torch.zeros_like(sizes), 0
    for t in with_progress(range(burn_in + steps), progress, "Langevin"):
        noise = gaussian_like(x, generator)
        noise = noise if frozen is None else noise.masked_fill(frozen, 0.0)
        alpha = sizes.reshape(wide)
        move = (2 * alpha).sqrt() * noise - alpha * slope
        new = x + (move if units is None else units.push(move))
        new_value, new_slope = value_and_slope(new)
        if adjusted:
            # The noise of the reverse move, and its probability relative to that of the forward noise.
            reverse = (0.5 * alpha).sqrt() * (slope + new_slope) - noise
            change = value - new_value + 0.5 * (noise.square() - reverse.square()).flatten(1).sum(1)
            # A proposal without a finite energy lies outside the support, and has probability zero.
            chance = torch.where(torch.isfinite(new_value), change.clamp_max(0.0).exp(), 0.0).nan_to_num(0.0)
            taken = uniform_like(chance, generator) < chance
            x = torch.where(taken.reshape(wide), new, x)
            slope = torch.where(taken.reshape(wide), new_slope, slope)
            value = torch.where(taken, new_value, value)
            if t >= burn_in:
                accepted += taken
            elif adapt:
                sizes = sizes * ((chance - TARGET) * (t + 1) ** -0.5).exp()
                if t >= burn_in // 2:  # the mean over the second half is less noisy than the last value
                    tuned, counted = tuned + sizes.log(), counted + 1
                if t + 1 == burn_in:
                    sizes = (tuned / counted).exp()
        else:
            if not bool(torch.isfinite(new_value).all()):
                raise EBFlowError(
                    f"an unadjusted chain diverged at step {t + 1}: its energy is not finite. Lower step_size, or use "
                    "adjusted=True"
                )
            x, value, slope = new, new_value, new_slope
        energies.append(value)
        if thin is not None and t >= burn_in and (t - burn_in + 1) % thin == 0:
            kept.append(x)
    rate = accepted / max(1, steps) if adjusted else torch.ones_like(sizes)
    return Chains(x, torch.stack(kept) if kept else None, torch.stack(energies), rate, sizes)
