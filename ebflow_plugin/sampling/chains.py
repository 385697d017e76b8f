"""Langevin chains on the energy of a model: the moves, and the maps to and from the space in which they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from ebflow_plugin.errors import EBFlowError, InputError
from ebflow_plugin.linalg.random import at_least, gaussian_like, rows_in_chunks, shown, uniform_like
from ebflow_plugin.plan.energy_model import EnergyModel
from ebflow_plugin.plan.inputs import positive, refuse_non_finite
from ebflow_plugin.sampling.preconditioning import Preconditioner, check_covariance

__all__ = ["Chains", "Moves", "run_chains"]

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


@dataclass(frozen=True)
class Moves:
    """The checked options of a run of chains; see :func:`~ebflow_plugin.sampling.langevin`."""

    steps: int
    step_size: float
    burn_in: int
    adjusted: bool
    adapt: bool
    thin: int | None
    covariance: Tensor | None = None

    def __post_init__(self) -> None:
        at_least(0, "steps", self.steps)
        at_least(0, "burn_in", self.burn_in)
        positive("step_size", self.step_size)
        if self.thin is not None:
            at_least(1, "thin", self.thin)


def run_chains(
    model: EnergyModel,
    x0: Tensor,
    mask: Tensor | None,
    moves: Moves,
    context: Tensor | None,
    space: str,
    batch_size: int | None,
    generator: Generator | None,
    progress: bool,
) -> Chains:
    """Maps starts to the space of the chains, runs them a batch at a time, and maps the results back."""
    if batch_size is not None:
        at_least(1, "batch_size", batch_size)
    x0 = model.check(x0.detach() if isinstance(x0, Tensor) else x0, context)
    refuse_non_finite("x0" if mask is None else "x", x0)
    if len(x0) == 0:
        raise InputError("there are no chains to run: x0 has no rows" if mask is None else "x has no rows")
    mapped = space == "matched" and model.core is not model
    target = model.core if mapped else model
    parts = []
    with torch.no_grad():
        embedded = model.plan.embed(context) if mapped else None
        for part in rows_in_chunks(len(x0), batch_size):
            start, rows = x0[part], None if context is None else context[part]
            frozen = None if mask is None else ~mask[part]
            if not mapped:
                result = _chains(target, start, frozen, rows, moves, generator, progress)
            else:
                u, _ = model.preprocess(start, generator)
                inside = None if embedded is None else embedded[part]
                back = _to_data(model, inside)
                if frozen is not None:
                    _refuse_mixing(u, back, frozen)
                result = _chains(target, u, frozen, rows, moves, generator, progress)
                states = result.trajectory
                result = replace(
                    result,
                    samples=back(result.samples),
                    trajectory=None if states is None else torch.stack([back(u) for u in states]),
                )
                if frozen is not None:  # undoes the rounding of the map to the matched variable and back
                    result = replace(result, samples=torch.where(frozen, start, result.samples))
            parts.append(result)
    if len(parts) == 1:
        return parts[0]
    trajectories = [part.trajectory for part in parts if part.trajectory is not None]
    return Chains(
        samples=torch.cat([part.samples for part in parts]),
        trajectory=torch.cat(trajectories, 1) if trajectories else None,
        energies=torch.cat([part.energies for part in parts], 1),
        acceptance=torch.cat([part.acceptance for part in parts]),
        step_sizes=torch.cat([part.step_sizes for part in parts]),
    )


def _chains(
    target: EnergyModel,
    x: Tensor,
    frozen: Tensor | None,
    context: Tensor | None,
    moves: Moves,
    generator: Generator | None,
    progress: bool,
) -> Chains:
    """Runs the chains in the space of ``target``; frozen entries do not change."""
    sizes = torch.full_like(x.flatten(1)[:, 0], moves.step_size)
    wide = (-1, *[1] * (x.dim() - 1))
    units = None
    if moves.covariance is not None:
        stays = torch.zeros_like(x, dtype=torch.bool) if frozen is None else frozen
        units = Preconditioner(check_covariance(moves.covariance, x), stays)
    energy, slope = _energy_and_slope(target, x, frozen, context, units)
    if not bool(torch.isfinite(energy).all()):
        raise InputError(f"the energy is NaN or inf at {int((~torch.isfinite(energy)).sum())} of {len(x)} starts")
    energies, kept = [energy], []
    accepted, tuned, counted = torch.zeros_like(sizes), torch.zeros_like(sizes), 0
    adapts = moves.adjusted and moves.adapt and moves.burn_in > 0
    for t in shown(range(moves.burn_in + moves.steps), progress, "Langevin"):
        noise = gaussian_like(x, generator)
        noise = noise if frozen is None else noise.masked_fill(frozen, 0.0)
        alpha = sizes.reshape(wide)
        move = (2 * alpha).sqrt() * noise - alpha * slope
        new = x + (move if units is None else units.push(move))
        new_energy, new_slope = _energy_and_slope(target, new, frozen, context, units)
        if moves.adjusted:
            # The noise of the reverse move, and its probability relative to that of the forward noise.
            reverse = (0.5 * alpha).sqrt() * (slope + new_slope) - noise
            change = energy - new_energy + 0.5 * (noise.square() - reverse.square()).flatten(1).sum(1)
            # A proposal without a finite energy lies outside the support, and has probability zero.
            chance = torch.where(torch.isfinite(new_energy), change.clamp_max(0.0).exp(), 0.0).nan_to_num(0.0)
            taken = uniform_like(chance, generator) < chance
            x = torch.where(taken.reshape(wide), new, x)
            slope = torch.where(taken.reshape(wide), new_slope, slope)
            energy = torch.where(taken, new_energy, energy)
            if t >= moves.burn_in:
                accepted += taken
            elif adapts:
                sizes = sizes * ((chance - TARGET) * (t + 1) ** -0.5).exp()
                if t >= moves.burn_in // 2:  # the mean over the second half is less noisy than the last value
                    tuned, counted = tuned + sizes.log(), counted + 1
                if t + 1 == moves.burn_in:
                    sizes = (tuned / counted).exp()
        else:
            if not bool(torch.isfinite(new_energy).all()):
                raise EBFlowError(
                    f"an unadjusted chain diverged at step {t + 1}: its energy is not finite. Lower step_size, or use "
                    "adjusted=True"
                )
            x, energy, slope = new, new_energy, new_slope
        energies.append(energy)
        if moves.thin is not None and t >= moves.burn_in and (t - moves.burn_in + 1) % moves.thin == 0:
            kept.append(x)
    rate = accepted / max(1, moves.steps) if moves.adjusted else torch.ones_like(sizes)
    return Chains(x, torch.stack(kept) if kept else None, torch.stack(energies), rate, sizes)


def _energy_and_slope(
    target: EnergyModel, x: Tensor, frozen: Tensor | None, context: Tensor | None, units: Preconditioner | None
) -> tuple[Tensor, Tensor]:
    """The energy at x, and its gradient in the variable of the moves."""
    with torch.inference_mode(False), torch.enable_grad():
        x = x.detach().clone().requires_grad_()
        energy = target.energy(x, context)
        (slope,) = torch.autograd.grad(energy.sum(), x, allow_unused=True, materialize_grads=True)
    slope = slope if frozen is None else slope.masked_fill(frozen, 0.0)
    return energy.detach(), slope if units is None else units.pull(slope)


def _to_data(model: EnergyModel, context: Tensor | None) -> Callable[[Tensor], Tensor]:
    return lambda u: model.prefix.decode((u,), context)


def _refuse_mixing(u: Tensor, back: Callable[[Tensor], Tensor], frozen: Tensor) -> None:
    """Raises if an observed entry depends on a missing one through the preprocessing."""
    before, after = back(u), back(torch.where(frozen, u, u + 1.0) if frozen.shape == u.shape else u)
    if frozen.shape != u.shape or not torch.equal(before[frozen], after[frozen]):
        raise InputError(
            "the preprocessing of this model mixes entries, so a mask of the data is no mask of the matched variable; "
            'use space="data"'
        )
