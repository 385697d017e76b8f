r"""Maximum likelihood: with determinants or without them (ML, RelativeML), and by samples (SML)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor

from ebflow_plugin.errors import InputError
from ebflow_plugin.model import EBFlow
from ebflow_plugin.objectives.base import Common, Objective
from ebflow_plugin.objectives.relative import relative_plan
from ebflow_plugin.objectives.stochastic import LogDetEstimator
from ebflow_plugin.plan.costs import LOG_DETS, ways
from ebflow_plugin.plan.inputs import integer, one_of, positive
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.step import LinearStep, Shape, Shapes

__all__ = ["ML", "SML", "RelativeML"]

TOLERANCE = 0.01
ITERATIONS = 50


class ML(Objective):
    r"""Maximum likelihood: the negative log-likelihood of the data, in data space (Eq. 2).

    .. math:: L = \mathbb{E}[-\log p(x)] = \mathbb{E}[E(x)] + \log Z

    ``log_det`` chooses how the gradient of :math:`\log Z`, of the determinants of the linear layers, is computed:

    - ``"exact"``: exactly. The *value* includes the log-det of the preprocessing, so models can be compared by it.
      Cost: one energy, and the determinant of every linear layer with its gradient, :math:`O(D^3)` for a dense one.
      Use it where that is affordable, to fine-tune after score matching, or as the baseline.
    - ``"stochastic"``: estimated for every layer whose determinant costs more than a product: full and wide 1 × 1
      matrices and convolutions, in either direction. With random signs v,

      .. math:: \partial \log|\det W| = \operatorname{tr}(W^{-1} \partial W) = \mathbb{E}_v[v^\top \partial W s],
                \qquad W s = v

      where s is solved for by GMRES, to a relative residual of ``tolerance``, preconditioned by the circular version
      of a convolution, or by the transpose of a matrix. Unbiased, up to that tolerance. Cost: one energy, and some ten
      products with each layer per probe. See :mod:`ebflow_plugin.objectives.stochastic`.
    - ``"relative"``: as :class:`RelativeML`.
    - ``"auto"``: relative for every ``FullLinear`` in its forward direction, stochastic for convolutions whose
      determinant costs more than 150 products, exact for the rest. ``model.report`` shows the choice.

    All but ``"exact"`` omit from the *value* the log-determinants of the layers that are estimated or relative. The
    value is then no likelihood, and falls without bound as those layers grow. Monitor ``model.log_prob``, as ``fit``
    does with its validation data.

    Where a solve does not converge, the layer uses its exact log-determinant in that step, with one warning.
    :meth:`metrics` counts these steps, and ``fit`` reports the count. A dense layer caches the inverse from such a
    step, as the preconditioner of later solves.

    Arguments:
        model: A wrapped flow (:func:`~ebflow_plugin.wrap`).
        log_det: ``"exact"``, ``"stochastic"``, ``"relative"`` or ``"auto"``.
        probes: The number of vectors v for each estimated layer. By default it is chosen for each layer and step, to
            minimise the variance of the gradient times the cost of the step. Give a number under
            ``torch.utils.checkpoint``, which calls the loss twice.
        tolerance: The relative residual of the solves.
        iterations: The largest number of products per solve.
        common: ``generator``, ``energy_weight`` and ``reduction`` of :class:`Objective`.

    Raises:
        InputError: If ``log_det="relative"`` is not defined for the model.
        SingularError: If a layer is singular; the message names it.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> x = torch.randn(5, 2)
        >>> torch.allclose(ML(model)(x), -model.log_prob(x).mean())
        True
        >>> from ebflow_nflows import FullConv2d
        >>> model = ebf.wrap(flows.Flow(FullConv2d(3, kernel_size=3), distributions.StandardNormal([3, 8, 8])))
        >>> ML(model, log_det="stochastic", probes=4)(torch.randn(5, 3, 8, 8)).backward()
    """

    in_data_space = True

    def __init__(
        self,
        model: EBFlow,
        *,
        log_det: str = "exact",
        probes: int | None = None,
        tolerance: float = TOLERANCE,
        iterations: int = ITERATIONS,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(model, **common)
        self.log_det = one_of("log_det", log_det, LOG_DETS)
        self.probes = None if probes is None else integer("probes", probes)
        self.tolerance = positive("tolerance", tolerance)
        self.iterations = integer("iterations", iterations)
        if self.tolerance >= 1:
            raise InputError(f"tolerance is a relative residual, below 1, got {tolerance!r}")
        given = (self.probes, self.tolerance, self.iterations) != (None, TOLERANCE, ITERATIONS)
        if given and self.log_det in ("exact", "relative"):
            raise InputError(
                f"probes, tolerance and iterations have no meaning for log_det={log_det!r}; use log_det='stochastic' "
                "or 'auto', or leave them out"
            )
        self._estimator = LogDetEstimator(self.probes, self.tolerance, self.iterations)
        self._cached_plan: tuple[Plan, Shape, Plan, list[tuple[LinearStep, Shapes]]] | None = None
        if self.log_det == "relative":
            relative_plan(model.core_plan)

    def per_sample(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None]:
        shape = tuple(x.shape[1:])
        if self.log_det == "exact":
            energy = self.energies(x, context)
            return energy + self.model.core.log_z(shape), energy
        plan, estimated = self._plan(shape)
        energy = self.energies(x, context) if self.log_det == "stochastic" else plan.energy(x, context)
        values = energy + plan.log_z(shape, energy, without=[step for step, _ in estimated])

        def energies(rows: slice) -> Tensor:
            return plan.energy(x[rows], None if context is None else context[rows])

        return values - self._estimator(estimated, x, energies, self.generator), energy

    def ways(self, event_shape: Shape) -> dict[str, str]:
        """How the gradient of each linear step's log-det is computed, by path: exact, stochastic or relative.

        Arguments:
            event_shape: The shape of one point of the matched variable.
        """
        return {step.path: way for step, way in ways(self.model.core_plan, event_shape, self.log_det).items()}

    def metrics(self) -> dict[str, Any]:
        return self._estimator.metrics() if self._estimator.accounts else {}

    def state(self) -> dict[str, Any]:
        return self._estimator.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._estimator.load_state(state)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the cached plan, whose steps belong to this model: a copy builds its own."""
        return {**self.__dict__, "_cached_plan": None}

    def extra_repr(self) -> str:
        """Describes the options."""
        if self.log_det in ("exact", "relative"):
            return super().extra_repr()
        probes = "chosen" if self.probes is None else self.probes
        solve = f"probes={probes}, tolerance={self.tolerance:g}, iterations={self.iterations}"
        return f"log_det={self.log_det!r}, {solve}, {super().extra_repr()}"

    def _plan(self, shape: Shape) -> tuple[Plan, list[tuple[LinearStep, Shapes]]]:
        """The plan with relative gradients where chosen, and the steps to estimate; cached for one plan and shape."""
        plan = self.model.core_plan
        if self._cached_plan is None or self._cached_plan[0] is not plan or self._cached_plan[1] != shape:
            chosen = ways(plan, shape, self.log_det)
            reached = dict(plan.shapes(shape))
            estimated = [(step, reached[step]) for step, way in chosen.items() if way == "stochastic"]
            if self.log_det == "relative" or "relative" in chosen.values():
                self._cached_plan = plan, shape, relative_plan(plan, strict=self.log_det == "relative"), estimated
            else:
                self._cached_plan = plan, shape, plan, estimated
        return self._cached_plan[2], self._cached_plan[3]


