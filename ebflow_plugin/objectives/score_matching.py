r"""Score matching: exact (SM), sliced (SSM), by finite differences (FDSSM), and denoising (DSM).

All of them depend on the energy only up to a constant in x, so they need no determinant of a linear layer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from math import prod, sqrt
from typing import Unpack

import torch
from torch import Generator, Tensor

from ebflow_plugin.errors import InputError
from ebflow_plugin.linalg.precision import full_precision, full_precision_backward
from ebflow_plugin.linalg.random import gaussian_like, signs_like, uniform_like
from ebflow_plugin.model import EBFlow
from ebflow_plugin.objectives import checks
from ebflow_plugin.objectives.base import Common, DrawnObjective
from ebflow_plugin.objectives.latent_match import base_distance, base_noise
from ebflow_plugin.objectives.schedule import AddedNoise, NoiseSchedule
from ebflow_plugin.options import integer, is_number, one_of, positive
from ebflow_plugin.plan.derivatives import derivatives
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.smooth_modules import Smoothness

# The loss of each sample, with shape (B,), and what its regularisers take: the latents, and the energy.
Matched = tuple[Tensor, tuple[Tensor, ...], Tensor | None]
SMALL_EPS = 0.1  # below it, only a handful of samples show FDSSM the jumps of a score


class ScoreOptions(Common, total=False):
    """The options of all score matching; see :class:`ScoreObjective`."""

    energy_weight: float
    latent_weight: float


class ScoreObjective(DrawnObjective):
    r"""An objective of the score alone.

    Arguments:
        model: A wrapped flow (:func:`~ebflow_plugin.wrap`).
        energy_weight: Adds :math:`\lambda\,\mathbb{E}[E(x)]`, the paper's regulariser, which most of these objectives
            compute on their way. Losses here are sums over all dimensions; in the authors' code the term is added once
            for each pixel, so that their 0.001 (CIFAR-10, CelebA) and 0.1 (Glow on MNIST) are :math:`\lambda H W` here:
            1.0 for 32 x 32 pixels, and 78.4 for 28 x 28.
        latent_weight: Adds this much of a :class:`LatentMatch` of the points at which the score is matched, whose
            latents are computed on the way: the same as a term beside it with the same noise, without its pass.
        common: ``generator`` of :class:`Objective`.
    """

    def __init__(
        self, model: EBFlow, *, energy_weight: float = 0.0, latent_weight: float = 0.0, **common: Unpack[Common]
    ) -> None:
        super().__init__(model, **common)
        for name, weight in (("energy_weight", energy_weight), ("latent_weight", latent_weight)):
            if not is_number(weight) or weight < 0:
                raise InputError(f"{name} must be a finite number, at least 0, got {weight!r}")
        self.energy_weight, self.latent_weight = float(energy_weight), float(latent_weight)

    def extra_repr(self) -> str:
        """Describes the options."""
        latents = f", latent_weight={self.latent_weight:g}" if self.latent_weight else ""
        noise = [self.added_noise] if self.added_noise else []
        return ", ".join([*noise, f"energy_weight={self.energy_weight:g}{latents}"])

    def draw(self, plan: Plan, u: Tensor, context: Tensor | None, generator: Generator | None) -> tuple[Tensor, ...]:
        drawn = self.drawn(u, generator)
        return (*drawn, base_noise(plan, u, context, generator)) if self.latent_weight else drawn

    def drawn(self, u: Tensor, generator: Generator | None) -> tuple[Tensor, ...]:
        """What :meth:`value` needs, but for the samples of the base: the last to be drawn."""
        return ()

    @abstractmethod
    def matched(self, plan: Plan, u: Tensor, context: Tensor | None, drawn: tuple[Tensor, ...]) -> Matched:
        """Computes the loss of each sample without regularisers, from what :meth:`drawn` returned."""

    def value(self, plan: Plan, u: Tensor, context: Tensor | None, drawn: tuple[Tensor, ...]) -> Tensor:
        values, latents, energy = self.matched(plan, u, context, drawn)
        if self.latent_weight:
            values = values + self.latent_weight * base_distance(plan, latents, plan.embed(context), drawn[-1])
        return values + self.energy_weight * energy if self.energy_weight and energy is not None else values

    def _by_parts(
        self, plan: Plan, u: Tensor, context: Tensor | None, directions: Sequence[Tensor], mean: bool
    ) -> Matched:
        """½‖∇E‖² minus the sum or the mean of the curvatures along the directions."""
        found = derivatives(plan, u, context, directions, energy=self.energy_weight > 0)
        curvatures = torch.stack(found.curvatures)
        slope = found.gradient.square().flatten(1).sum(1)
        values = 0.5 * slope - (curvatures.mean(0) if mean else curvatures.sum(0))
        return values, found.latents, found.energy


class SM(ScoreObjective):
    r"""Score matching with the exact trace of the Hessian (Section 2.2, Hyvärinen 2005).

    .. math:: L = \mathbb{E}\left[\tfrac12 \|\nabla E(x)\|^2 - \operatorname{tr} \nabla^2 E(x)\right]

    Cost: one energy, its gradient, and D Hessian-vector products. Use it for small D, and to check the others.

    It integrates by parts, so it needs a continuous score and data with a continuous density. It warns about steps
    whose score jumps, and about a ``Dequantize`` with uniform noise.

    Arguments:
        model: A wrapped flow (:func:`~ebflow_plugin.wrap`).
        common: ``generator`` of :class:`Objective`, ``energy_weight`` and ``latent_weight`` of
            :class:`ScoreObjective`.

    Raises:
        UnsupportedStepError: If a step has wrong second derivatives.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.IdentityTransform(), distributions.StandardNormal([2])))
        >>> SM(model)(torch.tensor([[1.0, 0.0]])).item()  # ½ · 1² - 2
        -1.5
    """

    def __init__(self, model: EBFlow, **common: Unpack[ScoreOptions]) -> None:
        super().__init__(model, **common)
        checks.refuse_false_derivatives(self)
        checks.warn_about_jumps(self, checks.EVERY_JUMP)
        checks.warn_about_uniform_noise(self)

    def matched(self, plan: Plan, u: Tensor, context: Tensor | None, drawn: tuple[Tensor, ...]) -> Matched:
        size = prod(u.shape[1:])
        axes = torch.eye(size, dtype=u.dtype, device=u.device).reshape(size, 1, *u.shape[1:])
        return self._by_parts(plan, u, context, [axis.expand_as(u) for axis in axes], mean=False)


class SSM(ScoreObjective):
    r"""Sliced score matching: SM with an unbiased estimate of the trace (Eq. 5).

    .. math:: L = \tfrac12 \mathbb{E}\|\nabla E(x)\|^2 - \mathbb{E}\left[v^T \nabla^2 E(x)\, v\right],
              \qquad \mathbb{E}[v v^T] = I

    Cost: one energy and its gradient. For each projection, a tangent through the leading steps that are linear or
    elementwise (three products for a full layer: :mod:`ebflow_plugin.plan.derivatives`), and a Hessian-vector product
    through the rest; ``model.report`` says where that begins. Use it for smooth flows, and data that have a density
    without added noise.

    It integrates by parts, so it needs a continuous score and data with a continuous density. It warns about steps
    whose score jumps, and about a ``Dequantize`` with uniform noise.

    Arguments:
        model: A wrapped flow (:func:`~ebflow_plugin.wrap`).
        projections: The number of directions v per sample, over which the loss is averaged.
        projection: ``"rademacher"`` (entries ±1; the least variance), ``"gaussian"``, or ``"sphere"`` (uniform, with
            radius :math:`\sqrt D`).
        sigma: The standard deviation of Gaussian noise that is added to the matched variable, or a
            :class:`NoiseSchedule` of it: the loss is then that of :math:`x + \sigma_t \epsilon`, and SSM learns the
            density of the data with this noise, as DSM does. Such data have no jumps. No noise by default.
        common: ``generator`` of :class:`Objective`, ``energy_weight`` and ``latent_weight`` of
            :class:`ScoreObjective`.

    Raises:
        UnsupportedStepError: If a step has wrong second derivatives.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> SSM(model, projections=2)(torch.randn(5, 2)).backward()
    """

    def __init__(
        self,
        model: EBFlow,
        *,
        projections: int = 1,
        projection: str = "rademacher",
        sigma: float | NoiseSchedule | None = None,
        **common: Unpack[ScoreOptions],
    ) -> None:
        super().__init__(model, **common)
        self.noise = None if sigma is None else AddedNoise(sigma)
        self.projections = integer("projections", projections)
        self.projection = one_of("projection", projection, PROJECTIONS)
        checks.refuse_false_derivatives(self)
        checks.warn_about_jumps(self, checks.EVERY_JUMP)
        if self.noise is None:
            checks.warn_about_uniform_noise(self)

    def drawn(self, u: Tensor, generator: Generator | None) -> tuple[Tensor, ...]:
        noised = u if self.noise is None else self.noise.add(u, generator)
        return (noised, *(PROJECTIONS[self.projection](u, generator) for _ in range(self.projections)))

    def matched(self, plan: Plan, u: Tensor, context: Tensor | None, drawn: tuple[Tensor, ...]) -> Matched:
        noised, directions = drawn[0], drawn[1 : 1 + self.projections]
        return self._by_parts(plan, noised, context, directions, mean=True)

    def extra_repr(self) -> str:
        """Describes the options."""
        return f"projections={self.projections}, projection={self.projection!r}, {super().extra_repr()}"


class FDSSM(ScoreObjective):
    r"""Sliced score matching by finite differences: three energies and no derivative in x (Eq. 6, scaled).

    .. math:: L = \frac{D}{\epsilon^2}\, \mathbb{E}\left[2E(x) - E(x+\delta) - E(x-\delta)
              + \tfrac18 \left(E(x+\delta) - E(x-\delta)\right)^2\right],
              \qquad \|\delta\| = \epsilon \text{ uniformly}

    With the factor :math:`D/\epsilon^2` it tends to SSM as :math:`\epsilon \to 0`.

    Cost: one energy of 3B samples; training needs a single backward pass. Use it where memory or a missing second
    derivative rules out SSM. The differences cancel: in a precision of p digits the rounding error of the values is
    about :math:`10^{-p} |E| D / \epsilon^2`, so keep ε well above 0.01 in single precision. Autocast and TF32 are off
    in its passes, forward and backward; weights and data in half precision raise.

    Where the score of a flow jumps, it is unbiased (unlike SSM), but only the samples closer to the jump than ε see
    it: the variance grows with 1/ε, and below 0.1 it warns. Where the density itself jumps, it is biased for every ε,
    and warns.

    Arguments:
        model: A wrapped flow (:func:`~ebflow_plugin.wrap`).
        eps: The length of the step, in the units of the matched variable. The paper uses 1.0 for MNIST in logit space,
            and 0.1 for CIFAR-10.
        sigma: The standard deviation of Gaussian noise that is added to the matched variable, or a
            :class:`NoiseSchedule` of it, as for :class:`SSM`. Wide noise leaves nothing finer than itself to see, so ε
            grows with it: :math:`\epsilon_t = \epsilon\, \sigma_t / \sigma_\text{end}`.
        common: ``generator`` of :class:`Objective`, ``energy_weight`` and ``latent_weight`` of
            :class:`ScoreObjective`.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> FDSSM(model, eps=0.5)(torch.randn(5, 2)).backward()
    """

    full_precision = True

    def __init__(
        self,
        model: EBFlow,
        *,
        eps: float = 0.1,
        sigma: float | NoiseSchedule | None = None,
        **common: Unpack[ScoreOptions],
    ) -> None:
        super().__init__(model, **common)
        self.noise = None if sigma is None else AddedNoise(sigma)
        self.eps = positive("eps", eps)
        harmed_by = checks.EVERY_JUMP if self.eps < SMALL_EPS else (Smoothness.JUMPS,)
        checks.warn_about_jumps(self, harmed_by, rarely=True)

    def drawn(self, u: Tensor, generator: Generator | None) -> tuple[Tensor, ...]:
        if torch.finfo(u.dtype).bits < 32:
            raise InputError(
                f"FDSSM subtracts nearly equal energies, of which {u.dtype} leaves nothing; train in float32 with "
                "autocast, which it switches off for itself, or use DSM or SSM"
            )
        size = prod(u.shape[1:])
        if self.noise is None:
            return u, sphere(u, generator) * (self.eps / sqrt(size))
        noised, eps = self.noise.add(u, generator), self.eps * self.noise.growth
        return noised, sphere(u, generator) * (eps / sqrt(size)), u.new_ones(()) * (size / eps**2)

    def matched(self, plan: Plan, u: Tensor, context: Tensor | None, drawn: tuple[Tensor, ...]) -> Matched:
        noised, step = drawn[:2]
        scale = prod(u.shape[1:]) / self.eps**2 if self.noise is None else drawn[2]
        rows = None if context is None else torch.cat([context] * 3)
        with full_precision(u):
            points = torch.cat([noised, noised + step, noised - step])
            energies, latents = plan.energy_from(0, (points,), plan.embed(rows))
        energy, ahead, after = energies.chunk(3)
        values = ((energy - ahead) + (energy - after) + 0.125 * (ahead - after).square()) * scale
        return full_precision_backward(values), tuple(z[: u.shape[0]] for z in latents), energy

    @property
    def added_noise(self) -> str:
        """The finite differences are noise too."""
        return ", ".join(filter(None, (f"eps={self.eps:g}", super().added_noise)))


class DSM(ScoreObjective):
    r"""Denoising score matching: the score of noised data, without a second derivative in x (Eq. 7).

    .. math:: L = \tfrac12 \mathbb{E}\left\|\nabla E(\tilde x) + \frac{x - \tilde x}{\sigma^2}\right\|^2,
              \qquad \tilde x \sim \mathcal{N}(x, \sigma^2 I)

    It learns the density of the noised data. It does not integrate by parts over the model, so jumps of the model's
    score do not bias it. Jumps of the model's density do, and it warns about them.

    Cost: one energy and its gradient; training adds one backward pass through both. Use it first: it is the cheapest
    and the most stable. A large σ is easy to learn and blurs the density; the variance of the loss grows with
    :math:`D/\sigma^2` as σ falls.

    Arguments:
        model: A wrapped flow (:func:`~ebflow_plugin.wrap`).
        sigma: The standard deviation of the noise, in the units of the matched variable; 1 by default. Or a
            :class:`NoiseSchedule`: noise that shrinks while the model trains. Without it, on data far from a Gaussian,
            the model's mass can leave for places where there are no data (:func:`~ebflow_plugin.coverage` tells).
        sigma_range: In place of ``sigma``, a range ``(low, high)`` from which σ is drawn for each sample,
            log-uniformly: it then learns the density of the data with the mixture of these noises.
        common: ``generator`` of :class:`Objective`, ``energy_weight`` and ``latent_weight`` of
            :class:`ScoreObjective`.

    Raises:
        UnsupportedStepError: If a step has wrong second derivatives: training differentiates the score with respect
            to the parameters.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> DSM(model, sigma=0.5)(torch.randn(5, 2)).backward()
        >>> DSM(model, sigma_range=(0.1, 1.0))(torch.randn(5, 2)).backward()
    """

    def __init__(
        self,
        model: EBFlow,
        *,
        sigma: float | NoiseSchedule | None = None,
        sigma_range: tuple[float, float] | None = None,
        **common: Unpack[ScoreOptions],
    ) -> None:
        super().__init__(model, **common)
        if sigma is not None and sigma_range is not None:
            raise InputError(f"pass sigma or sigma_range, not both; got {sigma!r} and {sigma_range!r}")
        self.sigma_range = None if sigma_range is None else _range(sigma_range)
        if sigma_range is None:
            self.noise = AddedNoise(1.0 if sigma is None else sigma)
        checks.refuse_false_derivatives(self)
        checks.warn_about_jumps(self, (Smoothness.JUMPS,))

    def drawn(self, u: Tensor, generator: Generator | None) -> tuple[Tensor, ...]:
        noise = gaussian_like(u, generator)
        sigma: Tensor | float
        if self.noise is not None:
            sigma = self.noise.sigma
        else:
            assert self.sigma_range is not None
            low, high = self.sigma_range
            sigma = low * (high / low) ** uniform_like(u.new_empty(len(u), *[1] * (u.dim() - 1)), generator)
        return u + sigma * noise, noise / sigma

    def matched(self, plan: Plan, u: Tensor, context: Tensor | None, drawn: tuple[Tensor, ...]) -> Matched:
        noised, pull = drawn[:2]  # (x - x̃) / σ² is -noise / σ
        found = derivatives(plan, noised, context)
        error = found.gradient - pull
        energy = plan.energy(u, context) if self.energy_weight else None  # of the data without noise
        return 0.5 * error.square().flatten(1).sum(1), found.latents, energy

    @property
    def added_noise(self) -> str:
        """The schedule, the constant or the range of σ."""
        return super().added_noise if self.sigma_range is None else f"sigma_range={self.sigma_range}"

    @property
    def sigma(self) -> float | NoiseSchedule | None:
        """The standard deviation of the noise, or its schedule; None for a range."""
        return None if self.noise is None else self.noise.option


def sphere(like: Tensor, generator: Generator | None) -> Tensor:
    r"""Uniform directions of length :math:`\sqrt D`, one per sample."""
    direction = gaussian_like(like, generator)
    length = torch.linalg.vector_norm(direction.flatten(1), dim=1).reshape(-1, *[1] * (like.dim() - 1))
    scaled: Tensor = direction * sqrt(prod(like.shape[1:])) / length
    return scaled


PROJECTIONS: dict[str, Callable[[Tensor, Generator | None], Tensor]] = {
    "gaussian": gaussian_like,
    "rademacher": signs_like,
    "sphere": sphere,
}


def _range(sigma_range: object) -> tuple[float, float]:
    if isinstance(sigma_range, (tuple, list)) and len(sigma_range) == 2:
        low, high = (positive("sigma_range", value) for value in sigma_range)
        if low < high:
            return low, high
    raise InputError(f"sigma_range must be (low, high) with 0 < low < high, got {sigma_range!r}")
