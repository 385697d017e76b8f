r"""The base of all objectives: the map from data to the matched variable, and weighted sums."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from numbers import Real
from typing import Any, ClassVar, Self, TypedDict

import torch
from torch import Generator, Tensor, nn

from ebflow_plugin.errors import InputError, UnknownNameError, suggest
from ebflow_plugin.linalg.memo import transformed
from ebflow_plugin.model import EBFlow
from ebflow_plugin.objectives.compiling import CompiledLoss, Prepared
from ebflow_plugin.objectives.schedule import AddedNoise
from ebflow_plugin.options import check_generator, is_number
from ebflow_plugin.plan.inputs import check_weights, counted_rows, refuse_other_models, resampled_rows, usable
from ebflow_plugin.plan.plan import Plan


class Common(TypedDict, total=False):
    """The options that every objective takes; see :class:`Objective`."""

    generator: Generator | None


class Objective(nn.Module, ABC):
    r"""A loss of an :class:`~ebflow_plugin.EBFlow`: called on a batch, it returns a scalar to minimise.

    It holds the model as a submodule, so that ``objective.parameters()`` are the flow's. Sums run over all dimensions
    but the batch, means over the batch. Gradients reach the flow's parameters (an ``embedding_net`` included) and the
    ``context``, so an encoder that produces the context is trained as with ``log_prob``. No gradient reaches ``x``.
    Objectives can be scaled and added: ``0.9 * SSM(model) + 0.1 * ML(model)``.

    Rows may have weights, ``objective(x, weights=w)``: the mean is then :math:`\sum_i w_i l_i / \sum_i w_i`. Equal
    weights change nothing, and a row of weight zero counts as absent, even if its loss would be NaN.

    The loss is computed on the matched variable, the data after the model's preprocessing (MaP), with ``model.core``.
    In training mode, a pending data-dependent initialisation (ActNorm) runs first, on the batch before any noise.

    A subclass implements :meth:`per_sample`.

    Arguments:
        model: A wrapped flow (:func:`~ebflow_plugin.wrap`).
        generator: The source of all randomness, including the noise of a ``Dequantize``: the same seed returns the
            same value. It may live on the CPU while the model does not. By default the global generator of the
            model's device. A generator passed to a call replaces it for that call.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> flow = flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2]))
        >>> class Spread(Objective):
        ...     def per_sample(self, plan, u, context, generator):
        ...         return plan.energy(u, context).square()
        >>> Spread(ebf.wrap(flow))(torch.randn(5, 2)).shape
        torch.Size([])
    """

    model: EBFlow
    in_data_space: ClassVar[bool] = False  # whether the value includes the log-det of the preprocessing
    full_precision: ClassVar[bool] = False  # whether it subtracts nearly equal numbers
    noise: AddedNoise | None = None  # that it adds to the matched variable
    not_compiled: ClassVar[str] = ""  # why it cannot be
    _compiled: CompiledLoss | None = None

    def __init__(self, model: EBFlow, *, generator: Generator | None = None, **unknown: object) -> None:
        super().__init__()
        name = type(self).__name__
        if unknown:
            option = next(iter(unknown))
            raise UnknownNameError(f"{name} has no option {option!r}. {suggest(option, _options_of(type(self)))}")
        refuse_other_models(name, model)
        self.model = model
        self.training = model.training
        check_generator(generator)
        self.generator = generator

    @abstractmethod
    def per_sample(self, plan: Plan, u: Tensor, context: Tensor | None, generator: Generator | None) -> Tensor:
        """Computes the loss of each sample, with shape ``(B,)``.

        Arguments:
            plan: The plan of the matched variable, ``model.core``.
            u: The matched variable, with shape ``(B, *)``: without noise, detached, not empty.
            context: The context, with ``B`` rows, still attached to its graph.
            generator: The source of all randomness.
        """

    def losses(
        self, x: Tensor | None = None, context: Tensor | None = None, *, generator: Generator | None = None
    ) -> Tensor:
        """Computes the loss of each sample of a batch, of which :meth:`forward` returns the mean: shape ``(B,)``."""
        if isinstance(x, Tensor) and x.shape[:1] == (0,):
            return self.model.check(x, context).detach().flatten(1).sum(1)
        return self._losses(x, context, None, generator)[0]

    def prepare(self, x: Any, context: Tensor | None, weights: Tensor | None, generator: Generator | None) -> Prepared:
        """Everything of a loss that reads values or draws numbers, and so is no part of a compiled graph.

        Rows of weight zero are replaced, so that nothing of them enters a graph.
        """
        if weights is not None:
            x = self.model.check(x, context)
            weights = check_weights(weights, x)
            rows = counted_rows(weights) if len(x) else slice(None)
            x, context = x[rows], None if context is None else context[rows]
        if generator is None:
            generator = self.generator
        else:
            check_generator(generator)
        plan, u, log_det = self.model.match(x, context, generator)
        u, context = u.detach(), None if context is None else usable(context)
        if len(u) == 0:
            raise InputError("x holds no samples, so that there is no mean")
        if plan.waits_for_data():
            picked = slice(None) if weights is None else resampled_rows(weights)
            plan.initialize(u[picked], None if context is None else context[picked])
        if self.noise is not None:
            self.noise.begin(u, self.model.training)
        drawn = self.draw(plan, u, context, generator)
        return Prepared(plan, u, context, weights, log_det if self.in_data_space else None, drawn)

    def draw(self, plan: Plan, u: Tensor, context: Tensor | None, generator: Generator | None) -> Any:
        """Draws the numbers that :meth:`value` needs: a tuple; by default the generator, for :meth:`per_sample`."""
        return generator

    def value(self, plan: Plan, u: Tensor, context: Tensor | None, drawn: Any) -> Tensor:
        """Computes the loss of each sample from what :meth:`draw` returned: of numbers, a pure function of tensors."""
        return self.per_sample(plan, u, context, drawn)

    def _losses(
        self, x: Any, context: Tensor | None, weights: Tensor | None, generator: Generator | None
    ) -> tuple[Tensor, Tensor | None]:
        """The losses of a batch, and the checked weights of its rows."""
        with graphs_allowed():
            given = self.prepare(x, context, weights, generator)
            try:
                values = self.value(given.plan, given.u, given.context, given.drawn)
            except Exception as error:
                if self.added_noise and not isinstance(error, InputError):  # which explains itself
                    error.add_note(
                        f"{type(self).__name__} adds noise to the data ({self.added_noise}). If that left the domain "
                        "of the flow, map the domain to all of R^D first (wrap(flow, preprocess=[Logit()])), use less "
                        "noise, or use SSM or ML."
                    )
                raise
            return values if given.log_det is None else values - given.log_det, given.weights

    def mean(self, given: Prepared) -> Tensor:
        """The loss of a prepared batch: what is compiled."""
        values = self.value(given.plan, given.u, given.context, given.drawn)
        values = values if given.log_det is None else values - given.log_det
        return values.mean() if given.weights is None else (given.weights * values).sum() / given.weights.sum()

    @property
    def added_noise(self) -> str:
        """The noise that it adds to the matched variable, in words; empty without any."""
        return "" if self.noise is None else str(self.noise)

    def compile(self, **options: Any) -> Self:  # type: ignore[override]
        """Compiles the loss: a call computes it and all gradients in one graph of :func:`torch.compile`.

        ``objective(x).backward()`` works as before, with the same values to rounding and the same random numbers. The
        first call takes a minute: it traces the loss, its gradients, and the gradients in x inside of it, and compiles
        them. A second batch size adds one more graph, which serves all sizes. After a change of the flow the next call
        compiles it anew; new values of its parameters are no change. Losses without gradients are not compiled, and a
        compiled loss has no second derivatives. The gradients are taken of the loss as it is, so the scale of a
        GradScaler comes too late for float16; bfloat16 needs none.

        Arguments:
            options: Options of :func:`torch.compile`, such as ``mode`` and ``backend``.

        Returns:
            The objective itself.

        Raises:
            UnsupportedStepError: In a call, if a step reads the values of tensors; the message names it.

        Example:
            >>> import ebflow_plugin as ebf
            >>> from nflows import distributions, flows, transforms
            >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
            >>> objective = ebf.objectives.DSM(model).compile(backend="eager")
            >>> objective(torch.randn(5, 2)).backward()
        """
        for _, term in self.pairs():
            if term.not_compiled:
                raise InputError(f"{type(term).__name__} cannot be compiled: {term.not_compiled}")
        self._compiled = CompiledLoss(options)
        return self

    @property
    def is_compiled(self) -> bool:
        """Whether :meth:`compile` was called."""
        return self._compiled is not None

    def _graph(self) -> CompiledLoss | None:
        """The compiled loss, where it serves: it computes gradients, and cannot be transformed."""
        if self._compiled is None or not torch.is_grad_enabled() or transformed():
            return None
        return self._compiled

    def forward(
        self,
        x: Tensor | None = None,
        context: Tensor | None = None,
        weights: Tensor | None = None,
        *,
        generator: Generator | None = None,
    ) -> Tensor:
        """Computes the loss of a batch, a scalar.

        Arguments:
            x: Data, with shape ``(B, *)``. Without any, only objectives without data have a loss.
            context: The context of the flow, with ``B`` rows.
            weights: The weights of the rows, with shape ``(B,)``: at least 0, of any scale. No gradient reaches them.
            generator: The source of all randomness in this call, in place of the objective's own.
        """
        if (graph := self._graph()) is not None:
            pairs = self.pairs()
            return graph(self, pairs, [term.prepare(x, context, weights, generator) for _, term in pairs])
        return self._loss(x, context, weights, generator)

    def _loss(self, x: Any, context: Tensor | None, weights: Tensor | None, generator: Generator | None) -> Tensor:
        """What :meth:`forward` returns, without a graph of it."""
        values, shares = self._losses(x, context, weights, generator)
        return values.mean() if shares is None else (shares * values).sum() / shares.sum()

    def pairs(self) -> list[tuple[float, Objective]]:
        """The weighted terms of a sum; of another objective, itself."""
        return [(1.0, self)]

    def metrics(self) -> dict[str, Any]:
        """Values that a training run reports beside the loss, as plain numbers, strings and dictionaries."""
        return {} if self.noise is None else self.noise.metrics()

    def state(self) -> dict[str, Any]:
        """The statistics gathered from the batches so far, for a checkpoint; the weights are not included."""
        return {} if self.noise is None else self.noise.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state` returned."""
        if self.noise is not None:
            self.noise.load_state(state)

    def describe(self) -> str:
        """The name and options, as one string. A run resumes only from a checkpoint with the same string."""
        return f"{type(self).__name__}({self.extra_repr()})"

    def __mul__(self, weight: float) -> WeightedSum:
        if not isinstance(weight, Real):
            return NotImplemented
        return WeightedSum([(weight, self)])

    __rmul__ = __mul__

    def __add__(self, other: Objective) -> WeightedSum:
        return WeightedSum([(1.0, self), (1.0, other)]) if isinstance(other, Objective) else NotImplemented

    def __radd__(self, other: object) -> Objective:
        if isinstance(other, Real) and other == 0:  # sum() starts from 0
            return self
        return NotImplemented