class RelativeML(ML):
    r"""Maximum likelihood with the relative gradient of every dense layer (Gresele et al. 2020; the paper's Table 4).

    The gradient with respect to the weight W of each ``FullLinear`` is multiplied by :math:`W^T W` on the right. The
    result is still a descent direction, and the term of the determinant becomes trivial:

    .. math:: \frac{\partial}{\partial W}\left(\mathbb{E}[E(x)] - \log|\det W|\right) W^T W
              = \mathbb{E}\left[\delta\, (W^T W x)^T\right] - W,
              \qquad \delta = \frac{\partial E}{\partial (W x)}

    ``backward()`` stores it in ``weight.grad``, at :math:`O(B D^2)`. All other parameters receive the gradient of
    maximum likelihood. The *value* is that of :class:`ML` without the log-determinants of the dense layers, which are
    never computed: it falls without bound as they grow, and is no likelihood. Monitor ``model.log_prob`` instead.

    Cost: one energy, and two more products for each dense layer in the backward pass. Use it to compare with score
    matching. It is shorthand for ``ML(model, log_det="relative")``. Adaptive optimisers rescale the gradient once
    more; the original work used plain ones too.

    Arguments:
        model: A wrapped flow (:func:`~ebflow_plugin.wrap`). Its linear steps must be ``FullLinear`` layers in their
            forward direction, or have a cheap log-det, which is computed exactly.
        common: ``generator``, ``energy_weight`` and ``reduction`` of :class:`Objective`.

    Raises:
        InputError: If a linear step has an expensive log-det and no relative gradient; the message lists all of them.

    References:
        Relative gradient optimization of the Jacobian term in unsupervised deep learning (Gresele et al., 2020),
        https://arxiv.org/abs/2006.15090

    Example:
        >>> import ebflow_plugin as ebf
        >>> import torch
        >>> from ebflow_nflows import FullLinear
        >>> from nflows import distributions, flows
        >>> model = ebf.wrap(flows.Flow(FullLinear(2), distributions.StandardNormal([2])))
        >>> RelativeML(model)(torch.randn(5, 2)).backward()
        >>> model.flow._transform.weight.grad.shape
        torch.Size([2, 2])
    """

    def __init__(self, model: EBFlow, **common: Unpack[Common]) -> None:
        if "log_det" in common:
            raise InputError("RelativeML is ML with log_det='relative'; leave log_det out, or use ML")
        super().__init__(model, log_det="relative", **common)


class SML(Objective):
    r"""Maximum likelihood by samples of the model, without a determinant (Eq. 4).

    .. math:: L = \mathbb{E}_{p_x}[E(x)] - \mathbb{E}_{\mathrm{sg}(p)}[E(x)]

    Its expected gradient is that of maximum likelihood. Its value is no likelihood, and is about zero near the optimum.
    The samples are drawn by the inverse of the flow, one for each row of the batch, and no gradient flows through them.

    Cost: the inverse of the flow for B samples (a solve in every linear layer, :math:`O(D^3)` for a dense one), and
    one energy of 2B samples. Use it for flows whose inverse is cheap, or to check ML.

    Arguments:
        model: A wrapped flow (:func:`~ebflow_plugin.wrap`) whose steps all have an inverse.
        options: ``generator``, ``energy_weight`` and ``reduction`` of :class:`Objective`. With ``reduction="none"``
            each row of the data is paired with one sample.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> SML(model, generator=torch.Generator().manual_seed(0))(torch.randn(5, 2)).backward()
    """

    def per_sample(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None]:
        core = self.model.core
        if context is None:
            drawn = core.sample(x.shape[0], generator=self.generator)
        else:
            drawn = core.sample(1, context, generator=self.generator).squeeze(1)
            context = torch.cat([context, context])
        energy, model_energy = self.energies(torch.cat([x, drawn.to(x)]), context).chunk(2)
        return energy - model_energy, energy
