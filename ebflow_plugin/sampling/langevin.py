r"""Langevin sampling of an energy, imputation of missing entries, and denoising by the score."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from ebflow_plugin.chunks import over_rows, with_progress
from ebflow_plugin.errors import EBFlowError, InputError
from ebflow_plugin.linalg.random import gaussian_like, uniform_like
from ebflow_plugin.model import EBFlow
from ebflow_plugin.options import at_least, one_of, positive
from ebflow_plugin.plan.inputs import check_tensor, refuse_non_finite, refuse_other_models
from ebflow_plugin.sampling.chains import Chains, Preconditioner, check_covariance, energy_and_slope

TARGET = 0.574  # the optimal acceptance rate of Metropolis-adjusted Langevin steps in many dimensions


@torch.no_grad()
def langevin(
    model: EBFlow,
    x0: Tensor,
    steps: int,
    step_size: float,
    *,
    mask: Tensor | None = None,
    context: Tensor | None = None,
    adjusted: bool = True,
    burn_in: int = 0,
    adapt: bool = True,
    covariance: Tensor | None = None,
    space: str = "matched",
    thin: int | None = None,
    batch_size: int | None = None,
    generator: Generator | None = None,
    progress: bool = False,
) -> Chains:
    r"""Runs Langevin chains on the energy of a model, one from each start (Eq. 11 of the paper).

    .. math:: x \leftarrow x - \alpha \nabla E(x) + \sqrt{2 \alpha}\, z, \qquad z \sim \mathcal{N}(0, I)

    Adjusted, each move is a proposal with a Metropolis-Hastings correction, so that the stationary density of the
    chains is that of the model for any :math:`\alpha`. Unadjusted, as in the paper, it has a bias of
    :math:`O(\alpha)`.

    Cost: one energy and its gradient for each step and chain, :math:`O(D^2)` for a full linear layer; no determinant.

    Arguments:
        model: A wrapped flow (:func:`~ebflow_plugin.wrap`).
        x0: The starts, with shape ``(B, *)``, in data space.
        steps: The number of steps after the burn-in.
        step_size: The initial :math:`\alpha`.
        mask: True for the entries that move, with the shape of ``x0`` or of one of its rows; the others stay as they
            are (:func:`impute`). By default all move.
        context: The context of the model, with ``B`` rows.
        adjusted: Whether to apply the Metropolis-Hastings correction.
        burn_in: The number of burn-in steps.
        adapt: Whether each adjusted chain tunes its own step size during the burn-in, to an acceptance rate of 0.574.
            The step size is fixed afterwards, which keeps the stationary density.
        covariance: A preconditioner: with :math:`L L^\top` this ``(D, D)`` matrix, :math:`\nabla E` becomes
            :math:`L L^\top \nabla E` and z becomes L z. The stationary density does not change. If it is close to the
            covariance of the (flattened) variable of the chains, ill-scaled densities take tens of steps in place of
            thousands.
        space: ``"matched"``: the chains run in the variable after the model's preprocessing, which has no boundaries,
            and are mapped back; ``"data"``: they run in data space. Without preprocessing both are the same, and
            adjusted chains have the same stationary density in either.
        thin: Returns every ``thin``-th state after the burn-in as the trajectory; None returns only the last states.
        batch_size: The largest number of chains at a time.
        generator: The source of all randomness.
        progress: Shows a progress bar.

    Raises:
        InputError: If an option or a start is invalid.
        EBFlowError: If an unadjusted chain diverges.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> langevin(model, torch.zeros(3, 2), steps=5, step_size=0.1).samples.shape
        torch.Size([3, 2])
    """
    _check("langevin", model, space)
    x0 = model.check(x0.detach() if isinstance(x0, Tensor) else x0, context)
    refuse_non_finite("x0", x0)
    if len(x0) == 0:
        raise InputError("there are no chains to run: x0 has no rows")
    steps, burn_in = at_least(0, "steps", steps), at_least(0, "burn_in", burn_in)
    thin = None if thin is None else at_least(1, "thin", thin)
    matched = space == "matched"
    x = model.preprocess(x0, generator)[0] if matched else x0
    energy = model.core.energy if matched else model.energy

    def back(x: Tensor) -> Tensor:
        return over_rows(model.to_data, x, context, batch_size) if matched else x

    if mask is None:
        frozen = torch.zeros_like(x, dtype=torch.bool)
    else:
        frozen = ~_check_mask(mask, x0)
        _refuse_mixing(x, back, frozen)
    units = Preconditioner(None if covariance is None else check_covariance(covariance, x), frozen)
    sizes = torch.full_like(x.flatten(1)[:, 0], positive("step_size", step_size))
    wide = (-1, *[1] * (x.dim() - 1))

    def measured(x: Tensor) -> tuple[Tensor, Tensor]:
        """The energy at x, and its gradient in the variable of the moves."""
        value, slope = energy_and_slope(energy, x, context, batch_size)
        return value, units.pull(slope)

    value, slope = measured(x)
    if not bool(torch.isfinite(value).all()):
        raise InputError(f"the energy is NaN or inf at {int((~torch.isfinite(value)).sum())} of {len(x)} starts")
    energies, kept = [value], list[Tensor]()
    accepted, tuned, counted = torch.zeros_like(sizes), torch.zeros_like(sizes), 0
    for t in with_progress(range(burn_in + steps), progress, "Langevin"):
        noise, alpha = gaussian_like(x, generator), sizes.reshape(wide)
        new = x + units.push((2 * alpha).sqrt() * noise - alpha * slope)
        new_value, new_slope = measured(new)
        taken = torch.isfinite(new_value)
        if adjusted:
            # The noise of the reverse move, and its probability relative to that of the forward noise.
            reverse = (0.5 * alpha).sqrt() * (slope + new_slope) - noise
            change = value - new_value + 0.5 * (noise.square() - reverse.square()).flatten(1).sum(1)
            # A proposal without a finite energy lies outside the support, and has probability zero.
            chance = torch.where(taken, change.clamp_max(0.0).exp(), 0.0).nan_to_num(0.0)
            taken = uniform_like(chance, generator) < chance
        elif not bool(taken.all()):
            raise EBFlowError(
                f"an unadjusted chain diverged at step {t + 1}: its energy is not finite. Lower step_size, or use "
                "adjusted=True"
            )
        x = torch.where(taken.reshape(wide), new, x)
        slope = torch.where(taken.reshape(wide), new_slope, slope)
        value = torch.where(taken, new_value, value)
        if t >= burn_in:
            accepted += taken
        elif adjusted and adapt:
            sizes = sizes * ((chance - TARGET) * (t + 1) ** -0.5).exp()
            if t >= burn_in // 2:  # the mean over the second half is less noisy than the last value
                tuned, counted = tuned + sizes.log(), counted + 1
            if t + 1 == burn_in:
                sizes = (tuned / counted).exp()
        energies.append(value)
        if thin is not None and t >= burn_in and (t - burn_in + 1) % thin == 0:
            kept.append(back(x))
    rate = accepted / max(1, steps) if adjusted else torch.ones_like(sizes)
    samples = back(x) if mask is None else torch.where(frozen, x0, back(x))  # without the rounding of the way back
    return Chains(samples, torch.stack(kept) if kept else None, torch.stack(energies), rate, sizes)


def impute(
    model: EBFlow,
    x: Tensor,
    mask: Tensor,
    *,
    steps: int,
    step_size: float,
    chains: int = 1,
    init: Tensor | None = None,
    context: Tensor | None = None,
    adjusted: bool = True,
    burn_in: int = 0,
    adapt: bool = True,
    covariance: Tensor | None = None,
    space: str = "matched",
    batch_size: int | None = None,
    generator: Generator | None = None,
    progress: bool = False,
) -> Tensor:
    r"""Fills in missing entries by Langevin steps on the energy, given the others (Eq. 11 of the paper).

    .. math::
        x_M \leftarrow x_M - \alpha \nabla_{x_M} E(x_O, x_M) + \sqrt{2 \alpha}\, z

    The stationary density is the model's :math:`p(x_M \mid x_O)`, without training for it. The observed entries of the
    result are exactly those of x.

    Cost: one energy and its gradient for each step and chain.

    Arguments:
        model: A wrapped flow (:func:`~ebflow_plugin.wrap`).
        x: Data, with shape ``(B, *)``.
        mask: True where an entry is missing, with the shape of x, or of one of its rows for the same entries in all.
        steps: The number of steps after the burn-in.
        step_size: The initial :math:`\alpha`.
        chains: The number of chains for each row of x.
        init: The initial values of the missing entries, with the shape of x; by default those of x.
        context: The context of the model, with ``B`` rows.
        space: As for :func:`langevin`. The matched variable needs an elementwise preprocessing.
        adjusted: As for :func:`langevin`.
        burn_in: As for :func:`langevin`.
        adapt: As for :func:`langevin`.
        covariance: As for :func:`langevin`, of all entries; it is conditioned on the observed ones.
        batch_size: The largest number of chains at a time.
        generator: The source of all randomness.
        progress: Shows a progress bar.

    Returns:
        The filled data, with shape ``(B, chains, *)``.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> x, mask = torch.zeros(3, 2), torch.tensor([[False, True]]).expand(3, 2)
        >>> filled = impute(model, x, mask, steps=5, step_size=0.1, chains=4)
        >>> filled.shape, bool((filled[..., 0] == 0).all())
        (torch.Size([3, 4, 2]), True)
    """
    _check("impute", model, space)
    chains = at_least(1, "chains", chains)
    check_tensor("x", x)
    mask = _check_mask(mask, x)
    if init is not None:
        check_tensor("init", init)
        if init.shape != x.shape:
            raise InputError(f"init must have the shape of x, {tuple(x.shape)}, got {tuple(init.shape)}")
        if init.device != x.device:
            raise InputError(f"init is on {init.device}, x is on {x.device}; move one with .to()")
    start = x if init is None else torch.where(mask, init, x)
    if start.is_floating_point() and bool((mask & ~torch.isfinite(start)).any()):
        raise InputError("missing entries start at NaN or inf: pass finite values as init= (the mean of the data, say)")
    refuse_non_finite("x", start)
    if len(x) == 0:
        raise InputError("x has no rows")
    found = langevin(
        model,
        start.repeat_interleave(chains, dim=0),
        steps,
        step_size,
        mask=mask.repeat_interleave(chains, dim=0),
        context=None if context is None else context.repeat_interleave(chains, dim=0),
        adjusted=adjusted,
        burn_in=burn_in,
        adapt=adapt,
        covariance=covariance,
        space=space,
        batch_size=batch_size,
        generator=generator,
        progress=progress,
    )
    return found.samples.unflatten(0, (len(x), chains))


def denoise(
    model: EBFlow,
    x: Tensor,
    sigma: float | Tensor,
    *,
    context: Tensor | None = None,
    space: str = "matched",
    batch_size: int | None = None,
) -> Tensor:
    r"""Denoises data with Gaussian noise: the posterior mean, if the model is that of the noisy data.

    .. math:: \mathbb{E}[x_0 \mid x] = x + \sigma^2\, \nabla \log p(x)

    A model learns the density of the noisy data from :class:`~ebflow_plugin.objectives.DSM` with the same
    :math:`\sigma`. The result carries no graph.

    Cost: one score.

    Arguments:
        model: A wrapped flow (:func:`~ebflow_plugin.wrap`).
        x: Noisy data, with shape ``(B, *)``.
        sigma: The standard deviation of the noise: a number, or one for each row with shape ``(B,)``.
        context: The context of the model, with ``B`` rows.
        space: Where the noise is: in the ``"matched"`` variable after the model's preprocessing, where DSM adds it, or
            in the ``"data"``. Without preprocessing both are the same.
        batch_size: The largest number of rows whose score is computed at a time.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.IdentityTransform(), distributions.StandardNormal([2])))
        >>> denoise(model, torch.ones(1, 2), sigma=0.5)
        tensor([[0.7500, 0.7500]])
    """
    _check("denoise", model, space)
    check_tensor("x", x)
    if isinstance(sigma, Tensor):
        if sigma.shape not in ((), x.shape[:1]):
            raise InputError(f"sigma must be a number, or one for each of {len(x)} rows, got {tuple(sigma.shape)}")
        if not bool(((sigma > 0) & torch.isfinite(sigma)).all()):
            raise InputError("sigma must be positive and finite")
        variance: float | Tensor = sigma.to(x).square().reshape(-1, *[1] * (x.dim() - 1))
    else:
        variance = positive("sigma", sigma) ** 2
    refuse_non_finite("x", x)
    with torch.no_grad():
        if space == "data":
            return x + variance * over_rows(model.score, x, context, batch_size)
        u, _ = model.preprocess(x)
        clean = u + variance * over_rows(model.core.score, u, context, batch_size)
        return model.to_data(clean, context)


def _check(name: str, model: EBFlow, space: str) -> None:
    refuse_other_models(name, model)
    one_of("space", space, ("data", "matched"))
    if space == "data" and model.dequantize is not None:
        raise InputError('the data of this model are integers (Dequantize), which have no score; use space="matched"')


def _check_mask(mask: Tensor, x: Tensor) -> Tensor:
    """Returns a mask of entries with the shape of x."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = f"{mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(f"mask must be a tensor of bool, True where an entry is missing, got {got}")
    if mask.shape not in (x.shape, x.shape[1:], (1, *x.shape[1:])):
        raise InputError(
            f"mask must have the shape of x, {tuple(x.shape)}, or of one of its rows, got {tuple(mask.shape)}"
        )
    if mask.device != x.device:
        raise InputError(f"mask is on {mask.device}, x is on {x.device}; move one with .to()")
    return mask.expand(x.shape)


def _refuse_mixing(u: Tensor, back: Callable[[Tensor], Tensor], frozen: Tensor) -> None:
    """Raises if an observed entry depends on a missing one through the preprocessing."""
    before, after = back(u), back(torch.where(frozen, u, u + 1.0) if frozen.shape == u.shape else u)
    if frozen.shape != u.shape or not torch.equal(before[frozen], after[frozen]):
        raise InputError(
            "the preprocessing of this model mixes entries, so a mask of the data is no mask of the matched variable; "
            'use space="data"'
        )
