"""Objectives: losses of an EBFlow, each an ``nn.Module`` that is called on a batch.

    objective = SSM(model)              # or make_objective("ssm", model)
    loss = objective(x)                 # a scalar; loss.backward() fills the gradients of the flow's parameters
    loss = objective(x, weights=w)      # of rows with weights

=========== ============================================================== ==================================
name        formula (sum over dimensions, mean over the batch)             a training step costs
=========== ============================================================== ==================================
ML          E[E(x)] + log Z                                                determinants: O(D³); with
                                                                           log_det="stochastic" products,
                                                                           "relative" O(D²)
SML         E_data[E(x)] - E_model[E(x)]                                   solves: O(D³), one energy of 2B
SM          E[½‖∇E‖² - tr ∇²E]                                             D Hessian products
SSM         ½ E‖∇E‖² - E[vᵀ∇²E v]                                          one Hessian product
FDSSM       D/ε² · E[2E - E₊ - E₋ + ⅛(E₊ - E₋)²]                           one energy of 3B
DSM         ½ E‖∇E(x̃) + (x - x̃)/σ²‖²                                       one gradient
LatentMatch 2 E‖z - r‖ - E‖z - z'‖ - E‖r - r'‖, z = g(x), r ~ p_u          one pass to the latents, B² distances
ReverseKL   E_model[log q(x) - log f(x)] of a target f, without data        solves: O(D³), one gradient
=========== ============================================================== ==================================
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from ebflow_plugin.errors import InputError
from ebflow_plugin.model import EBFlow
from ebflow_plugin.objectives.base import Objective, WeightedSum
from ebflow_plugin.objectives.functions import FunctionObjective
from ebflow_plugin.objectives.latent_match import LatentMatch
from ebflow_plugin.objectives.likelihood import ML, SML
from ebflow_plugin.objectives.reverse import ReverseKL
from ebflow_plugin.objectives.schedule import NoiseSchedule
from ebflow_plugin.objectives.score_matching import DSM, FDSSM, SM, SSM
from ebflow_plugin.plan.registry import Registry

__all__ = [
    "DSM",
    "FDSSM",
    "ML",
    "SM",
    "SML",
    "SSM",
    "LatentMatch",
    "NoiseSchedule",
    "Objective",
    "ReverseKL",
    "WeightedSum",
    "make_objective",
    "register_objective",
]

T = TypeVar("T", bound=Callable[..., Any])

_OBJECTIVES: Registry[str, Callable[..., Objective]] = Registry(
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
    return _OBJECTIVES.named(name.lower())(model, **options)


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
        if isinstance(target, type):
            if not issubclass(target, Objective):
                raise InputError(f"{target.__name__} is no subclass of ebflow_plugin.objectives.Objective")
            _OBJECTIVES.add(name.lower(), target, force)
        elif callable(target):
            _OBJECTIVES.add(name.lower(), partial(FunctionObjective, function=target), force)
        else:
            raise InputError(f"an objective is a class or a function, got {target!r}")
        return target

    return register
