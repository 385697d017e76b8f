r"""The gradient of log-determinants without determinants: probes, and solves.

For a layer with the matrix W and an approximate inverse M of it (:mod:`ebflow_plugin.linalg.operators`),

.. math:: \partial \log|\det W| = \operatorname{tr}(W^{-1} \partial W) = \operatorname{tr}(M\, \partial W)
          + \mathbb{E}_v\left[v^\top \partial W\, (s - M v)\right], \qquad W s = v, \quad \mathbb{E}[v v^\top] = I

The first term has a closed form, the second is estimated. It is small where M is accurate: away from the edges of an
image for the circular version of a convolution, everywhere for a layer that is nearly orthogonal.

How many probes there are: :mod:`ebflow_plugin.objectives.probes`.

On the CPU a step reads what its own solves returned. Elsewhere it would wait for the device, so the number of probes
and of iterations, and whether a layer falls back to its exact log-determinant, follow from the solves of some steps
before (:mod:`ebflow_plugin.linalg.delayed`); until the first of them is known, a solve makes all its iterations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Generator, Tensor

from ebflow_plugin.errors import ConditioningWarning, SingularError, warn
from ebflow_plugin.linalg.convolution import Convolution, side_by_side
from ebflow_plugin.linalg.delayed import Delayed
from ebflow_plugin.linalg.krylov import gmres
from ebflow_plugin.linalg.memo import free_to_read
from ebflow_plugin.linalg.operators import Approximation, LinearOperator, dense_inverse
from ebflow_plugin.linalg.precision import full_precision
from ebflow_plugin.linalg.random import signs_like
from ebflow_plugin.objectives.probes import Account
from ebflow_plugin.plan.step import LinearStep, Shape, Shapes

USES = 8  # of an approximate inverse of convolutions, unless solves with it begin to need more iterations
OFTEN = 0.05  # the share of steps without convergence from which on it is said again
LATE, NEAR = "on the way", "approximate inverses"  # in a state, beside the paths of layers, which have no spaces


class _Layer(NamedTuple):
    """A layer, the event shapes of its input, its matrix W, and what is known of its estimates."""

    step: LinearStep
    shapes: Shapes
    operator: LinearOperator
    account: Account

    @property
    def kind(self) -> Hashable:
        """Layers of one kind are solved together: convolutions of one geometry and direction."""
        operator = self.operator
        if type(operator) is not Convolution:
            return id(self.step)
        return operator.geometry, operator.weight.dtype, operator.weight.device, self.step.inverted


@dataclass
class _Near:
    """An approximate inverse of layers, which serves for some steps: weights move slowly, and any constant M will do.

    Attributes:
        weight: The weights that it was computed from.
        uses: The number of solves with it.
        least: The fewest iterations of one of them.
        approximation: The inverse; None until it is needed.
    """

    weight: Tensor
    uses: int = 0
    least: float = math.inf
    approximation: Approximation | None = None

    def __reduce__(self) -> Any:
        return _Near, (self.weight, self.uses, self.least)

    def serves(self, iterations: int) -> bool:
        """Whether it is still good, if the last solve needed so many iterations."""
        last = self.least if self.uses else math.inf
        self.least = min(self.least, iterations) if self.uses else math.inf
        return self.uses < USES and iterations <= last + 1


@dataclass(frozen=True)
class _Solved:
    """The solves of L layers of one kind, with P probes v each, and the remainders of their solutions, s - M v.

    Attributes:
        layers: The layers.
        operator: All of them as one, on their channels side by side.
        approximation: Its M.
        probes: v, with shape ``(P, L, D)``.
        remainder: s - M v, with the same shape.
        residuals: With shape ``(P, L)``.
        needed: The number of iterations that were needed.
        made: The number that the solve could make.
        most: The number that there are.
    """

    layers: Sequence[_Layer]
    operator: LinearOperator
    approximation: Approximation
    probes: Tensor
    remainder: Tensor
    residuals: Tensor
    needed: Tensor
    made: int
    most: int

    @property
    def weight(self) -> float:
        """The factor of log|det W| in the log-det of each step."""
        return -self.operator.times if self.layers[0].step.inverted else self.operator.times

    def lengths(self) -> Tensor:
        """The root mean square of the norms of the remainders of each layer."""
        return self.remainder.square().sum(2).mean(0).sqrt().float()

    def numbers(self) -> Tensor:
        """For each layer the largest residual, the length of the remainders, and the iterations needed."""
        needed = self.needed.float().expand(len(self.layers))
        return torch.stack([self.residuals.amax(0).float(), self.lengths(), needed], 1)

    def estimate(self, good: Sequence[bool]) -> Tensor:
        """The sum of the log-dets of the good layers, as far as its gradient is concerned."""
        operator, probes, remainder = self.operator, self.probes, self.remainder
        kept = [place for place, fine in enumerate(good) if fine]
        if isinstance(operator, Convolution) and len(kept) < len(good):  # what is not finite must not reach a gradient
            weights = [
                layer.operator.weight if fine else layer.operator.like
                for layer, fine in zip(self.layers, good, strict=True)
            ]
            operator = operator.at(torch.cat(weights))
            remainder = remainder.where(torch.tensor(good, device=remainder.device)[:, None], 0.0)
        product = operator.apply(remainder.reshape(-1, *operator.shape)).reshape(probes.shape)
        total = (probes * product).sum() / len(probes)
        if self.approximation.trace is not None:
            traces = self.approximation.trace(operator.weight).unflatten(0, (len(good), -1))
            total = total + (traces if len(kept) == len(good) else traces[kept]).sum()
        return self.weight * total

    def terms(self, place: int) -> Tensor:
        """The estimates of one layer by each probe, with shape ``(P,)``."""
        operator = self.layers[place].operator
        product = operator.apply(self.remainder[:, place].unflatten(1, operator.shape))
        return self.weight * (self.probes[:, place] * product.flatten(1)).sum(1)


@dataclass
class LogDetEstimator:
    r"""Estimates the gradient of the sum of the log-determinants of some layers.

    Arguments:
        probes: The number of probes for each layer. None chooses it for each layer and step: the one that minimises the
            variance of the gradient times the cost of the step.
        tolerance: The relative residual of the solves.
        iterations: The largest number of products per solve.

    Nothing synchronises with the device.
    """

    probes: int | None
    tolerance: float
    iterations: int
    accounts: dict[str, Account] = field(default_factory=dict)
    _solves: Delayed[list[tuple[str, int, int]]] = field(default_factory=Delayed)
    _noises: Delayed[list[str]] = field(default_factory=Delayed)
    _near: dict[str, _Near] = field(default_factory=dict)

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
        if not torch.is_grad_enabled():
            return batch.new_zeros(())
        with full_precision(batch):
            groups: dict[Hashable, list[_Layer]] = {}
            for step, shapes in layers:
                operator = step.operator(shapes)
                assert operator is not None
                if operator.weight.requires_grad:  # it may be frozen beside a bias, or computed by another module
                    layer = _Layer(step, shapes, operator, self.accounts.setdefault(step.path, Account()))
                    groups.setdefault(layer.kind, []).append(layer)
            solved = [self._solve(group, len(batch), generator) for group in groups.values()]
            total = batch.new_zeros(())
            measured: list[tuple[_Solved, int]] = []
            if solved:
                notes = [(layer.step.path, each.made, each.most) for each in solved for layer in each.layers]
                numbers = torch.cat([each.numbers().to(batch.device) for each in solved])
                for arrived, rows in self._solves.add(notes, numbers):
                    for (path, made, most), row in zip(arrived, rows, strict=True):
                        self.accounts[path].add_solve(row, made, most, self.tolerance)
            for each in solved:
                for place, layer in enumerate(each.layers):
                    account = layer.account
                    measures = self.probes is None and account.measures and len(batch) > 1 and not batch.is_meta
                    account.calls += 1
                    if account.fails:
                        total = total + self._exact(layer).to(total)
                    elif measures:
                        measured.append((each, place))
                good = [not layer.account.fails for layer in each.layers]
                if any(good):
                    estimate = each.estimate(good)
                    total = total + (estimate - estimate.detach()).to(total)
            if measured:
                middle = len(batch) // 2
                halves = [energy(part).mean() for part in (slice(middle), slice(middle, None))]
                self._measure_noise(measured, halves, len(batch))
        return total

    def metrics(self) -> dict[str, Any]:
        """For each layer the number of probes, the last solve, and how often the exact log-det was used; totals."""
        layers = {
            path: {
                "probes": account.probes,
                "iterations": account.iterations,
                "residual": account.residual,
                "exact": account.exact,
            }
            for path, account in self.accounts.items()
        }
        totals = {
            "log_dets": sum(account.calls for account in self.accounts.values()),
            "exact_log_dets": sum(account.exact for account in self.accounts.values()),
        }
        return {"log_det": layers, **totals}

    def state(self) -> dict[str, Any]:
        """The statistics that later estimates depend on."""
        accounts = {path: dict(vars(account)) for path, account in self.accounts.items()}
        late = {"solves": self._solves.state(), "noises": self._noises.state()}
        near = {name: (each.weight, each.uses, each.least) for name, each in self._near.items()}
        return {**accounts, **({LATE: late} if any(late.values()) else {}), **({NEAR: near} if near else {})}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state` returned."""
        self.accounts = {path: Account(**known) for path, known in state.items() if path not in (LATE, NEAR)}
        self._near = {name: _Near(*known) for name, known in state.get(NEAR, {}).items()}
        late = state.get(LATE, {"solves": [], "noises": []})
        self._solves.load_state(late["solves"])
        self._noises.load_state(late["noises"])

    def _solve(self, layers: Sequence[_Layer], rows: int, generator: Generator | None) -> _Solved:
        operator, count, accounts = layers[0].operator, len(layers), [layer.account for layer in layers]
        if count > 1:  # convolutions, as one on their channels side by side
            operator = side_by_side([cast(Convolution, layer.operator) for layer in layers])
        number = self.probes or max(account.best_probes(rows, operator.times) for account in accounts)
        for account in accounts:
            account.probes = number
        most = min(self.iterations, math.prod(layers[0].operator.shape))
        planned = most if free_to_read(operator.like) else min(max(each.allowed or most for each in accounts), most)
        approximation = self._approximation(operator, layers)

        def on_all(function: Callable[[Tensor], Tensor], shape: Shape) -> Callable[[Tensor], Tensor]:
            """A function of the channels of all layers, as one of rows: those of the first probe come first."""
            return lambda flat: function(flat.reshape(number, *shape)).reshape(number * count, -1)

        with torch.no_grad():
            probes = signs_like(operator.like.new_empty(number, *operator.out_shape), generator)
            solution = gmres(
                on_all(operator.apply, operator.shape),
                probes.reshape(number * count, -1),
                precondition=on_all(approximation.solve, operator.out_shape),
                tolerance=self.tolerance,
                iterations=planned,
            )
            remainder = solution.x
            if approximation.control is not None:
                remainder = remainder - approximation.control(probes).reshape(number * count, -1)
        shape = number, count, -1
        return _Solved(
            layers,
            operator,
            approximation,
            probes=probes.reshape(shape),
            remainder=remainder.reshape(shape),
            residuals=solution.residuals.reshape(number, count),
            needed=solution.needed,
            made=planned,  # where it looks, a solve that stops early has nothing more to do
            most=most,
        )

    def _approximation(self, operator: LinearOperator, layers: Sequence[_Layer]) -> Approximation:
        """An approximate inverse, for convolutions that of some steps before."""
        if not isinstance(operator, Convolution):
            known = layers[0].account.inverse
            return operator.approximate() if known is None else dense_inverse(known.to(operator.like))
        name = " ".join(layer.step.path for layer in layers)
        near = self._near.get(name)
        if near is None or not near.serves(max(layer.account.iterations for layer in layers)):
            near = self._near[name] = _Near(operator.like.clone())
        if near.approximation is None:
            near.approximation = operator.at(near.weight).approximate()
        near.uses += 1
        return near.approximation

    def _exact(self, layer: _Layer) -> Tensor:
        """A scalar 0 with the gradient of the exact log-det, in place of an estimate."""
        step, account, matrix = layer.step, layer.account, layer.operator.matrix
        account.exact += 1
        share = account.exact / account.calls
        if account.exact == 1 or (share >= OFTEN and str(account.exact).strip("0") == "1"):
            warn(
                f"{step.where}: a solve for the gradient of its log-det did not converge in {account.iterations} "
                f"iterations (residual {account.residual:.1e}, tolerance {self.tolerance:g}), as in {account.exact} of "
                f"{account.calls} steps so far ({share:.0%}), so the exact log-det is used there, which takes longer. "
                "The layer is nearly singular, or far from its preconditioner: allow more iterations or a larger "
                "tolerance, or keep it well-conditioned (ebflow_plugin.parameter_groups, or conditioning= of "
                "ebflow_plugin.lightning.LitObjective).",
                ConditioningWarning,
            )
        try:
            exact = torch.as_tensor(step.log_det(layer.shapes))
        except SingularError as error:
            raise SingularError(f"a linear step has no finite log-determinant\n  {step.where}\n{error}") from error
        if free_to_read(exact) and not bool(torch.isfinite(exact.detach())):  # elsewhere the loss shows it
            raise SingularError(
                f"a linear step has no finite log-determinant: its weight is singular, or holds inf or NaN\n  "
                f"{step.where}\nGo back to an earlier checkpoint, lower the learning rate, or start the layer from an "
                "orthogonal matrix."
            )
        if matrix is not None:  # costs as much as the exact log-det, and preconditions later solves
            account.inverse = torch.linalg.inv_ex(matrix.detach()).inverse
        return exact - exact.detach()

    def _measure_noise(self, measured: Sequence[tuple[_Solved, int]], halves: Sequence[Tensor], rows: int) -> None:
        """Measures the noise of the probes and of the batch, in the parameters that a log-det depends on."""
        layers = [each.layers[place] for each, place in measured]
        terms = [each.terms(place) for each, place in measured]
        groups = [_dependencies(found, layer.step) for found, layer in zip(terms, layers, strict=True)]
        first, second = (_gradients(half, groups) for half in halves)
        noise = []
        for (each, place), found, parameters, one, other in zip(measured, terms, groups, first, second, strict=True):
            by_probe = torch.stack([_gradients(term, [parameters])[0] for term in found])
            batch_noise = (one - other).square().sum() / 4 * rows
            noise.append(torch.stack([by_probe.var(0).sum(), batch_noise, each.lengths()[place].to(batch_noise)]))
        paths = [layer.step.path for layer in layers]
        for arrived, numbers in self._noises.add(paths, torch.stack(noise)):
            for path, (probe_noise, row_noise, length) in zip(arrived, numbers, strict=True):
                # A loss or gradient that is not finite is reported by the guards of fit; of no noise there is no ratio.
                known = probe_noise, row_noise, length**2
                if all(map(math.isfinite, known)) and min(known) > 0:
                    self.accounts[path].add_measurement(probe_noise / length**2, row_noise)


def _dependencies(terms: Tensor, step: LinearStep) -> list[Tensor]:
    """The parameters of a layer that its log-det depends on: not its bias."""
    trained = [parameter for parameter in step.module.parameters() if parameter.requires_grad]
    if not trained:
        return []
    found = torch.autograd.grad(terms.sum(), trained, retain_graph=True, allow_unused=True)
    return [parameter for parameter, gradient in zip(trained, found, strict=True) if gradient is not None]


def _gradients(value: Tensor, groups: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The gradient with respect to the parameters of each group, as one vector per group; a zero for an empty group."""
    every = [parameter for group in groups for parameter in group]
    if not every:
        return [value.new_zeros(1) for _ in groups]
    gradients = iter(torch.autograd.grad(value, every, retain_graph=True, allow_unused=True, materialize_grads=True))
    return [torch.cat([next(gradients).detach().flatten() for _ in group] or [value.new_zeros(1)]) for group in groups]
