r"""Reverse Kullback-Leibler divergence: training on an unnormalised density, without data."""

from __future__ import annotations

from functools import partial
from typing import Any, Unpack

import torch
from torch import Generator, Tensor

from ebflow_plugin.errors import InputError
from ebflow_plugin.linalg.memo import without_reading
from ebflow_plugin.model import EBFlow
from ebflow_plugin.objectives import checks
from ebflow_plugin.objectives.base import graphs_allowed
from ebflow_plugin.objectives.likelihood import LogDetObjective, LogDetOptions
from ebflow_plugin.options import integer, one_of
from ebflow_plugin.plan.inverse import reparametrised
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.sampling.target import LogDensity, log_density_of, refuse_integers


class ReverseKL(LogDetObjective):
    r"""The reverse Kullback-Leibler divergence from an unnormalised target density f, by samples of the model.

    .. math:: L = \mathbb{E}_z\left[\log q(x) - \log f(x)\right] = \mathrm{KL}(q \,\|\, f / Z_f) - \log Z_f,
              \qquad x = g^{-1}(z), \quad z \sim p_u

    It is called without a batch, ``objective()``; its minimum is :math:`-\log Z_f`. It finds modes and drops others:
    :func:`~ebflow_plugin.importance` judges the result.

    ``gradient`` chooses what flows through the samples x:

    - ``"path"``: the path gradient (Roeder et al. 2017, sticking the landing). The parameters of :math:`\log q` are
      constant, and only x moves,

      .. math:: \nabla_\theta L = \mathbb{E}_z\left[\left(\frac{\partial x}{\partial \theta}\right)^\top
                \nabla_x \left(\log q(x) - \log f(x)\right)\right], \qquad \nabla_x \log q = -\nabla_x E

      The rest has expectation zero. The variance vanishes where q equals the target, and no determinant of a linear
      layer is needed: those are constant in x.
    - ``"total"``: the gradient of the samples' mean itself, with the log-determinants of :class:`ML`, negated.

    ``log_det`` is that of :class:`ML`. For a path gradient it decides only whether the *value* includes the
    determinants (``"exact"``), which no gradient needs, and ``"relative"`` and ``"auto"`` multiply the gradient of
    each ``FullLinear`` by :math:`W^\top W`, as there. With all but ``"exact"`` the value falls or grows without bound.

    Cost: the inverse of the flow for n samples (a solve in every linear layer, :math:`O(D^3)` for a dense one) and its
    gradient, by the implicit function; one energy and its gradient in x; one gradient of the target.

    Arguments:
        model: A wrapped flow (:func:`~ebflow_plugin.wrap`) without a context, whose steps all have an inverse.
        log_density: Maps data ``(B, *)`` to log f, ``(B,)``, up to a constant; finite, and differentiable in x.
        n: The number of samples of a call.
        gradient: ``"path"`` or ``"total"``.
        options: ``log_det``, ``probes``, ``tolerance`` and ``iterations`` of :class:`ML`, ``generator`` of
            :class:`Objective`.

    References:
        Sticking the landing (Roeder et al., 2017), https://arxiv.org/abs/1703.09194

    Example:
        >>> import ebflow_plugin as ebf
        >>> from ebflow_nflows import FullLinear
        >>> from nflows import distributions, flows
        >>> model = ebf.wrap(flows.Flow(FullLinear(2), distributions.StandardNormal([2])))
        >>> objective = ReverseKL(model, lambda x: -0.5 * (x - 1.0).square().sum(1), n=64)
        >>> adam = torch.optim.Adam(model.parameters(), lr=0.1)
        >>> for _ in range(100):
        ...     adam.zero_grad()
        ...     objective().backward()
        ...     adam.step()
        >>> torch.allclose(model.sample(10_000).mean(0), torch.ones(2), atol=0.1)
        True
    """

    not_compiled = "it samples the model in each step"

    def __init__(
        self,
        model: EBFlow,
        log_density: LogDensity,
        n: int = 256,
        *,
        gradient: str = "path",
        **options: Unpack[LogDetOptions],
    ) -> None:
        super().__init__(model, **options)
        if not callable(log_density):
            raise InputError(f"log_density must be a function of x, got {type(log_density).__name__}")
        refuse_integers("ReverseKL", model)
        # Not as it is: a module would become part of this one, and its parameters would be trained.
        self.log_density = partial(log_density)
        self.n = integer("n", n)
        self.gradient = one_of("gradient", gradient, ("path", "total"))
        checks.refuse_false_derivatives(self)
        checks.warn_about_jumping_densities(self)

    def per_sample(self, plan: Plan, u: Tensor, context: Tensor | None, generator: Generator | None) -> Tensor:
        raise NotImplementedError("there is no batch: the samples are those of the model")

    def _losses(
        self, x: Any, context: Tensor | None, weights: Tensor | None, generator: Generator | None
    ) -> tuple[Tensor, None]:
        """Those of n samples of the model: x, the context and the weights are for the other terms of a sum."""
        with graphs_allowed(), without_reading():
            return self._drawn(self.generator if generator is None else generator), None

    def _drawn(self, generator: Generator | None) -> Tensor:
        plan = self.model.plan
        plan.refuse()
        if plan.waits_for_data():
            steps = "\n  ".join(step.where for step in plan.uninitialised())
            raise InputError(
                f"steps still need their data-dependent initialisation, and ReverseKL has no data: call "
                f"model.initialize(x) with points near the target\n  {steps}"
            )
        latents = reparametrised(plan, self.n, generator, self.model.like())
        shape = plan.event_shape or _shape(plan, latents)
        chosen, estimated = self.choose(plan, shape)
        without = [step for step, _ in estimated]
        drawn = chosen.decode(latents, plan.embed(None))
        if self.gradient == "total" and torch.is_grad_enabled():
            values = self._values(chosen, drawn) - chosen.log_z(shape, drawn, without)
            if not estimated:
                return values
            return values + self._estimator(estimated, drawn, lambda rows: values[rows], generator)
        with torch.enable_grad():
            point = drawn.detach().requires_grad_()
            values = self._values(plan, point)
            (slope,) = torch.autograd.grad(values.sum(), point)
        with torch.no_grad():
            constant = values - chosen.log_z(shape, drawn, without)
        moved = (drawn * slope).flatten(1).sum(1)
        return constant + (moved - moved.detach())

    def _values(self, plan: Plan, x: Tensor) -> Tensor:
        """-E(x) - log f(x), one value per sample."""
        target = log_density_of(self.log_density, x)
        if x.requires_grad and not target.requires_grad:
            raise InputError("log_density returns no gradient in x: compute it with torch, without detach() or numpy()")
        return -plan.energy(x) - target.to(x)

    def extra_repr(self) -> str:
        """Describes the target and the options."""
        target = self.log_density.func
        name = getattr(target, "__name__", type(target).__name__)
        return f"{name}, n={self.n}, gradient={self.gradient!r}, {super().extra_repr()}"


def _shape(plan: Plan, latents: tuple[Tensor, ...]) -> tuple[int, ...]:
    with torch.no_grad():
        return tuple(plan.decode(tuple(z[:1] for z in latents), plan.embed(None)).shape[1:])
