"""coverage(): what score matching cannot see. Whether a model has its mass where the data are, and all of it.

A score says how a log-density changes from one point to the next, at the data. Mass far from them does not enter the
loss, and neither do the weights of parts of the data that have nothing between them. Both show in samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from ebflow_plugin.chunks import picked
from ebflow_plugin.errors import CoverageWarning, InputError, warn
from ebflow_plugin.model import EBFlow
from ebflow_plugin.objectives.latent_match import base_distance, base_noise
from ebflow_plugin.options import at_least, check_generator
from ebflow_plugin.plan.inputs import batch_of, refuse_non_finite, refuse_other_models, to_device
from ebflow_plugin.plan.inverse import draw

USUAL = 0.99  # of the rows are as near to other rows as the limit
LIMIT = 0.1  # a share above it is a warning; 1 - USUAL is ideal, and models that are well trained have up to 0.07
FEWEST = 40  # rows
FEW = 16  # dimensions in which a batch says how its latents are distributed


@dataclass(frozen=True)
class CoverageReport:
    """The result of :func:`coverage`. Prints as text; truthy if neither share is large.

    Attributes:
        outside: The share of the model's samples that are farther from the data than 99 % of other rows: ideally 0.01.
        missed: The share of the rows that are farther from the model's samples than 99 % of other samples: ideally
            0.01.
        latent_distance: The energy distance of the latents from the base, without bias: ideally 0, up to noise of the
            order of 1/N.
        rows: The number N of rows and of samples that were compared with as many others.
        dim: The number of dimensions.
    """

    outside: float
    missed: float
    latent_distance: float
    rows: int
    dim: int

    def __bool__(self) -> bool:
        return max(self.outside, self.missed) <= LIMIT

    @property
    def advice(self) -> str:
        """What to do, in one line."""
        if self.outside > LIMIT and self.dim <= FEW:
            return (
                "mass lies where there are no data: train with noise that shrinks, DSM(model, "
                "sigma=NoiseSchedule(end=…, steps=…)), longer if you did, or by ML"
            )
        if self.missed > LIMIT and self.dim <= FEW:
            return "mass lies in the wrong parts of the data: add LatentMatch(model), or 0.1 * ML(model)"
        if not self:
            return "model and data lie apart: model.calibrate(data), or train longer, or by ML"
        return "nothing to do: the samples lie where the data lie"

    def __str__(self) -> str:
        return (
            f"samples far from the data     {self.outside:.3f}  (ideally 0.010)\n"
            f"data far from the samples     {self.missed:.3f}  (ideally 0.010)\n"
            f"latents' distance from base   {self.latent_distance:.4f} (ideally 0; {self.rows:,} rows)\n{self.advice}"
        )


@torch.no_grad()
def coverage(model: EBFlow, data: Any, *, rows: int = 1000, generator: Generator | None = None) -> CoverageReport:
    r"""Compares samples of a model with data, by the distance to the nearest neighbour in the matched variable.

    Two halves of the data tell how far a row is from other rows: the limit is the 0.99 quantile of the distances of
    ``rows`` rows from as many others. Samples beyond it lie where there are no data. Two sets of samples tell the
    same about the model: rows beyond that limit lie where the model has too little mass. A model that score matching
    trained can have a good loss and fail both.

    It serves in a few dimensions. In many, the nearest neighbour of an image is a blurred one, and the shares say only
    that samples and data differ; an NLL says more.

    Arguments:
        model: A wrapped flow (:func:`~ebflow_plugin.wrap`) with an inverse.
        data: Rows with shape ``(N, *)``, at least 40, that the model was not trained on if possible; or a pair of them
            and their context, for each of which a sample is drawn. They may be on any device.
        rows: The number of rows, and of samples, that are compared with as many others; at most half of the data.
        generator: Chooses the rows and draws the samples.

    Returns:
        The shares, the distance of the latents from the base, and what to do.

    Warns:
        CoverageWarning: If a share is above 0.1.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> report = coverage(model, torch.randn(400, 2, generator=torch.Generator().manual_seed(0)),
        ...                   generator=torch.Generator().manual_seed(1))
        >>> bool(report), report.advice
        (True, 'nothing to do: the samples lie where the data lie')
    """
    refuse_other_models("coverage", model)
    check_generator(generator)
    x, context, weights = to_device(batch_of(data), model.like().device)
    if weights is not None:
        raise InputError("coverage compares rows with each other, and cannot weight them; pass x, or (x, context)")
    model.check(x, context)
    count = min(at_least(FEWEST // 2, "rows", rows), len(x) // 2)
    if count < FEWEST // 2:
        raise InputError(f"coverage needs at least {FEWEST} rows, got {len(x)}")
    chosen = torch.randperm(len(x), generator=generator, device=x.device if generator is None else generator.device)
    chosen = chosen[: 2 * count].to(x.device)
    x, context = picked(chosen, x, context)
    plan, u, _ = model.match(x, context, generator)
    refuse_non_finite("the matched variable", u)
    if context is None:
        drawn = draw(plan, 2 * count, None, generator, u)
    else:
        drawn = draw(plan, 1, context, generator, u).squeeze(1)
    near, far = u.flatten(1).split(count)
    first, second = drawn.flatten(1).split(count)
    embedded = plan.embed(context)
    latents, _ = plan.encode(u, embedded)
    distance = base_distance(plan, latents, embedded, base_noise(plan, u, context, generator))
    report = CoverageReport(
        outside=_share_beyond(first, far, near),
        missed=_share_beyond(far, second, first),
        latent_distance=float(distance.mean()),
        rows=count,
        dim=near.shape[1],
    )
    if not report:
        warn(
            f"{report.outside:.0%} of the model's samples are far from the data, and {report.missed:.0%} of the data "
            f"are far from its samples (1% each are usual): {report.advice}",
            CoverageWarning,
        )
    return report


def _share_beyond(points: Tensor, usual: Tensor, reference: Tensor) -> float:
    """The share of points that are farther from a reference than most of the usual points are."""
    limit = _nearest(usual, reference).quantile(USUAL, interpolation="higher")
    return float((_nearest(points, reference) > limit).double().mean())


def _nearest(points: Tensor, reference: Tensor) -> Tensor:
    """The distance of each point from the nearest of a reference; a point that is not finite is infinitely far."""
    reference = reference[reference.isfinite().all(1)].double()
    if not len(reference):
        return points.new_full((len(points),), torch.inf, dtype=torch.float64)
    apart = torch.cdist(points.double(), reference, compute_mode="donot_use_mm_for_euclid_dist").amin(1)
    return torch.where(points.isfinite().all(1), apart, torch.inf).nan_to_num(nan=torch.inf, posinf=torch.inf)
