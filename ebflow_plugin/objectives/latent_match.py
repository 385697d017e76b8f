r"""Matched latents: the distance of the latents of a batch from the base density, without a determinant."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Generator, Tensor

from ebflow_plugin.errors import InputError
from ebflow_plugin.linalg.random import gaussian_like, seeded_by
from ebflow_plugin.model import EBFlow
from ebflow_plugin.objectives.base import Common, DrawnObjective
from ebflow_plugin.objectives.schedule import AddedNoise, NoiseSchedule
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.values import flatten


class LatentMatch(DrawnObjective):
    r"""The energy distance of a batch's latents from the base: a term to add to score matching on small problems.

    .. math:: L = 2\,\mathbb{E}\|g(x) - r\| - \mathbb{E}\|g(x) - g(x')\| - \mathbb{E}\|r - r'\|,
              \qquad r, r' \sim p_u

    It is zero if the latents have the base density, positive otherwise, and estimated without bias from the batch and
    as many samples of the base. A score is local: a slope of 0.15 a unit length in log p along the data hardly shows in
    it, and moves two nats of mass to the wrong parts of the data. The latents show where the mass is.

        DSM(model, sigma=schedule) + LatentMatch(model, sigma=schedule)
        DSM(model, sigma=schedule, latent_weight=1.0)      # the same, at the points of DSM, without another pass

    It serves in a few dimensions: on the 2-D sets of the paper. It replaces neither score matching (alone it says
    nothing of what is finer than the distances of a batch) nor the shrinking noise. In many dimensions a batch says
    little about the density of its latents, and the term harms: at D = 784 it made DSM worse by a hundred nats. There
    ``model.calibrate`` is the answer.

    Cost: one pass to the latents and back, and :math:`B^2` distances.

    Arguments:
        model: A wrapped flow (:func:`~ebflow_plugin.wrap`).
        sigma: The noise that the score matching beside it adds, a number or the same :class:`NoiseSchedule`: it is the
            noised data that the model learns. None for none.
        common: ``generator`` of :class:`Objective`.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> objective = ebf.objectives.DSM(model, sigma=0.5) + LatentMatch(model, sigma=0.5)
        >>> objective(torch.randn(5, 2)).backward()
    """

    def __init__(self, model: EBFlow, *, sigma: float | NoiseSchedule | None = None, **common: Unpack[Common]) -> None:
        super().__init__(model, **common)
        self.noise = None if sigma is None else AddedNoise(sigma)

    def draw(self, plan: Plan, u: Tensor, context: Tensor | None, generator: Generator | None) -> tuple[Tensor, ...]:
        noised = u if self.noise is None else self.noise.add(u, generator)
        return noised, base_noise(plan, u, context, generator)

    def value(self, plan: Plan, u: Tensor, context: Tensor | None, drawn: tuple[Tensor, ...]) -> Tensor:
        noised, noise = drawn
        embedded = plan.embed(context)
        return base_distance(plan, plan.encode(noised, embedded)[0], embedded, noise)

    def extra_repr(self) -> str:
        """Describes the options."""
        return "" if self.noise is None else str(self.noise)


def base_distance(plan: Plan, latents: tuple[Tensor, ...], context: Tensor | None, noise: Tensor) -> Tensor:
    """The energy distance of latents from the base of a plan, with shape ``(B,)``. The context is the embedded one.

    The noise is that of :func:`base_noise`: for a Gaussian base, samples are mean + std * noise.
    """
    if latents[0].shape[0] < 2:
        raise InputError("matching latents compares the rows of a batch, and there is one; it needs two at least")
    with torch.no_grad():
        gaussian = plan.base.gaussian(context)
        if gaussian is not None:
            parts = zip(latents, noise.split([z[0].numel() for z in latents], dim=1), gaussian, strict=True)
            noise = flatten(tuple(mean + std * part.reshape(z.shape) for z, part, (mean, std) in parts))
    return energy_distance(flatten(latents), noise)


@torch.no_grad()
def base_noise(plan: Plan, u: Tensor, context: Tensor | None, generator: Generator | None) -> Tensor:
    """As many rows of noise as u has, flat: standard normal for a Gaussian base, else samples of the base."""
    embedded = plan.embed(context)
    if plan.base.gaussian(embedded) is not None:  # without synchronising with the device
        return gaussian_like(u.flatten(1), generator)
    with seeded_by(generator, u.device):
        return flatten(plan.base.sample(len(u), embedded, u))


def energy_distance(rows: Tensor, others: Tensor) -> Tensor:
    r"""The energy distance of two samples without bias, as one value per row, with shape ``(N,)``, whose mean it is.

    .. math:: 2\,\mathbb{E}\|a - b\| - \mathbb{E}\|a - a'\| - \mathbb{E}\|b - b'\|

    Arguments:
        rows: The sample of a, with shape ``(N, D)``, at least two rows.
        others: The sample of b, with shape ``(M, D)``, at least two rows.

    Example:
        >>> a, b = torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [1.0]])
        >>> energy_distance(a, b)  # 2 · 1 - 2 - 0
        tensor([0., 0.])
    """
    return 2.0 * _distances(rows, others).mean(1) - _within(rows) - _within(others).mean()


def _within(rows: Tensor) -> Tensor:
    """The mean distance of each row from the others."""
    return _distances(rows, rows).sum(1) / (rows.shape[0] - 1)  # not len(), which a trace would take as a constant


def _distances(rows: Tensor, others: Tensor) -> Tensor:
    """Without the shortcut by a matrix product, whose rounding has large gradients at small distances."""
    return torch.cdist(rows, others, compute_mode="donot_use_mm_for_euclid_dist")
