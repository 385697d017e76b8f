"""The methods of :meth:`EBFlow.log_z <ebflow_plugin.EBFlow.log_z>`: exact, or estimated with a standard error."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Generator, Tensor

from ebflow_plugin.errors import InputError, SingularError, UnknownNameError, suggest
from ebflow_plugin.layers import FullLinear
from ebflow_plugin.linalg.random import check_generator
from ebflow_plugin.log_z.annealing import annealed
from ebflow_plugin.log_z.estimate import Estimate
from ebflow_plugin.log_z.exact import Normalizer
from ebflow_plugin.log_z.importance import importance
from ebflow_plugin.log_z.lanczos import log_abs_det
from ebflow_plugin.log_z.proposals import Gaussian, Proposal
from ebflow_plugin.plan.costs import Cost, conv_geometry, exact_cost
from ebflow_plugin.plan.energy_model import EnergyModel
from ebflow_plugin.plan.matrices import FullStep, MatrixStep
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.step import LinearStep, Shape

__all__ = ["AFFORDABLE", "estimate_log_z"]

# The limit of "auto" for the factorisation of a layer: about a minute on one CPU core, and 2 GB. Dense layers up to
# D = 11,500.
AFFORDABLE = Cost(operations=1e12, memory=2 * 2**30)


def estimate_log_z(
    model: EnergyModel, exact: Normalizer, event_shape: Shape, method: str, options: Mapping[str, Any]
) -> Estimate:
    """Computes log Z by any of the methods of :meth:`EBFlow.log_z <ebflow_plugin.EBFlow.log_z>`.

    Arguments:
        model: The model.
        exact: The cache of its exact log Z.
        event_shape: The shape of one data point.
        method: The method.
        options: Options of the method.

    Raises:
        InputError: If the method is unknown, or an option has an invalid value.
        UnknownNameError: If the method has no such option.
    """
    if method == "auto":
        worst = [exact_cost(step, shapes) for step, shapes in _linear_steps(model.plan, event_shape)]
        method = "lanczos" if any(cost.exceeds(AFFORDABLE) for cost in worst) else "exact"
        if method == "exact":  # the options of Lanczos are allowed, though not used
            _check_options("lanczos", options)
            options = {}
    if not isinstance(method, str) or method not in ("exact", *_METHODS):
        raise InputError(f"log_z has no method {method!r}. {suggest(str(method), ('exact', *_METHODS, 'auto'))}")
    check_generator(options.get("generator"))
    _check_options(method, options)
    if method == "exact":
        return Estimate.of(exact.log_z(event_shape, model.like()))
    return _METHODS[method](model, event_shape, **options)


def _lanczos(
    model: EnergyModel,
    event_shape: Shape,
    *,
    probes: int = 16,
    iterations: int = 40,
    generator: Generator | None = None,
    progress: bool = False,
) -> Estimate:
    like, total, variance, bias = model.like(), 0.0, 0.0, 0.0
    for step, shapes in _linear_steps(model.plan, event_shape):
        shape = step.own_shape(shapes)  # the determinant is the module's own
        sign = -1.0 if step.inverted else 1.0
        try:
            with torch.no_grad():
                if _is_cheap(step, shapes):
                    total += _number(step.log_det(shapes, like))
                    continue
                estimate = log_abs_det(
                    step.apply,
                    shape,
                    like,
                    probes=probes,
                    iterations=iterations,
                    squares=_squares(step, shape),
                    generator=generator,
                    progress=progress,
                )
        except SingularError as error:
            raise SingularError(f"a linear step has no finite log-determinant\n  {step.where}\n{error}") from error
        total, variance, bias = total + sign * estimate.value, variance + estimate.variance, bias + estimate.bias
    return Estimate.of(like.new_tensor(-total), math.sqrt(variance + bias**2), "lanczos")


def _importance(
    model: EnergyModel,
    event_shape: Shape,
    *,
    samples: int = 1000,
    proposal: Tensor | Gaussian | Proposal | None = None,
    context: Tensor | None = None,
    batch_size: int | None = None,
    generator: Generator | None = None,
    progress: bool = False,
) -> Estimate:
    q = _fitted(model, proposal, generator) if isinstance(proposal, Tensor) else proposal
    drawn_from = q is None or isinstance(q, Gaussian) or all(hasattr(q, name) for name in ("sample", "log_prob"))
    if not drawn_from:
        raise InputError(f"proposal must be a tensor of data, or have sample and log_prob, got {type(q).__name__}")
    run = partial(importance, samples=samples, proposal=q)
    return _sampled(run, model, event_shape, context, batch_size, generator, progress)


def _ais(
    model: EnergyModel,
    event_shape: Shape,
    *,
    steps: int = 100,
    chains: int = 100,
    leapfrogs: int = 3,
    proposal: Tensor | Gaussian | None = None,
    step_size: float | None = None,
    context: Tensor | None = None,
    batch_size: int | None = None,
    generator: Generator | None = None,
    progress: bool = False,
) -> Estimate:
    start = _fitted(model, proposal, generator) if isinstance(proposal, Tensor) else proposal
    if start is not None and not isinstance(start, Gaussian):
        raise InputError(f"annealing starts from data or a Gaussian, got {type(start).__name__}")
    run = partial(annealed, steps=steps, chains=chains, leapfrogs=leapfrogs, start=start, step_size=step_size)
    return _sampled(run, model, event_shape, context, batch_size, generator, progress)


_METHODS: dict[str, Callable[..., Estimate]] = {
    "lanczos": _lanczos,
    "importance": _importance,
    "ais": _ais,
}


def _check_options(method: str, options: Mapping[str, Any]) -> None:
    known: list[str] = []
    if method in _METHODS:
        parameters = inspect.signature(_METHODS[method]).parameters
        known = [name for name in parameters if name not in ("model", "event_shape")]
    for option in options:
        if option not in known:
            raise UnknownNameError(f"log_z by {method!r} has no option {option!r}. {suggest(option, known)}")


def _linear_steps(plan: Plan, event_shape: Shape) -> list[tuple[LinearStep, tuple[Shape, ...]]]:
    return [(step, shapes) for step, shapes in plan.shapes(event_shape) if isinstance(step, LinearStep)]


def _is_cheap(step: LinearStep, shapes: tuple[Shape, ...]) -> bool:
    """Whether a log-det is O(D), or that of small blocks (one matrix for each pixel, say)."""
    size = step.determinant(shapes)
    return size is None or (size < prod(shapes[0]) and not exact_cost(step, shapes).exceeds(AFFORDABLE))


@torch.no_grad()
def _squares(step: LinearStep, shape: Shape) -> float | None:
    """The sum of the squares of the entries of a step's matrix, in O(parameters); None if it is not known."""
    if isinstance(step, MatrixStep):
        return float(step.weight().double().square().sum()) * prod(shape[1:])
    if isinstance(step, FullStep) and isinstance(step.module, FullLinear):
        return float(step.module.weight.double().square().sum()) * prod(shape[:-1])
    geometry = conv_geometry(step, shape)
    if geometry is None:
        return None
    counts = []
    for axis in (geometry.rows, geometry.columns):
        taps = axis.sources()
        if any(len(seen := [pixel for pixel in row if pixel >= 0]) != len(set(seen)) for row in taps):
            return None  # taps share a pixel, with reflect or replicate padding: their entries add up
        counts.append([sum(row[tap] >= 0 for row in taps) for tap in range(len(taps[0]))])
    weight = step.module.weight.double().square().sum((0, 1))
    times = torch.outer(*(torch.tensor(count, dtype=weight.dtype, device=weight.device) for count in counts))
    return float((weight * times).sum())


