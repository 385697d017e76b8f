"""log Z, the constant that the energy leaves out: exact and never stale, or estimated with an error bar."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor, nn

from ebflow_plugin.costs import Cost, conv_geometry, exact_cost
from ebflow_plugin.errors import InputError, SingularError, UnknownNameError, suggest
from ebflow_plugin.estimate import Estimate
from ebflow_plugin.estimators import annealed, importance
from ebflow_plugin.lanczos import log_abs_det
from ebflow_plugin.layers import FullLinear
from ebflow_plugin.matrix_steps import FullStep, MatrixStep
from ebflow_plugin.memo import Memo
from ebflow_plugin.plan import LinearStep, Plan, Shape
from ebflow_plugin.proposals import Gaussian, Proposal
from ebflow_plugin.rules import TaughtLinearStep

if TYPE_CHECKING:
    from ebflow_plugin.wrapper import EBFlow

__all__ = ["AFFORDABLE", "Normalizer", "estimate_log_z"]


class Normalizer:
    """Keeps the log Z of a plan until a parameter or buffer of one of its linear steps changes.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> flow = flows.Flow(transforms.NaiveLinear(2, orthogonal_initialization=False),
        ...                   distributions.StandardNormal([2]))
        >>> normalizer = Normalizer(ebf.wrap(flow).plan)
        >>> bool(normalizer.exact((2,), torch.empty(0)) == -torch.slogdet(flow._transform._weight)[1])
        True
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._memo: Memo[Tensor] = Memo()

    def exact(self, event_shape: Shape, like: Tensor) -> Tensor:
        """Returns log Z, a scalar with the device and dtype of ``like``.

        Where a gradient can be asked for (grad mode is on, a linear step has parameters that require one) it is
        computed anew, with its graph: that is what maximum likelihood pays for. Otherwise it is kept.
        """
        sources = self._sources()
        if torch.is_grad_enabled() and any(source.requires_grad for source in sources):
            return self._plan.log_z(event_shape, like)
        with torch.no_grad():
            if any(isinstance(step, TaughtLinearStep) and not _tensors(step.module) for step in self._plan.steps):
                return self._plan.log_z(event_shape, like)  # a user's layer with nothing to watch for changes
            key = (event_shape, like.dtype, like.device)
            return self._memo.get(sources, lambda: self._plan.log_z(event_shape, like), key)

    def _sources(self) -> list[Tensor]:
        """All tensors that log Z depends on, each once."""
        tensors: dict[int, Tensor] = {}
        for step in self._plan.steps:
            if step.linearity == "linear":
                tensors.update((id(tensor), tensor) for tensor in _tensors(step.module))
        return list(tensors.values())


def _tensors(module: Any) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()] if isinstance(module, nn.Module) else []


# What "auto" factorises, for each layer: about a minute on one core of a CPU, and 2 GB. Dense layers up to D = 11,500.
AFFORDABLE = Cost(operations=1e12, memory=2 * 2**30)


def estimate_log_z(model: EBFlow, event_shape: Shape, method: str, options: Mapping[str, Any]) -> Estimate:
    """Computes log Z by any of the methods of :meth:`EBFlow.log_z <ebflow_plugin.EBFlow.log_z>`.

    Raises:
        InputError: If there is no such method, or an option has a value that it cannot have.
        UnknownNameError: If the method has no such option.
    """
    if method == "auto":
        worst = [exact_cost(step, shapes) for step, shapes in _linear_steps(model.plan, event_shape)]
        method = "lanczos" if any(cost.exceeds(AFFORDABLE) for cost in worst) else "exact"
        if method == "exact":  # options of the method that was not needed are no mistake
            _check_options("lanczos", _METHODS["lanczos"], options)
            options = {}
    if method not in _METHODS:
        raise InputError(f"log_z has no method {method!r}. {suggest(str(method), (*_METHODS, 'auto'))}")
    function = _METHODS[method]
    _check_options(method, function, options)
    return function(model, event_shape, **options)


def _exact(model: EBFlow, event_shape: Shape) -> Estimate:
    return Estimate.of(model._normalizer.exact(event_shape, model._like()))


