r"""The base of all objectives: common options, the map from data to the matched variable, and weighted sums."""

from __future__ import annotations

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from numbers import Real
from typing import Any, ClassVar, TypedDict

import torch
from torch import Generator, Tensor, nn

from ebflow_plugin.errors import InputError, UnknownNameError, UnseenParameterWarning, suggest
from ebflow_plugin.linalg.random import check_generator
from ebflow_plugin.model import EBFlow
from ebflow_plugin.plan.inputs import is_number, one_of

__all__ = ["Common", "FunctionObjective", "Objective", "WeightedSum"]

REDUCTIONS = ("mean", "none")


class Common(TypedDict, total=False):
    """The options that every objective takes; see :class:`Objective`."""

    generator: Generator | None
    energy_weight: float
    reduction: str


class Objective(nn.Module, ABC):
    r"""A loss of an :class:`~ebflow_plugin.EBFlow`: called on a batch, it returns a scalar to minimise.

    It holds the model as a submodule, so that ``objective.parameters()`` are the flow's. Sums run over all dimensions
    but the batch, means over the batch. Gradients reach the flow's parameters (an ``embedding_net`` included) and the
    ``context``, so an encoder that produces the context is trained as with ``log_prob``. No gradient reaches ``x``.
    Objectives can be scaled and added: ``0.9 * SSM(model) + 0.1 * ML(model)``.

    The loss is computed on the matched variable, the data after the model's preprocessing (MaP), with ``model.core``.
    In training mode, a pending data-dependent initialisation (ActNorm) runs first, on the batch before any noise.

    A subclass implements :meth:`per_sample`.

    Arguments:
        model: A wrapped flow (:func:`~ebflow_plugin.wrap`).
        generator: The source of all randomness, including the noise of a ``Dequantize``: the same seed returns the
            same value. It may live on the CPU while the model does not. By default the global generator of the
            model's device.
        energy_weight: Adds :math:`\lambda\,\mathbb{E}[E(x)]`, the paper's regulariser. Losses here are sums over all
            dimensions; in the authors' code the term is added once for each pixel, so that their 0.001 (CIFAR-10,
            CelebA) and 0.1 (Glow on MNIST) are :math:`\lambda H W` here: 1.0 for 32 x 32 pixels, and 78.4 for 28 x 28.
        reduction: ``"mean"`` for a scalar, ``"none"`` for one value per sample, with shape ``(B,)``.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> flow = flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2]))
        >>> class Spread(Objective):
        ...     def per_sample(self, x, context):
        ...         return self.model.core.energy(x, context).square(), None
        >>> Spread(ebf.wrap(flow))(torch.randn(5, 2)).shape
        torch.Size([])
    """

    model: EBFlow
    in_data_space: ClassVar[bool] = False  # whether the value includes the log-det of the preprocessing
    _beside_energy = False  # set while this is a term of a sum in which another term sees the energy

    def __init__(
        self,
        model: EBFlow,
        *,
        generator: Generator | None = None,
        energy_weight: float = 0.0,
        reduction: str = "mean",
        **unknown: object,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if unknown:
            option = next(iter(unknown))
            raise UnknownNameError(f"{name} has no option {option!r}. {suggest(option, _options_of(type(self)))}")
        if not isinstance(model, EBFlow):
            kind = f"{type(model).__module__}.{type(model).__qualname__}"
            raise InputError(f"{name} needs an EBFlow, got {kind}; wrap it first: {name}(ebflow_plugin.wrap(flow))")
        if not is_number(energy_weight) or energy_weight < 0:
            raise InputError(f"energy_weight must be a finite number, at least 0, got {energy_weight!r}")
        self.model = model
        self.training = model.training
        check_generator(generator)
        self.generator = generator
        self.energy_weight = float(energy_weight)
        self.reduction = one_of("reduction", reduction, REDUCTIONS)

    @abstractmethod
    def per_sample(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Computes the loss of each sample.

        Arguments:
            x: The matched variable, with shape ``(B, *)``: without noise, detached, not empty.
            context: The context, with ``B`` rows, still attached to its graph.

        Returns:
            The values, and the energies of x if the computation yields them (else None), each with shape ``(B,)``.
        """

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Computes the loss of a batch.

        Arguments:
            x: Data, with shape ``(B, *)``.
            context: The context of the flow, with ``B`` rows.

        Returns:
            A scalar, or the values of all samples with shape ``(B,)`` for ``reduction="none"``.
        """
        if torch.is_inference_mode_enabled():  # a score needs a graph, which inference tensors cannot be part of
            with torch.inference_mode(False), torch.no_grad():
                return self.forward(x, context)
        plan, u, log_det = self.model.match(x, context, self.generator)
        u, context = _usable(u).detach(), None if context is None else _usable(context)
        if u.shape[0] == 0:
            if self.reduction == "mean":
                raise InputError('x holds no samples, so that there is no mean; use reduction="none" for empty batches')
            return u.flatten(1).sum(1)
        if plan.waits_for_data():
            plan.initialize(u, context)
        plan.refuse()
        warning = None if self._beside_energy else self.inspect_batch(u, context)
        values, energies = self.per_sample(u, context)
        if warning is not None:  # after the loss: if that fails too, its own error is the one to see
            warnings.warn(warning, UnseenParameterWarning, stacklevel=5)
        if self.energy_weight:
            energies = self.energies(u, context) if energies is None else energies
            values = values + self.energy_weight * energies
        if self.in_data_space:
            values = values - log_det.detach()
        return values.mean() if self.reduction == "mean" else values

    def energies(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """The energies of points near the batch, with shape ``(B,)``: ``model.core.energy`` without its checks."""
        return self.model.core_plan.energy(x, context)

    @property
    def sees_energy(self) -> bool:
        """Whether the loss depends on the energy itself, and not only on the score."""
        return self.in_data_space or self.energy_weight > 0

    def inspect_batch(self, x: Tensor, context: Tensor | None) -> str | None:
        """A hook that sees each batch before :meth:`per_sample`; by default it does nothing.

        Returns:
            The text of a warning to raise after the loss is computed, or None.
        """
        return None

    def metrics(self) -> dict[str, Any]:
        """Values that a training run reports beside the loss, as plain numbers, strings and dictionaries."""
        return {}

    def state(self) -> dict[str, Any]:
        """The statistics gathered from the batches so far, for a checkpoint; the weights are not included."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state` returned."""

    def extra_repr(self) -> str:
        """Describes the options."""
        weight = f", energy_weight={self.energy_weight:g}" if self.energy_weight else ""
        return f"reduction={self.reduction!r}{weight}"

    def in_words(self) -> str:
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


class WeightedSum(Objective):
    r"""A weighted sum of objectives of one model, :math:`\sum_i w_i L_i`, itself an objective.

    Each term does its own forward pass and draws its own noise. Nested sums are flattened.

    Arguments:
        terms: Pairs of a weight and an objective.
        generator: Replaces the generators of all terms.

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

    def __init__(self, terms: Iterable[tuple[float, Objective]], *, generator: Generator | None = None) -> None:
        nn.Module.__init__(self)
        flat = [pair for term in _listed(terms) for pair in _flatten(*term)]
        if not flat:
            raise InputError("a weighted sum needs at least one objective")
        first = flat[0][1]
        for _, term in flat:
            if term.model is not first.model:
                raise InputError(
                    f"{type(first).__name__} and {type(term).__name__} are objectives of different models; a sum needs "
                    "one and the same EBFlow: wrap the flow once"
                )
            if term.reduction != first.reduction:
                raise InputError(
                    f"{type(first).__name__} has reduction={first.reduction!r} and {type(term).__name__} has "
                    f"reduction={term.reduction!r}; the terms of a sum need the same"
                )
        self.weights = tuple(weight for weight, _ in flat)
        self.terms = nn.ModuleList(term for _, term in flat)
        self.reduction = first.reduction
        self.training = first.training
        if generator is not None:
            self.generator = generator

    @property
    def generator(self) -> Generator | None:
        """The generator that all terms share, or None. Setting it sets it for all terms."""
        first, *others = (term.generator for term in self._parts())
        return first if all(other is first for other in others) else None

    @generator.setter
    def generator(self, generator: Generator | None) -> None:
        check_generator(generator)
        for term in self._parts():
            term.generator = generator

    def _parts(self) -> list[Objective]:
        return list(self.terms)  # type: ignore[arg-type]

    @property
    def model(self) -> EBFlow:  # type: ignore[override]
        """The model of all terms."""
        first: Objective = self.terms[0]  # type: ignore[assignment]
        return first.model

    def per_sample(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError("the terms compute their own values")

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Computes the weighted sum of the terms' losses."""
        pairs = list(zip(self.weights, self._parts(), strict=True))
        seen = any(weight and term.sees_energy for weight, term in pairs)
        return torch.stack([weight * _loss(term, x, context, seen) for weight, term in pairs]).sum(0)

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

    def in_words(self) -> str:
        return " + ".join(
            f"{weight:g} * {term.in_words()}" for weight, term in zip(self.weights, self._parts(), strict=True)
        )

    def extra_repr(self) -> str:
        """Describes the weights."""
        return f"weights={self.weights}"


class FunctionObjective(Objective):
    """A user's function as an objective: ``function(model, x, context, **options)`` returns a scalar.

    The function receives the model in data space, the batch before preprocessing, detached, and the context, still
    attached to its graph.

    Arguments:
        model: An EBFlow.
        function: The function.
        options: Keyword arguments of the function, after its first three.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> def ridge(model, x, context, power=2):
        ...     return model.energy(x, context).abs().pow(power).mean()
        >>> FunctionObjective(model, ridge, power=1)(torch.randn(5, 2)).shape
        torch.Size([])
    """

    def __init__(self, model: EBFlow, function: Callable[..., Tensor], **options: object) -> None:
        super().__init__(model)
        self.name = getattr(function, "__name__", type(function).__name__)
        parameters = list(inspect.signature(function).parameters.values())[3:]
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            known = [parameter.name for parameter in parameters]
            for option in options:
                if option not in known:
                    raise UnknownNameError(f"{self.name} has no option {option!r}. {suggest(option, known)}")
        self.function = partial(function, **options)

    def per_sample(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError("the function computes a scalar")

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Calls the function."""
        self.model.check(x, context)
        value = self.function(self.model, x.detach(), context)
        if not isinstance(value, Tensor) or value.dim() != 0:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InputError(f"{self.name} must return a scalar tensor, got {shape}; take the mean over the batch")
        return value

    def extra_repr(self) -> str:
        """Describes the function and its options."""
        return ", ".join([self.name, *(f"{key}={value!r}" for key, value in self.function.keywords.items())])


def _loss(term: Objective, x: Tensor, context: Tensor | None, seen: bool) -> Tensor:
    """The loss of one term, without its search for unseen parameters if another term sees the energy."""
    term._beside_energy = seen
    try:
        return term(x, context)
    finally:
        term._beside_energy = False


def _usable(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy of an inference tensor, which cannot be part of a graph."""
    return tensor.clone() if tensor.is_inference() else tensor


def _listed(terms: object) -> list[tuple[float, Objective]]:
    pairs: list[Any] = list(terms) if isinstance(terms, Iterable) else [terms]
    for pair in pairs:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[1], Objective)):
            raise InputError(f"the terms of a sum are pairs of a weight and an objective, got {pair!r}")
    return pairs


def _flatten(weight: float, term: Objective) -> list[tuple[float, Objective]]:
    if not is_number(weight):
        raise InputError(f"the weight of {type(term).__name__} must be a finite number, got {weight!r}")
    if isinstance(term, WeightedSum):
        return [(weight * inner, part) for inner, part in zip(term.weights, term.terms, strict=True)]  # type: ignore[misc]
    return [(float(weight), term)]


def _options_of(cls: type[Objective]) -> list[str]:
    """The keyword options of a class, then those of its parents."""
    names: dict[str, None] = {}
    for parent in cls.__mro__:
        if issubclass(parent, Objective) and "__init__" in vars(parent):
            for parameter in list(inspect.signature(parent).parameters.values())[1:]:
                if parameter.kind is parameter.KEYWORD_ONLY and not parameter.name.startswith("_"):
                    names[parameter.name] = None
    return list(names)
