r"""The gradient of log-determinants without determinants: probes, solves, and the number of probes.

For a layer with the matrix W and an approximate inverse M of it (:mod:`ebflow_plugin.linalg.operators`),

.. math:: \partial \log|\det W| = \operatorname{tr}(W^{-1} \partial W) = \operatorname{tr}(M\, \partial W)
          + \mathbb{E}_v\left[v^\top \partial W\, (s - M v)\right], \qquad W s = v, \quad \mathbb{E}[v v^\top] = I

The first term has a closed form, the second is estimated. It is small where M is accurate: away from the edges of an
image for the circular version of a convolution, everywhere for a layer that is nearly orthogonal.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor

from ebflow_plugin.errors import ConditioningWarning, SingularError
from ebflow_plugin.linalg.dense import without_autocast
from ebflow_plugin.linalg.krylov import gmres
from ebflow_plugin.linalg.operators import Operator, dense_inverse
from ebflow_plugin.objectives import score_matching
from ebflow_plugin.plan.step import LinearStep, Shapes

__all__ = ["LogDetEstimator"]

LOOKS = 3  # batches over which the noise is measured before the number of probes is chosen
# When to choose again: the noise of a layer grows as it moves away from its start, and quickly at first.
LOOK_AGAIN_AT, LOOK_AGAIN_EVERY = (15, 30, 60, 120), 200
FIRST_PROBES = 4  # the number of probes while the noise is measured
MOST_PROBES = 64
NOISE_SHARE = 0.5  # the variance that the probes may add, as a share of that of the batch
COST_SHARE = 0.5  # the products that the solves may need, as a share of the batch's forward and backward passes


@dataclass
class Account:
    """Statistics of the estimates of one layer.

    Attributes:
        calls: The number of estimates so far.
        probes: The number of probes; None until it is chosen.
        probe_noise: The variance of the gradient of one probe, summed over the measured batches.
        batch_noise: The variance of the gradient of the batch, summed over the measured batches.
        looks: The number of measured batches.
        exact: The number of steps whose solve did not converge, and which used the exact log-det.
        iterations: The iterations of the last solve.
        residual: The residual of the last solve, the largest of all probes.
        inverse: The inverse of a dense layer, from the last step whose solve did not converge.
    """

    calls: int = 0
    probes: int | None = None
    probe_noise: float = 0.0
    batch_noise: float = 0.0
    looks: int = 0
    exact: int = 0
    iterations: int = 0
    residual: float = 0.0
    inverse: Tensor | None = None


@dataclass(frozen=True)
class _Solved:
    """The solves of one layer: the probes v, and the remainders of their solutions, s - M v."""

    step: LinearStep
    shapes: Shapes
    operator: Operator
    probes: Tensor
    remainder: Tensor
    trace: Tensor | None
    residual: Tensor

    @property
    def weight(self) -> float:
        """The factor of log|det W| in the log-det of the step."""
        return -self.operator.times if self.step.inverted else self.operator.times


@dataclass
class LogDetEstimator:
    r"""Estimates the gradient of the sum of the log-determinants of some layers.

    Arguments:
        probes: The number of probes for each layer. None chooses it for each layer separately, on the first three
            batches, and again after 15, 30, 60, 120 and every 200: enough to make the variance of the estimate half of
            that of the batch (estimated from two halves of the batch), as long as the solves need at most half as many
            products as the forward and backward passes of the batch.
        tolerance: The relative residual of the solves.
        iterations: The largest number of products per solve.

    Synchronises with the device once in four iterations of each solve, and once for the residuals of all layers. For
    the paper's cnn, with 8 iterations in each of six layers, that is 13 times a step.
    """

    probes: int | None
    tolerance: float
    iterations: int
    accounts: dict[str, Account] = field(default_factory=dict)

    def __call__(
        self,
        layers: Sequence[tuple[LinearStep, Shapes]],
        batch: Tensor,
        energy: Callable[[slice], Tensor],
        generator: Generator | None,
    ) -> Tensor:
        """Returns a scalar 0 whose gradient estimates that of the sum of the layers' log-determinants.

        Arguments:
            layers: Steps with an operator, and the event shapes of their inputs.
            batch: The batch, with shape ``(B, *)``.
            energy: Computes the energies of some rows of the batch; called where the noise of the batch is measured.
            generator: Draws the probes.

        Raises:
            SingularError: If a solve does not converge, and there is no exact log-determinant either.
        """
        trainable = [(step, shapes) for step, shapes in layers if _parameters(step)]
        if not trainable or not torch.is_grad_enabled():
            return batch.new_zeros(())
        with without_autocast(batch):
            solved = [self._solve(step, shapes, generator) for step, shapes in trainable]
            largest = torch.stack([each.residual.max().to(batch) for each in solved])
            residuals = [0.0] * len(solved) if largest.is_meta else largest.tolist()  # one transfer for all layers
            total = batch.new_zeros(())
            measured: list[tuple[_Solved, Tensor]] = []
            for each, residual in zip(solved, residuals, strict=True):
                account = self.accounts[each.step.path]
                account.residual = residual
                if residual <= self.tolerance:
                    product = each.operator.product(each.remainder)
                    terms = (each.probes * product).flatten(1).sum(1)
                    if self.probes is None and account.probes is None and len(batch) > 1 and not batch.is_meta:
                        measured.append((each, terms))
                    estimate = terms.mean() if each.trace is None else terms.mean() + each.trace
                    total = total + each.weight * (estimate - estimate.detach()).to(total)
                else:
                    total = total + self._exact(each).to(total)
            if measured:
                middle = len(batch) // 2
                halves = [energy(part).mean() for part in (slice(middle), slice(middle, None))]
                self._measure_noise(measured, halves, len(batch))
        return total

    def metrics(self) -> dict[str, Any]:
        """For each layer: the number of probes, the last solve, and how often the exact log-det was used."""
        layers = {
            path: {
                "probes": self._count(account),
                "iterations": account.iterations,
                "residual": account.residual,
                "exact": account.exact,
            }
            for path, account in self.accounts.items()
        }
        return {"log_det": layers, "exact_log_dets": sum(account.exact for account in self.accounts.values())}

    def state(self) -> dict[str, Any]:
        """The statistics that later estimates depend on."""
        return {path: dict(vars(account)) for path, account in self.accounts.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state` returned."""
        self.accounts = {path: Account(**account) for path, account in state.items()}

    def _count(self, account: Account) -> int:
        return self.probes or account.probes or FIRST_PROBES

    def _solve(self, step: LinearStep, shapes: Shapes, generator: Generator | None) -> _Solved:
        operator = step.operator(step.own_shape(shapes))
        assert operator is not None
        account = self.accounts.setdefault(step.path, Account())
        if account.calls in LOOK_AGAIN_AT or account.calls % LOOK_AGAIN_EVERY == 0:
            account.probes, account.looks, account.probe_noise, account.batch_noise = None, 0, 0.0, 0.0
        account.calls += 1
        count = self._count(account)
        with torch.no_grad():
            if operator.matrix is not None and account.inverse is not None:
                approximation = dense_inverse(operator.matrix, account.inverse.to(operator.like))
            else:
                approximation = operator.approximate()
            probes = score_matching.rademacher(operator.like.new_empty(count, *operator.out_shape), generator)
            solution = gmres(
                lambda flat: operator.product(flat.unflatten(1, operator.shape)).flatten(1),
                probes.flatten(1),
                precondition=lambda flat: approximation.solve(flat.unflatten(1, operator.out_shape)).flatten(1),
                tolerance=self.tolerance,
                iterations=self.iterations,
            )
            remainder = solution.x.unflatten(1, operator.shape)
            if approximation.control is not None:
                remainder = remainder - approximation.control(probes)
        account.iterations = solution.iterations
        trace = None if approximation.trace is None else approximation.trace()
        return _Solved(step, shapes, operator, probes, remainder, trace, solution.residuals)

    def _exact(self, each: _Solved) -> Tensor:
        """A scalar 0 with the gradient of the exact log-det, in place of an estimate."""
        step, account, matrix = each.step, self.accounts[each.step.path], each.operator.matrix
        account.exact += 1
        if account.exact == 1:
            warnings.warn(
                f"{step.where}: a solve for the gradient of its log-det did not converge in {self.iterations} "
                f"iterations (residual {account.residual:.1e}, tolerance {self.tolerance:g}), so the exact log-det is "
                "used in this step, and in every later one where that happens; fit() counts them as exact_log_dets. "
                "The layer is nearly singular, or far from its preconditioner: allow more iterations or a larger "
                "tolerance, or keep the layer well-conditioned (conditioning= of fit).",
                ConditioningWarning,
                stacklevel=6,
            )
        try:
            exact = torch.as_tensor(step.log_det(each.shapes))
        except SingularError as error:
            raise SingularError(f"a linear step has no finite log-determinant\n  {step.where}\n{error}") from error
        if not bool(torch.isfinite(exact.detach())):
            raise SingularError(
                f"a linear step has no finite log-determinant: its weight is singular, or holds inf or NaN\n  "
                f"{step.where}\nGo back to an earlier checkpoint, lower the learning rate, or start the layer from an "
                "orthogonal matrix."
            )
        if matrix is not None:  # costs as much as the exact log-det, and preconditions later solves
            account.inverse = torch.linalg.inv(matrix.detach())
        return exact - exact.detach()

    def _measure_noise(self, measured: Sequence[tuple[_Solved, Tensor]], halves: Sequence[Tensor], rows: int) -> None:
        """Adds up the noise of the probes and of the batch; after ``LOOKS`` batches chooses the number of probes."""
        groups = [_parameters(each.step) for each, _ in measured]
        first, second = (_gradients(half, groups) for half in halves)
        noise = []
        for (each, terms), parameters, one, other in zip(measured, groups, first, second, strict=True):
            by_probe = torch.stack([_gradients(term, [parameters])[0] for term in terms]) * each.weight
            noise.append(torch.stack([by_probe.var(0).sum(), (one - other).square().sum() / 4]))
        for (each, _), (probe_noise, batch_noise) in zip(measured, torch.stack(noise).tolist(), strict=True):
            if not math.isfinite(probe_noise + batch_noise):
                continue  # the loss or its gradient is not finite, which the guards of fit report
            account = self.accounts[each.step.path]
            account.looks += 1
            account.probe_noise += probe_noise
            account.batch_noise += batch_noise
            if account.looks == LOOKS:
                wanted = account.probe_noise / max(NOISE_SHARE * account.batch_noise, 1e-300)
                affordable = COST_SHARE * 3 * rows / (account.iterations + 3)
                account.probes = max(1, min(math.ceil(min(wanted, MOST_PROBES)), int(affordable)))


def _parameters(step: LinearStep) -> list[Tensor]:
    return [parameter for parameter in step.module.parameters() if parameter.requires_grad]


def _gradients(value: Tensor, groups: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The gradient with respect to the parameters of each group, as one vector per group."""
    every = [parameter for group in groups for parameter in group]
    gradients = iter(torch.autograd.grad(value, every, retain_graph=True, allow_unused=True, materialize_grads=True))
    return [torch.cat([next(gradients).detach().flatten() for _ in group]) for group in groups]
