r"""Score matching: exact (SM), sliced (SSM), by finite differences (FDSSM), and denoising (DSM).

All of them depend on the energy only up to a constant in x, so they need no determinant of a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod, sqrt
from typing import Unpack

import torch
from torch import Generator, Tensor

from ebflow_plugin.errors import InputError
from ebflow_plugin.linalg.random import gaussian_like, uniform_like
from ebflow_plugin.model import EBFlow
from ebflow_plugin.objectives import checks
from ebflow_plugin.objectives.base import Common, Objective
from ebflow_plugin.plan.derivatives import Derivatives, derivatives, dot, transformed
from ebflow_plugin.plan.inputs import flag, integer, one_of, positive
from ebflow_plugin.plan.smoothness import Smoothness

__all__ = ["DSM", "FDSSM", "SM", "SSM", "ScoreObjective"]

SMALL_EPS = 0.1  # below it, only a handful of samples show FDSSM the jumps of a score


class ScoreObjective(Objective):
    """An objective of the score alone. On its first batch it warns of parameters that it cannot train."""

    def __init__(self, model: EBFlow, *, _step: float = 0.0, **common: Unpack[Common]) -> None:
        super().__init__(model, **common)
        self._blind_spots = checks.BlindSpots(model, energy_is_seen=self.energy_weight > 0, step=_step)

    def inspect_batch(self, x: Tensor, context: Tensor | None) -> str | None:
        """Searches for blind spots on the first batch with gradients, outside ``torch.func`` transforms."""
        if self._blind_spots.pending and torch.is_grad_enabled() and not transformed():
            return self._blind_spots.search(x, context)
        return None

    def derivatives(
        self, x: Tensor, context: Tensor | None, directions: Sequence[Tensor] = (), gradient: bool = True
    ) -> Derivatives:
        """The gradient of the energy at x, and its curvatures along directions; the energy too if it has a weight."""
        energy = self.energy_weight > 0
        return derivatives(self.model.core_plan, x, context, directions, gradient=gradient, energy=energy)

    @contextmanager
    def leaving_the_data(self, how: str) -> Iterator[None]:
        """Adds a note to errors of the flow: the noise may have moved the data out of its domain."""
        try:
            yield
        except InputError:  # its message already explains the input
            raise
        except Exception as error:
            error.add_note(
                f"{type(self).__name__} adds noise to the data ({how}). If that left the domain of the flow, map the "
                "domain to all of R^D first (wrap(flow, preprocess=[Logit()])), use less noise, or use SSM or ML."
            )
            raise


class SM(ScoreObjective):
    r"""Score matching with the exact trace of the Hessian (Section 2.2, Hyvärinen 2005).

    .. math:: L = \mathbb{E}\left[\tfrac12 \|\nabla E(x)\|^2 - \operatorname{tr} \nabla^2 E(x)\right]

    Cost: one energy, its gradient, and D Hessian-vector products. Use it for small D, and to check the others.

    It integrates by parts, so it needs a continuous score and data with a continuous density. It warns about steps
    whose score jumps, and about a ``Dequantize`` with uniform noise.

    Arguments:
        model: A wrapped flow (:func:`~ebflow_plugin.wrap`).
        common: ``generator``, ``energy_weight`` and ``reduction`` of :class:`Objective`.

    Raises:
        UnsupportedStepError: If a step has wrong second derivatives.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.IdentityTransform(), distributions.StandardNormal([2])))
        >>> SM(model)(torch.tensor([[1.0, 0.0]])).item()  # ½ · 1² - 2
        -1.5
    """

    def __init__(self, model: EBFlow, **common: Unpack[Common]) -> None:
        super().__init__(model, **common)
        checks.refuse_false_derivatives(self)
        checks.warn_about_jumps(self, checks.EVERY_JUMP)
        checks.warn_about_uniform_noise(self)

    def per_sample(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None]:
        size = prod(x.shape[1:])
        axes = torch.eye(size, dtype=x.dtype, device=x.device).reshape(size, 1, *x.shape[1:])
        result = self.derivatives(x, context, [axis.expand_as(x) for axis in axes])
        return 0.5 * dot(result.gradient, result.gradient) - torch.stack(result.curvatures).sum(0), result.energy


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
        projected: Uses :math:`\tfrac12 (v^T \nabla E)^2` in place of :math:`\tfrac12 \|\nabla E\|^2`, as sliced
            score matching was first proposed: the same in expectation, with more variance. A flow of linear and
            elementwise steps then needs no gradient in x, and costs as much as FDSSM, without an ε.
        common: ``generator``, ``energy_weight`` and ``reduction`` of :class:`Objective`.

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
        projected: bool = False,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(model, **common)
        self.projections = integer("projections", projections)
        self.projection = one_of("projection", projection, PROJECTIONS)
        self.projected = flag("projected", projected)
        checks.refuse_false_derivatives(self)
        checks.warn_about_jumps(self, checks.EVERY_JUMP)
        checks.warn_about_uniform_noise(self)

    def per_sample(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None]:
        directions = [PROJECTIONS[self.projection](x, self.generator) for _ in range(self.projections)]
        result = self.derivatives(x, context, directions, gradient=not self.projected)
        curvature = torch.stack(result.curvatures).mean(0)
        if self.projected:
            return 0.5 * torch.stack(result.slopes).square().mean(0) - curvature, result.energy
        return 0.5 * dot(result.gradient, result.gradient) - curvature, result.energy

    def extra_repr(self) -> str:
        """Describes the options."""
        more = ", projected" if self.projected else ""
        return f"projections={self.projections}, projection={self.projection!r}{more}, {super().extra_repr()}"


class FDSSM(ScoreObjective):
    r"""Sliced score matching by finite differences: three energies and no derivative in x (Eq. 6, scaled).

    .. math:: L = \frac{D}{\epsilon^2}\, \mathbb{E}\left[2E(x) - E(x+\delta) - E(x-\delta)
              + \tfrac18 \left(E(x+\delta) - E(x-\delta)\right)^2\right],
              \qquad \|\delta\| = \epsilon \text{ uniformly}

    With the factor :math:`D/\epsilon^2` it tends to SSM as :math:`\epsilon \to 0`.

    Cost: one energy of 3B samples; training needs a single backward pass. Use it where memory or a missing second
    derivative rules out SSM. The differences cancel: in a precision of p digits the rounding error of the values is
    about :math:`10^{-p} |E| D / \epsilon^2`, so keep ε well above 0.01 in single precision.

    Where the score of a flow jumps, it is unbiased (unlike SSM), but only the samples closer to the jump than ε see
    it: the variance grows with 1/ε, and below 0.1 it warns. Where the density itself jumps, it is biased for every ε,
    and warns.

    Arguments:
        model: A wrapped flow (:func:`~ebflow_plugin.wrap`).
        eps: The length of the step, in the units of the matched variable. The paper uses 1.0 for MNIST in logit space,
            and 0.1 for CIFAR-10.
        common: ``generator``, ``energy_weight`` and ``reduction`` of :class:`Objective`.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> FDSSM(model, eps=0.5)(torch.randn(5, 2)).backward()
    """

    def __init__(self, model: EBFlow, *, eps: float = 0.1, **common: Unpack[Common]) -> None:
        length = positive("eps", eps)
        super().__init__(model, _step=length, **common)
        self.eps = length
        harmed_by = checks.EVERY_JUMP if self.eps < SMALL_EPS else (Smoothness.JUMPS,)
        checks.warn_about_jumps(self, harmed_by, rarely=True)

    def per_sample(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None]:
        size = prod(x.shape[1:])
        step = sphere(x, self.generator) * (self.eps / sqrt(size))
        rows = None if context is None else torch.cat([context] * 3)
        with self.leaving_the_data(f"eps={self.eps:g}"):
            energy, ahead, after = self.energies(torch.cat([x, x + step, x - step]), rows).chunk(3)
        values = (energy - ahead) + (energy - after) + 0.125 * (ahead - after).square()
        return values * (size / self.eps**2), energy

    def extra_repr(self) -> str:
        """Describes the options."""
        return f"eps={self.eps:g}, {super().extra_repr()}"


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
        sigma: The standard deviation of the noise, in the units of the matched variable: a number, or levels
            ``[0.1, 0.5, 1.0]``, one of which is drawn for each sample, uniformly. By default 1.
        sigma_range: In place of ``sigma``, a range ``(low, high)`` from which σ is drawn for each sample,
            log-uniformly. With more than one σ, it learns the density of the data with the mixture of these noises.
        common: ``generator``, ``energy_weight`` and ``reduction`` of :class:`Objective`.

    Raises:
        UnsupportedStepError: If a step has wrong second derivatives: training differentiates the score with respect
            to the parameters.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> DSM(model, sigma=0.5)(torch.randn(5, 2)).backward()
        >>> DSM(model, sigma=[0.1, 1.0])(torch.randn(5, 2)).backward()
        >>> DSM(model, sigma_range=(0.1, 1.0))(torch.randn(5, 2)).backward()
    """

    def __init__(
        self,
        model: EBFlow,
        *,
        sigma: float | Sequence[float] | None = None,
        sigma_range: tuple[float, float] | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(model, **common)
        if sigma is not None and sigma_range is not None:
            raise InputError(f"pass sigma or sigma_range, not both; got {sigma!r} and {sigma_range!r}")
        self.sigma_range = None if sigma_range is None else _range(sigma_range)
        self.sigma = None if sigma_range is not None else _levels(1.0 if sigma is None else sigma)
        checks.refuse_false_derivatives(self)
        checks.warn_about_jumps(self, (Smoothness.JUMPS,))

    def per_sample(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None]:
        noise = gaussian_like(x, self.generator)
        sigma = self._draw_sigma(x)
        with self.leaving_the_data(self._noise()):
            gradient = self.derivatives(x + sigma * noise, context).gradient
        error = gradient - noise / sigma  # (x - x̃) / σ² is -noise / σ
        return 0.5 * dot(error, error), None

    def _draw_sigma(self, x: Tensor) -> Tensor | float:
        if isinstance(self.sigma, float):
            return self.sigma
        shape = (x.shape[0], *[1] * (x.dim() - 1))
        if isinstance(self.sigma, list):
            where = x.device if self.generator is None else self.generator.device
            index = torch.randint(len(self.sigma), shape, generator=self.generator, device=where)
            table = torch.stack([x.new_full((), sigma) for sigma in self.sigma])  # no copy from the host, which waits
            return table[index.to(x.device, non_blocking=True)]
        assert self.sigma_range is not None
        low, high = self.sigma_range
        return low * (high / low) ** uniform_like(x.new_empty(shape), self.generator)

    def extra_repr(self) -> str:
        """Describes the options."""
        return f"{self._noise()}, {super().extra_repr()}"

    def _noise(self) -> str:
        return f"sigma={self.sigma}" if self.sigma_range is None else f"sigma_range={self.sigma_range}"


def rademacher(like: Tensor, generator: Generator | None) -> Tensor:
    """Entries of +1 and -1."""
    where = like.device if generator is None else generator.device
    empty = torch.empty(like.shape, device=where, dtype=like.dtype)  # the same draws for any memory format
    drawn = torch.bernoulli(empty, 0.5, generator=generator)  # not in place: vmap then draws anew for each sample
    return drawn.mul(2.0).sub(1.0).to(like.device, non_blocking=True)


def sphere(like: Tensor, generator: Generator | None) -> Tensor:
    r"""Uniform directions of length :math:`\sqrt D`, one per sample."""
    direction = gaussian_like(like, generator)
    length = torch.linalg.vector_norm(direction.flatten(1), dim=1).reshape(-1, *[1] * (like.dim() - 1))
    scaled: Tensor = direction * sqrt(prod(like.shape[1:])) / length
    return scaled


PROJECTIONS: dict[str, Callable[[Tensor, Generator | None], Tensor]] = {
    "gaussian": gaussian_like,
    "rademacher": rademacher,
    "sphere": sphere,
}


def _levels(sigma: object) -> float | list[float]:
    if isinstance(sigma, tuple) and len(sigma) == 2:  # a range in earlier versions, and still reads like one
        raise InputError(
            f"sigma={sigma!r} may be a range or two levels: write sigma_range={sigma!r}, or sigma={list(sigma)!r}"
        )
    many = isinstance(sigma, Sequence) and not isinstance(sigma, str)
    values = list(sigma) if isinstance(sigma, Sequence) and many else [sigma]
    try:
        levels = [positive("sigma", value) for value in values]
    except InputError:
        levels = []
    if not levels:
        raise InputError(f"sigma must be a positive number, or a list of them to choose from; got {sigma!r}")
    return levels if many else levels[0]


def _range(sigma_range: object) -> tuple[float, float]:
    if isinstance(sigma_range, (tuple, list)) and len(sigma_range) == 2:
        low, high = (positive("sigma_range", value) for value in sigma_range)
        if low < high:
            return low, high
    raise InputError(f"sigma_range must be (low, high) with 0 < low < high, got {sigma_range!r}")
