r"""log|det W| of a linear map from products with it alone: stochastic Lanczos quadrature.

.. math::
    \log|\det W| = \tfrac12 \operatorname{tr} \log(W^\top W)
                 = \tfrac12\, \mathbb{E}\,[ v^\top \log(W^\top W)\, v ], \qquad v \in \{-1, 1\}^D

m steps of Lanczos from v yield a small matrix whose eigenvalues and first eigenvector components are the nodes and
weights of the Gauss quadrature for :math:`v^\top f(W^\top W)\, v`. Here Lanczos runs as Golub-Kahan
bidiagonalisation, :math:`W V = U B`: the same in exact arithmetic, but it does not square the condition number of W,
which matters in single precision.

References:
    | Fast Estimation of tr(f(A)) via Stochastic Lanczos Quadrature (Ubaru, Chen and Saad, 2017)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from ebflow_plugin.chunks import rows_in_chunks, with_progress
from ebflow_plugin.errors import SingularError, raise_from_step
from ebflow_plugin.linalg.bidiagonal import Bands, bidiagonalise
from ebflow_plugin.linalg.operators import Cost, LinearOperator
from ebflow_plugin.linalg.random import signs_like
from ebflow_plugin.log_z.estimate import Estimate
from ebflow_plugin.options import at_least, check_generator
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.step import LinearStep, Shape

MEMORY = 512 * 2**20  # bytes of basis vectors at a time; more probes run in groups
# Small blocks are factorised if that takes no more than about a minute on one CPU core, and 2 GB.
AFFORDABLE = Cost(operations=1e12, memory=2 * 2**30)


def lanczos(
    plan: Plan,
    event_shape: Shape,
    like: Tensor,
    *,
    probes: int = 16,
    iterations: int = 40,
    generator: Generator | None = None,
    progress: bool = False,
) -> Estimate:
    """Estimates log Z from products with each large linear layer; log-dets in O(D), or of small blocks, are exact.

    Cost: ``2 · probes · iterations`` products with each, in O(D) memory.

    Arguments:
        plan: The plan of the model.
        event_shape: The shape of one data point.
        like: A tensor with the device and dtype of the model.
        probes: As for :func:`log_abs_det`.
        iterations: As for :func:`log_abs_det`.
        generator: Draws the probes.
        progress: Shows a progress bar.

    Raises:
        SingularError: If a layer is singular; the message names it.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(8), distributions.StandardNormal([8])))
        >>> found = lanczos(model.plan, (8,), model.like(), probes=4)
        >>> found.reliable, abs(found.value) < 1e-2
        (True, True)
    """
    check_generator(generator)
    total, variance, bias = 0.0, 0.0, 0.0
    for step, shapes in plan.shapes(event_shape):
        if not isinstance(step, LinearStep):
            continue
        operator = step.operator(shapes)
        try:
            with torch.no_grad():
                if operator is None or _has_small_blocks(operator):
                    total += float(step.log_det(shapes, like))
                    continue
                found = log_abs_det(
                    operator, probes=probes, iterations=iterations, generator=generator, progress=progress
                )
        except SingularError as error:
            raise SingularError(f"a linear step has no finite log-determinant\n  {step.where}\n{error}") from error
        except RuntimeError as error:
            raise_from_step(error, step, like, None)
        times = operator.times
        total += -times * found.value if step.inverted else times * found.value
        variance, bias = variance + times**2 * found.variance, bias + times * found.bias
    return Estimate(-total, math.sqrt(variance + bias**2), "lanczos")


def _has_small_blocks(operator: LinearOperator) -> bool:
    """Whether the determinant is that of small blocks (one matrix for each pixel, say), which are factorised."""
    whole = math.prod(operator.shape) * operator.times
    return operator.blocks.size is not None and operator.blocks.size < whole and not operator.cost.exceeds(AFFORDABLE)


@dataclass(frozen=True)
class LogDet:
    """An estimate of log|det W|.

    Attributes:
        value: The estimate.
        variance: The variance of the mean over the probes.
        bias: A bound on the remaining error of the quadrature, extrapolated from its last changes, and rounding.
        products: The number of products with W and with its transpose together.
    """

    value: float
    variance: float
    bias: float
    products: int

    @property
    def std_error(self) -> float:
        """Both errors together."""
        return math.sqrt(self.variance + self.bias**2)


def log_abs_det(
    operator: LinearOperator,
    *,
    probes: int = 16,
    iterations: int = 40,
    generator: Generator | None = None,
    progress: bool = False,
) -> LogDet:
    r"""Estimates log|det W| of an operator, of one of its copies.

    Cost: ``2 · probes · iterations`` products, :math:`O(P m^2 D)` for the reorthogonalisation, and
    :math:`O(P m D)` memory, at most :data:`MEMORY` at a time.

    The error has two parts. The spread of the probes determines a standard error, which falls as :math:`P^{-1/2}`. The
    quadrature of m nodes approaches its limit from above, fast if W is well-conditioned and slowly if it is not; the
    rest is extrapolated.

    If :math:`\|W\|_F^2 = \operatorname{tr} W^\top W` is known, :math:`\|W v\|^2`, which each probe computes anyway, is
    a control variate: the part of the logarithm that is linear in :math:`W^\top W` adds no variance. For nearly
    orthogonal maps that is almost all of it.

    Arguments:
        operator: W.
        probes: The number of random vectors v, at least two.
        iterations: The largest number of Lanczos steps for each, at least three. It stops at 8, 16, 32, … if more
            steps would change far less than more probes, or if the Krylov space is complete.
        generator: Draws the vectors.
        progress: Shows a progress bar.

    Example:
        >>> from ebflow_plugin.linalg.dense import Dense
        >>> weight = torch.tensor([[2.0, 0.0], [0.0, 0.5]], dtype=torch.float64)
        >>> result = log_abs_det(Dense(weight))
        >>> abs(result.value) < 1e-12 and result.std_error < 1e-6
        True
    """
    at_least(2, "probes", probes)
    at_least(3, "iterations", iterations)
    like, dim, squares = operator.like, math.prod(operator.shape), operator.sum_of_squares()
    iterations = min(iterations, dim)
    group = max(1, MEMORY // (dim * iterations * like.element_size()))
    rules: list[list[_Rule]] = []
    products = 0
    for part in with_progress(list(rows_in_chunks(probes, group)), progress, "Lanczos"):
        start = signs_like(like.new_empty(part.stop - part.start, dim), generator)
        bands = bidiagonalise(operator, start, iterations, partial(_settled, squares, probes))
        rules.append(_rules(bands))
        products += 2 * len(start) * bands.diagonal.shape[1]
    each = _values(rules, squares, dim)
    if not bool(torch.isfinite(each).all()):
        raise SingularError("the map is singular, or not finite: it has no finite log-determinant")
    mean = each.mean(0).tolist()
    rounding = torch.finfo(like.dtype).eps * (dim + abs(mean[-1]))
    return LogDet(mean[-1], float(each[:, -1].var()) / probes, _tail(mean) + rounding, products)


class _Rule(NamedTuple):
    """The Gauss quadratures of the probes: singular values of W, and weights that sum to one, each ``(P, nodes)``."""

    nodes: Tensor
    weights: Tensor


def _rules(bands: Bands) -> list[_Rule]:
    """The rules with a quarter of the Lanczos nodes, with half of them, and with all."""
    count = bands.diagonal.shape[1]
    rules = []
    for nodes in (count,) * 3 if bands.complete else (-(-count // 4), -(-count // 2), count):
        _, singular, right = torch.linalg.svd(bands.matrices(nodes))
        noise = torch.finfo(bands.diagonal.dtype).eps * singular[:, :1]
        rules.append(_Rule(torch.where(singular > noise, singular, 0.0), right[:, :, 0].square()))
    return rules


def _values(groups: list[list[_Rule]], squares: float | None, dim: int) -> Tensor:
    """The three quadratures of log|det W| for each probe: ``(P, 3)``."""
    each = torch.cat([torch.stack([(r.weights * r.nodes.log()).sum(1) * dim for r in rules], 1) for rules in groups])
    if squares is None:
        return each
    return each - _linear_part([rules[-1] for rules in groups], squares / dim, dim)[:, None]


def _settled(squares: float | None, probes: int, bands: Bands, dim: int) -> bool:
    """Whether more nodes would change far less than more probes would."""
    each = _values([_rules(bands)], squares, dim)
    return len(each) > 1 and _tail(each.mean(0).tolist()) < 0.1 * float(each[:, -1].std()) / math.sqrt(probes)


def _linear_part(rules: list[_Rule], mean_square: float, dim: int) -> Tensor:
    r"""The control variate :math:`c\,(v^\top W^\top W v - \operatorname{tr} W^\top W)` of each probe, of mean zero.

    The slope c is that of the least-squares line to the logarithm over the spectrum, estimated from all probes. With
    :math:`r = \lambda / \bar\lambda` for each node, whose weighted mean is one, it is the mean of the chords' slopes
    :math:`\log r / (r - 1)` with the weights :math:`(r - 1)^2`. In this form it lies between the slopes of the
    logarithm at both ends even if the nodes differ by rounding alone, as those of a scaled rotation do.
    """
    squares = torch.cat([rule.nodes.square().flatten() for rule in rules])
    weights = torch.cat([rule.weights.flatten() for rule in rules])
    centre = (weights * squares).sum() / weights.sum()
    ratios = squares / centre
    centred = ratios - 1.0
    spread = (weights * centred.square()).sum()
    slope = (weights * centred * ratios.log()).sum() / (2.0 * centre * spread) if spread > 0 else spread
    each = torch.cat([(rule.weights * rule.nodes.square()).sum(1) for rule in rules])
    return dim * slope * (each - mean_square)


def _tail(mean: list[float]) -> float:
    r"""The remaining error of the quadrature, extrapolated from m/4, m/2 and m nodes.

    Near a singular map the error falls as 1/m, so each doubling removes half as much as the one before, and the rest
    is a geometric sum. If it falls faster, that sum is an upper bound. It is doubled, since a few very small singular
    values make the error fall more slowly than it seems.
    """
    before, last = abs(mean[1] - mean[0]), abs(mean[2] - mean[1])
    ratio = min(last / before, 0.75) if before > 0 else 0.0
    return 2.0 * last * ratio / (1.0 - ratio)