class DrawnObjective(Objective):
    """An objective whose random numbers are drawn first, by :meth:`draw`, so that :meth:`value` can be compiled."""

    def per_sample(self, plan: Plan, u: Tensor, context: Tensor | None, generator: Generator | None) -> Tensor:
        return self.value(plan, u, context, self.draw(plan, u, context, generator))

    @abstractmethod
    def draw(self, plan: Plan, u: Tensor, context: Tensor | None, generator: Generator | None) -> tuple[Tensor, ...]:
        """Draws the numbers that :meth:`value` needs."""

    @abstractmethod
    def value(self, plan: Plan, u: Tensor, context: Tensor | None, drawn: tuple[Tensor, ...]) -> Tensor:
        """Computes the loss of each sample, with shape ``(B,)``, from the numbers that :meth:`draw` returned."""


class WeightedSum(Objective):
    r"""A weighted sum of objectives of one model, :math:`\sum_i w_i L_i`, itself an objective.

    Each term does its own forward pass and draws its own noise. Nested sums are flattened.

    Arguments:
        terms: Pairs of a weight and an objective.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from ebflow_plugin.objectives import ML, SSM
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> loss = 0.9 * SSM(model) + 0.1 * ML(model)
        >>> loss.weights
        (0.9, 0.1)
        >>> loss(torch.randn(5, 2)).backward()
    """

    weights: tuple[float, ...]

    def __init__(self, terms: Iterable[tuple[float, Objective]]) -> None:
        nn.Module.__init__(self)
        pairs: list[Any] = list(terms) if isinstance(terms, Iterable) else [terms]
        flat: list[tuple[float, Objective]] = []
        for pair in pairs:
            if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[1], Objective)):
                raise InputError(f"the terms of a sum are pairs of a weight and an objective, got {pair!r}")
            weight, term = pair
            if not is_number(weight):
                raise InputError(f"the weight of {type(term).__name__} must be a finite number, got {weight!r}")
            flat += [(weight * share, part) for share, part in term.pairs()]
        if not flat:
            raise InputError("a weighted sum needs at least one objective")
        first = flat[0][1]
        for _, term in flat:
            if term.model is not first.model:
                raise InputError(
                    f"{type(first).__name__} and {type(term).__name__} are objectives of different models; a sum needs "
                    "one and the same EBFlow: wrap the flow once"
                )
        self.weights = tuple(float(weight) for weight, _ in flat)
        self.terms = nn.ModuleList(term for _, term in flat)
        self.training = first.training

    def pairs(self) -> list[tuple[float, Objective]]:
        return list(zip(self.weights, self.terms, strict=True))  # type: ignore[arg-type]

    @property
    def model(self) -> EBFlow:  # type: ignore[override]
        """The model of all terms."""
        first: Objective = self.terms[0]  # type: ignore[assignment]
        return first.model

    def per_sample(self, plan: Plan, u: Tensor, context: Tensor | None, generator: Generator | None) -> Tensor:
        raise NotImplementedError("the terms compute their own values")

    def losses(
        self, x: Tensor | None = None, context: Tensor | None = None, *, generator: Generator | None = None
    ) -> Tensor:
        """Computes the weighted sum of the terms' losses of each sample."""
        terms = [weight * term.losses(x, context, generator=generator) for weight, term in self.pairs()]
        return torch.stack(terms).sum(0)

    def _loss(self, x: Any, context: Tensor | None, weights: Tensor | None, generator: Generator | None) -> Tensor:
        terms = [weight * term(x, context, weights, generator=generator) for weight, term in self.pairs()]
        return torch.stack(terms).sum(0)

    def metrics(self) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for term in self.terms:
            for name, value in term.metrics().items():  # type: ignore[operator]
                merged[name] = merged[name] + value if isinstance(merged.get(name), int) else value
        return merged

    def state(self) -> dict[str, Any]:
        return {str(index): term.state() for index, term in enumerate(self.terms)}  # type: ignore[operator]

    def load_state(self, state: Mapping[str, Any]) -> None:
        for index, term in enumerate(self.terms):
            term.load_state(state.get(str(index), {}))  # type: ignore[operator]

    def describe(self) -> str:
        return " + ".join(f"{weight:g} * {term.describe()}" for weight, term in self.pairs())

    def extra_repr(self) -> str:
        """Describes the weights."""
        return f"weights={self.weights}"


def graphs_allowed() -> AbstractContextManager[object]:
    """Leaves inference mode, if need be: a score needs a graph, which inference tensors cannot be part of."""
    if not torch.is_inference_mode_enabled():
        return nullcontext()
    left = ExitStack()
    left.enter_context(torch.inference_mode(False))
    left.enter_context(torch.no_grad())
    return left


def _options_of(cls: type[Objective]) -> list[str]:
    """The keyword options of a class, then those of its parents."""
    names: dict[str, None] = {}
    for parent in cls.__mro__:
        if issubclass(parent, Objective) and "__init__" in vars(parent):
            for parameter in list(inspect.signature(parent).parameters.values())[1:]:
                if parameter.kind is parameter.KEYWORD_ONLY and not parameter.name.startswith("_"):
                    names[parameter.name] = None
    return list(names)