def _energy(model: EnergyModel, context: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The energy of the matched variable, for one context."""
    if context is not None and (not isinstance(context, Tensor) or context.dim() == 0 or len(context) != 1):
        got = tuple(context.shape) if isinstance(context, Tensor) else type(context).__name__
        raise InputError(f"log_z needs a context of one row, got {got}; log Z is the same for all contexts")

    with torch.inference_mode(False):
        context = None if context is None else context.clone()  # no inference tensor, since gradients are computed

    def energy(x: Tensor) -> Tensor:
        return model.core.energy(x, None if context is None else context.expand(len(x), *context.shape[1:]))

    return energy


def _fitted(model: EnergyModel, data: Tensor, generator: Generator | None) -> Gaussian:
    return Gaussian.fit(model.preprocess(data, generator)[0])


def _matched_shape(model: EnergyModel, event_shape: Shape) -> Shape:
    for step in model.prefix.steps:
        (event_shape,) = step.encoded_shapes((event_shape,))
    return event_shape


def _sampled(
    run: Callable[..., Estimate],
    model: EnergyModel,
    event_shape: Shape,
    context: Tensor | None,
    batch_size: int | None,
    generator: Generator | None,
    progress: bool,
) -> Estimate:
    """Runs a method on the energy of the matched variable, and adds the known log-dets of the preprocessing."""
    estimate = run(
        _energy(model, context),
        _matched_shape(model, event_shape),
        model.like(),
        batch_size=batch_size,
        generator=generator,
        progress=progress,
    )
    fixed = sum(_number(value) for _, value in model.prefix.log_dets(event_shape, model.like()))
    return estimate.about(model.like().new_tensor(float(estimate) - fixed))


def _number(value: Tensor | float) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else value