def _lanczos(
    model: EBFlow,
    event_shape: Shape,
    *,
    probes: int = 16,
    iterations: int = 40,
    generator: Generator | None = None,
    progress: bool = False,
) -> Estimate:
    like, total, variance, bias = model._like(), 0.0, 0.0, 0.0
    for step, shapes in _linear_steps(model.plan, event_shape):
        shape = step.own_shape(shapes)  # the determinant is the module's own
        sign = -1.0 if step.inverted else 1.0
        try:
            with torch.no_grad():
                if _is_cheap(step, shapes):
                    total += sign * _number(step.log_abs_det(shape))
                    continue
                found = log_abs_det(
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
        total, variance, bias = total + sign * found.value, variance + found.variance, bias + found.bias
    return Estimate.of(like.new_tensor(-total), math.sqrt(variance + bias**2), "lanczos")


def _importance(
    model: EBFlow,
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
    found = importance(
        _energy(model, context),
        _matched_shape(model, event_shape),
        model._like(),
        samples=samples,
        proposal=q,
        batch_size=batch_size,
        generator=generator,
        progress=progress,
    )
    return _in_data_space(model, event_shape, found)


def _ais(
    model: EBFlow,
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
    found = annealed(
        _energy(model, context),
        _matched_shape(model, event_shape),
        model._like(),
        steps=steps,
        chains=chains,
        leapfrogs=leapfrogs,
        start=start,
        step_size=step_size,
        batch_size=batch_size,
        generator=generator,
        progress=progress,
    )
    return _in_data_space(model, event_shape, found)


_METHODS: dict[str, Callable[..., Estimate]] = {
    "exact": _exact,
    "lanczos": _lanczos,
    "importance": _importance,
    "ais": _ais,
}


def _check_options(method: str, function: Callable[..., Estimate], options: Mapping[str, Any]) -> None:
    known = [name for name in inspect.signature(function).parameters if name not in ("model", "event_shape")]
    for option in options:
        if option not in known:
            raise UnknownNameError(f"log_z by {method!r} has no option {option!r}. {suggest(option, known)}")


def _linear_steps(plan: Plan, event_shape: Shape) -> list[tuple[LinearStep, tuple[Shape, ...]]]:
    return [(step, shapes) for step, shapes in plan.shapes(event_shape) if isinstance(step, LinearStep)]


def _is_cheap(step: LinearStep, shapes: tuple[Shape, ...]) -> bool:
    """Whether a log-det is O(D), or that of small blocks: one matrix for each pixel, say."""
    size = step.determinant(shapes)
    return size is None or (size < prod(shapes[0]) and not exact_cost(step, shapes).exceeds(AFFORDABLE))


@torch.no_grad()
def _squares(step: LinearStep, shape: Shape) -> float | None:
    """The sum of the squares of the entries of a step's matrix, in O(parameters), if it can be told."""
    if isinstance(step, MatrixStep):
        return float(step.kept().double().square().sum()) * prod(shape[1:])
    if isinstance(step, FullStep) and isinstance(step.module, FullLinear):
        return float(step.module.weight.double().square().sum()) * prod(shape[:-1])
    geometry = conv_geometry(step, shape)
    if geometry is None:
        return None
    counts = []
    for axis in (geometry.rows, geometry.columns):
        taps = axis.sources()
        if any(len(seen := [pixel for pixel in row if pixel >= 0]) != len(set(seen)) for row in taps):
            return None  # taps share a pixel, where the padding reflects or repeats: their entries add up
        counts.append([sum(row[tap] >= 0 for row in taps) for tap in range(len(taps[0]))])
    weight = step.module.weight.double().square().sum((0, 1))
    times = torch.outer(*(torch.tensor(count, dtype=weight.dtype, device=weight.device) for count in counts))
    return float((weight * times).sum())


def _energy(model: EBFlow, context: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The energy of the matched variable, for one context."""
    if context is not None and (not isinstance(context, Tensor) or context.dim() == 0 or len(context) != 1):
        got = tuple(context.shape) if isinstance(context, Tensor) else type(context).__name__
        raise InputError(f"log_z needs a context of one row, got {got}; log Z is the same for all contexts")

    def energy(x: Tensor) -> Tensor:
        return model.core.energy(x, None if context is None else context.expand(len(x), *context.shape[1:]))

    return energy


def _fitted(model: EBFlow, data: Tensor, generator: Generator | None) -> Gaussian:
    return Gaussian.fit(model.preprocess(data, generator)[0])


def _matched_shape(model: EBFlow, event_shape: Shape) -> Shape:
    for step in model._prefix.steps:
        (event_shape,) = step.encoded_shapes((event_shape,))
    return event_shape


def _in_data_space(model: EBFlow, event_shape: Shape, found: Estimate) -> Estimate:
    """Adds the linear steps in front of the matched variable, which are fixed and known."""
    fixed = sum(_number(value) for _, value in model._prefix.log_dets(event_shape))
    value = model._like().new_tensor(float(found) - fixed)
    return Estimate.of(value, found.std_error, found.method, found.effective_sample_size)


def _number(value: Tensor | float) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else value
