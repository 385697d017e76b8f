r"""Maximum likelihood: with determinants or without them (ML), and by samples (SML)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Generator, Tensor

from ebflow_plugin.errors import InputError, UnsupportedStepError
from ebflow_plugin.linalg.memo import is_tracing, without_reading
from ebflow_plugin.model import EBFlow
from ebflow_plugin.objectives.base import Common, DrawnObjective, Objective
from ebflow_plugin.objectives.relative import relative_plan
from ebflow_plugin.objectives.stochastic import LogDetEstimator
from ebflow_plugin.options import integer, one_of, positive
from ebflow_plugin.plan.inverse import draw
from ebflow_plugin.plan.log_dets import LOG_DETS, log_det_methods
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.step import LinearStep, Shape, Shapes

TOLERANCE = 0.01
ITERATIONS = 50


class LogDetOptions(Common, total=False):
    """The options of an objective with log-determinants; see :class:`ML`."""

    log_det: str
    probes: int | None
    tolerance: float
    iterations: int


class LogDetObjective(Objective):
    """An objective with the log-determinants of the linear layers, and a choice of how to differentiate them.

    Arguments:
        model: A wrapped flow (:func:`~ebflow_plugin.wrap`).
        log_det: As for :class:`ML`.
        probes: As for :class:`ML`.
        tolerance: As for :class:`ML`.
        iterations: As for :class:`ML`.
        common: ``generator`` of :class:`Objective`.
    """

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
        if self.log_det == "relative":
            relative_plan(model.core)

    def choose(self, plan: Plan, shape: Shape) -> tuple[Plan, list[tuple[LinearStep, Shapes]]]:
        """The plan with relative gradients where they are chosen, and the steps whose log-dets are estimated."""
        chosen = {} if self.log_det == "exact" else log_det_methods(plan, shape, self.log_det)
        reached = dict(plan.shapes(shape)) if "stochastic" in chosen.values() else {}
        estimated = [(step, reached[step]) for step, way in chosen.items() if way == "stochastic"]
        if "relative" in (self.log_det, *chosen.values()):
            plan = relative_plan(plan, strict=self.log_det == "relative")
        return plan, estimated

    def log_det_methods(self, event_shape: Shape) -> dict[str, str]:
        """How the gradient of each linear step's log-det is computed, by path: exact, stochastic or relative.

        Arguments:
            event_shape: The shape of one point of the matched variable.
        """
        chosen = log_det_methods(self.model.core, event_shape, self.log_det)
        return {step.path: method for step, method in chosen.items()}

    def metrics(self) -> dict[str, Any]:
        return self._estimator.metrics() if self._estimator.accounts else {}

    def state(self) -> dict[str, Any]:
        return self._estimator.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._estimator.load_state(state)

    def extra_repr(self) -> str:
        """Describes the options."""
        if self.log_det in ("exact", "relative"):
            return f"log_det={self.log_det!r}"
        probes = "chosen" if self.probes is None else self.probes
        solve = f"probes={probes}, tolerance={self.tolerance:g}, iterations={self.iterations}"
        return f"log_det={self.log_det!r}, {solve}"


class ML(LogDetObjective):
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
    - ``"relative"``: the relative gradient of every dense layer (Gresele et al. 2020; the paper's Table 4): the
      gradient with respect to the weight W of each ``FullLinear`` is multiplied by :math:`W^\top W` on the right. The
      result is still a descent direction, and the term of the determinant becomes trivial:

      .. math:: \frac{\partial}{\partial W}\left(\mathbb{E}[E(x)] - \log|\det W|\right) W^\top W
                = \mathbb{E}\left[\delta\, (W^\top W x)^\top\right] - W,
                \qquad \delta = \frac{\partial E}{\partial (W x)}

      ``backward()`` stores it in ``weight.grad``. Cost: one energy, and two more products for each dense layer in the
      backward pass. All other linear steps must have a cheap log-det, which is computed exactly.
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
        common: ``generator`` of :class:`Objective`.

    Raises:
        InputError: If ``log_det="relative"``, and a linear step has an expensive log-det and no relative gradient; the
            message lists all of them.
        SingularError: If a layer is singular; the message names it.

    References:
        Relative gradient optimization of the Jacobian term in unsupervised deep learning (Gresele et al., 2020),
        https://arxiv.org/abs/2006.15090

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

    def per_sample(self, plan: Plan, u: Tensor, context: Tensor | None, generator: Generator | None) -> Tensor:
        shape = tuple(u.shape[1:])
        plan, estimated = self.choose(plan, shape)
        energy = plan.energy(u, context)
        values = energy + plan.log_z(shape, energy, without=[step for step, _ in estimated])
        if not estimated:
            return values
        if is_tracing():
            raise UnsupportedStepError(
                f"{estimated[0][0].where}: its log-det is estimated by a solver, which is no part of a compiled loss; "
                "use ML(model) with exact log-dets, or leave this loss uncompiled"
            )

        def energies(rows: slice) -> Tensor:
            return plan.energy(u[rows], None if context is None else context[rows])

        return values - self._estimator(estimated, u, energies, generator)


class SML(DrawnObjective):
    r"""Maximum likelihood by samples of the model, without a determinant (Eq. 4).

    .. math:: L = \mathbb{E}_{p_x}[E(x)] - \mathbb{E}_{\mathrm{sg}(p)}[E(x)]

    Its expected gradient is that of maximum likelihood. Its value is no likelihood, and is about zero near the optimum.
    The samples are drawn by the inverse of the flow, one for each row of the batch, and no gradient flows through them.

    Cost: the inverse of the flow for B samples (a solve in every linear layer, :math:`O(D^3)` for a dense one), and
    one energy of 2B samples. Use it for flows whose inverse is cheap, or to check ML.

    Arguments:
        model: A wrapped flow (:func:`~ebflow_plugin.wrap`) whose steps all have an inverse.
        options: ``generator`` of :class:`Objective`.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> SML(model, generator=torch.Generator().manual_seed(0))(torch.randn(5, 2)).backward()
    """

    def draw(self, plan: Plan, u: Tensor, context: Tensor | None, generator: Generator | None) -> tuple[Tensor, ...]:
        with without_reading():
            if context is None:
                return (draw(plan, len(u), None, generator, u).to(u),)
            return (draw(plan, 1, context, generator, u).squeeze(1).to(u),)

    def value(self, plan: Plan, u: Tensor, context: Tensor | None, drawn: tuple[Tensor, ...]) -> Tensor:
        rows = None if context is None else torch.cat([context, context])
        energy, model_energy = plan.energy(torch.cat([u, *drawn]), rows).chunk(2)
        return energy - model_energy
