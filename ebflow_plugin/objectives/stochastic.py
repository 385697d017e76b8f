r"""The gradient of log-determinants without determinants: probes, solves, and how many of them.

For a layer with the matrix W and an approximate inverse M of it (:mod:`ebflow_plugin.linalg.operators`),

.. math:: \partial \log|\det W| = \operatorname{tr}(W^{-1} \partial W) = \operatorname{tr}(M\, \partial W)
          + \mathbb{E}_v\left[v^\top \partial W\, (s - M v)\right], \qquad W s = v, \quad \mathbb{E}[v v^\top] = I

The first term is known in closed form, the second is estimated. It is small where M is good: away from the edges of an
image for the circular twin of a convolution, everywhere for a layer that is nearly orthogonal.
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

LOOKS = 3  # batches that are looked at before the number of probes is chosen
# When to choose again: layers that move away from their start have more noise, and do so quickly at first.
LOOK_AGAIN_AT, LOOK_AGAIN_EVERY = (15, 30, 60, 120), 200
FIRST_PROBES = 4  # on them
MOST_PROBES = 64
NOISE_SHARE = 0.5  # of the variance of the batch is what the probes may add
COST_SHARE = 0.5  # of the products that the batch takes, forwards and backwards, is what the solves may take


@dataclass
class Account:
    """What is known about the estimates of one layer.

    Attributes:
        calls: How many estimates there were.
        probes: How many it gets; None until that is chosen.
        probe_noise: Sums over the batches that were looked at: the variance of the gradient by one probe.
        batch_noise: The same of the batch.
        looks: How many batches that were.
        exact: In how many steps the solve did not converge, and the exact log-det was taken.
        iterations: Of the last solve.
        residual: Of the last solve, the largest of all probes.
        inverse: Of a dense layer, at the last step whose solve did not converge.
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
    """The solves of one layer: probes v and what is left of their solutions, s - M v."""

    step: LinearStep
    shapes: Shapes
    operator: Operator
    probes: Tensor
    rest: Tensor
    known: Tensor | None
    residual: Tensor

    @property
    def weight(self) -> float:
        """How often log|det W| counts in that of the step."""
        return -self.operator.times if self.step.inverted else self.operator.times


@dataclass
class LogDetEstimator:
    r"""Estimates the gradient of the sum of the log-determinants of some layers.

    Arguments:
        probes: How many for each layer. None to choose, for each layer by itself, from the first three batches, and
            again after 15, 30, 60, 120 and every 200: as many as make the variance of the estimate half of that of
            the batch (as two halves of the batch tell it), as long as the solves take at most half as many products
            as the batch does forwards and backwards.
        tolerance: The relative residual of the solves.
        iterations: At most how many products for each solve.

    Waits for the device: in each solve once in four iterations, and once for the residuals of all layers. For the
    paper's cnn with 8 iterations in each of six layers that is 13 a step.
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
        """Returns a scalar: 0, with an estimate of the gradient of the sum of the layers' log-determinants.

        Arguments:
            layers: Steps with an operator, and the event shapes that reach them.
            batch: The batch, with shape ``(B, *)``.
            energy: Computes the energies of some of its rows; asked where the noise of the batch must be known.
            generator: Draws the probes.

        Raises:
            SingularError: If a solve does not converge, and there is no exact log-determinant either.
        """
        trained = [(step, shapes) for step, shapes in layers if _parameters(step)]
        if not trained or not torch.is_grad_enabled():
            return batch.new_zeros(())
        with without_autocast(batch):
            solved = [self._solve(step, shapes, generator) for step, shapes in trained]
            largest = torch.stack([each.residual.max().to(batch) for each in solved])
            residuals = [0.0] * len(solved) if largest.is_meta else largest.tolist()  # the one wait for all of them
            total = batch.new_zeros(())
            looking: list[tuple[_Solved, Tensor]] = []
            for each, residual in zip(solved, residuals, strict=True):
                account = self.accounts[each.step.path]
                account.residual = residual
                if residual <= self.tolerance:
                    image = each.operator.product(each.rest)
                    terms = (each.probes * image).flatten(1).sum(1)
                    if self.probes is None and account.probes is None and len(batch) > 1 and not batch.is_meta:
                        looking.append((each, terms))
                    estimate = terms.mean() if each.known is None else terms.mean() + each.known
                    total = total + each.weight * (estimate - estimate.detach()).to(total)
                else:
                    total = total + self._exact(each).to(total)
            if looking:
                middle = len(batch) // 2
                halves = [energy(part).mean() for part in (slice(middle), slice(middle, None))]
                self._look(looking, halves, len(batch))
        return total

    def metrics(self) -> dict[str, Any]:
        """What a training run shows: for each layer the probes, the last solve, and how often it was exact."""
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
        """All that later estimates depend on."""
        return {path: dict(vars(account)) for path, account in self.accounts.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from what :meth:`state` gave."""
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
            found = gmres(
                lambda flat: operator.product(flat.unflatten(1, operator.shape)).flatten(1),
                probes.flatten(1),
                precondition=lambda flat: approximation.solve(flat.unflatten(1, operator.out_shape)).flatten(1),
                tolerance=self.tolerance,
                iterations=self.iterations,
            )
            rest = found.x.unflatten(1, operator.shape)
            if approximation.control is not None:
                rest = rest - approximation.control(probes)
        account.iterations = found.iterations
        known = None if approximation.trace is None else approximation.trace()
        return _Solved(step, shapes, operator, probes, rest, known, found.residuals)

    def _exact(self, each: _Solved) -> Tensor:
        """The exact log-det in the place of an estimate, with 0 for its value."""
        step, account, matrix = each.step, self.accounts[each.step.path], each.operator.matrix
        account.exact += 1
        if account.exact == 1:
            warnings.warn(
                f"{step.where}: a solve for the gradient of its log-det did not converge in {self.iterations} "
                f"iterations (residual {account.residual:.1e}, tolerance {self.tolerance:g}), so that the exact "
                "log-det is taken in this step, and in every other where that happens; fit() counts them as "
                "exact_log_dets. The layer is nearly singular, or far from what preconditions the solve: allow more "
                "iterations, a larger tolerance, or keep the layer away from singular ones (conditioning= of fit).",
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
        if matrix is not None:  # what was paid for: it preconditions the solves to come
            account.inverse = torch.linalg.inv(matrix.detach())
        return exact - exact.detach()

    def _look(self, looking: Sequence[tuple[_Solved, Tensor]], halves: Sequence[Tensor], rows: int) -> None:
        """Compares the noise of the probes with that of the batch, and chooses the number of probes after some."""
        groups = [_parameters(each.step) for each, _ in looking]
        first, second = (_gradients(half, groups) for half in halves)
        noise = []
        for (each, terms), parameters, one, other in zip(looking, groups, first, second, strict=True):
            by_probe = torch.stack([_gradients(term, [parameters])[0] for term in terms]) * each.weight
            noise.append(torch.stack([by_probe.var(0).sum(), (one - other).square().sum() / 4]))
        for (each, _), (probe_noise, batch_noise) in zip(looking, torch.stack(noise).tolist(), strict=True):
            if not math.isfinite(probe_noise + batch_noise):
                continue  # the loss or its gradient is not finite, which is for others to say
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
    """The gradient in the parameters of each group, as one vector for each."""
    every = [parameter for group in groups for parameter in group]
    found = iter(torch.autograd.grad(value, every, retain_graph=True, allow_unused=True, materialize_grads=True))
    return [torch.cat([next(found).detach().flatten() for _ in group]) for group in groups]
