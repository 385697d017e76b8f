r"""Objectives by name: the built-in ones, and those of a user, a class or a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import Generator, Tensor

from ebflow_plugin.errors import InputError, UnknownNameError, suggest
from ebflow_plugin.model import EBFlow
from ebflow_plugin.objectives.base import Objective
from ebflow_plugin.objectives.latent_match import LatentMatch
from ebflow_plugin.objectives.likelihood import ML, SML
from ebflow_plugin.objectives.score_matching import DSM, FDSSM, SM, SSM
from ebflow_plugin.plan.inputs import check_weights
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.registry import Registry

T = TypeVar("T", bound=Callable[..., Any])

OBJECTIVES: Registry[str, Callable[..., Objective]] = Registry(
    "objective", {"ml": ML, "sml": SML, "sm": SM, "ssm": SSM, "fdssm": FDSSM, "dsm": DSM, "latent_match": LatentMatch}
)


def make_objective(name: str, model: EBFlow, **options: Any) -> Objective:
    """Builds an objective by name.

    Arguments:
        name: ``"ml"``, ``"sml"``, ``"sm"``, ``"ssm"``, ``"fdssm"``, ``"dsm"``, ``"latent_match"``, or a
            name registered with :func:`register_objective`. Case is ignored.
        model: A wrapped flow (:func:`~ebflow_plugin.wrap`).
        options: The options of the objective.

    Raises:
        UnknownNameError: If the objective or one of the options is unknown. The message lists the valid names.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> make_objective("dsm", model, sigma=0.5).sigma
        0.5
        >>> make_objective("smm", model)
        Traceback (most recent call last):
        ebflow_plugin.errors.UnknownNameError: unknown objective 'smm'. Did you mean 'sm'? Valid names: ...
    """
    if not isinstance(name, str):
        raise InputError(f"the name of an objective is a string, got {name!r}; call {name!r} itself on the model")
    return OBJECTIVES.named(name.lower())(model, **options)


def register_objective(name: str, *, force: bool = False) -> Callable[[T], T]:
    """Registers a custom objective under a name, for :func:`make_objective`.

    Decorates a subclass of :class:`Objective`, or a plain function ``f(model, x, context)`` that returns a scalar.
    Further parameters of the function are its options. The function receives the model in data space, and no gradient
    flows to ``x``.

    Arguments:
        name: The name. Case is ignored.
        force: Replaces an existing registration.

    Example:
        >>> import ebflow_plugin as ebf
        >>> import torch
        >>> from nflows import distributions, flows, transforms
        >>> @register_objective("spread", force=True)
        ... def spread(model, x, context, power=2):
        ...     return model.energy(x, context).pow(power).mean()
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> loss = 0.9 * make_objective("ssm", model) + 0.1 * make_objective("spread", model, power=4)
        >>> loss(torch.randn(5, 2)).backward()
    """
    if not isinstance(name, str) or not name:
        raise InputError(f"the name of an objective is a string, got {name!r}; write @register_objective('name')")

    def register(target: T) -> T:
        make: Callable[..., Objective] = target
        if isinstance(target, type):
            if not issubclass(target, Objective):
                raise InputError(f"{target.__name__} is no subclass of ebflow_plugin.objectives.Objective")
        elif callable(target):
            make = partial(FunctionObjective, function=target)
        else:
            raise InputError(f"an objective is a class or a function, got {target!r}")
        OBJECTIVES.add(name.lower(), make, force)
        return target

    return register


class FunctionObjective(Objective):
    """A user's function as an objective: ``function(model, x, context, **options)`` returns a scalar.

    The function receives the model in data space, the batch before preprocessing, detached, and the context, still
    attached to its graph. A function with a parameter ``weights`` also receives the weights of the rows, if there are
    any: checked, and divided by their sum, so that ``(weights * values).sum()`` is the mean. Other functions refuse
    weights, since only the function knows how its scalar depends on a row.

    Arguments:
        model: An EBFlow.
        function: The function.
        options: Keyword arguments of the function, after its first three.

    Example:
        >>> import ebflow_plugin as ebf
        >>> import torch
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> def ridge(model, x, context, power=2):
        ...     return model.energy(x, context).abs().pow(power).mean()
        >>> FunctionObjective(model, ridge, power=1)(torch.randn(5, 2)).shape
        torch.Size([])
    """

    not_compiled = "it is a function; compile a subclass of Objective with a method per_sample"

    def __init__(self, model: EBFlow, function: Callable[..., Tensor], **options: object) -> None:
        super().__init__(model)
        self.name = getattr(function, "__name__", type(function).__name__)
        parameters = list(inspect.signature(function).parameters.values())[3:]
        self._weighted = any(parameter.name == "weights" for parameter in parameters)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            known = [parameter.name for parameter in parameters]
            for option in options:
                if option not in known:
                    raise UnknownNameError(f"{self.name} has no option {option!r}. {suggest(option, known)}")
        self.function = partial(function, **options)

    def per_sample(self, plan: Plan, u: Tensor, context: Tensor | None, generator: Generator | None) -> Tensor:
        raise NotImplementedError("the function computes a scalar")

    def _loss(self, x: Any, context: Tensor | None, weights: Tensor | None, generator: Generator | None) -> Tensor:
        """Calls the function, which has its own randomness."""
        checked, options = self.model.check(x, context), {}
        if weights is not None:
            if not self._weighted:
                raise InputError(f"{self.name} takes no weights of rows: give it a parameter weights=None, and use it")
            scaled = check_weights(weights, checked)
            options["weights"] = scaled / scaled.sum()
        value = self.function(self.model, x.detach(), context, **options)
        if not isinstance(value, Tensor) or value.dim() != 0:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InputError(f"{self.name} must return a scalar tensor, got {shape}; take the mean over the batch")
        return value

    def extra_repr(self) -> str:
        """Describes the function and its options."""
        return ", ".join([self.name, *(f"{key}={value!r}" for key, value in self.function.keywords.items())])
