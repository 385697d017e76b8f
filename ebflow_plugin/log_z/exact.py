"""The exact log Z of a plan, cached until a parameter changes."""

from __future__ import annotations

import torch
from torch import Tensor

from ebflow_plugin.adapting.rules import RegisteredLinearStep
from ebflow_plugin.linalg.memo import is_traced, own_numbers, own_tensors
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.step import LinearStep, Shape


def exact_log_z(plan: Plan, event_shape: Shape, like: Tensor) -> Tensor:
    """The log Z of a plan, a scalar with the device and dtype of ``like``.

    If a gradient may be needed (grad mode is on and a linear step has parameters that require one, or they are
    differentiated in forward mode), it is computed on each call, with its graph: this is the cost of maximum
    likelihood. Otherwise the plan caches it until a parameter or buffer of one of its linear steps changes.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> flow = flows.Flow(transforms.NaiveLinear(2, orthogonal_initialization=False),
        ...                   distributions.StandardNormal([2]))
        >>> log_z = exact_log_z(ebf.wrap(flow).plan, (2,), torch.empty(0))
        >>> bool(log_z == -torch.slogdet(flow._transform._weight)[1])
        True
    """
    steps = [step for step in plan.steps if isinstance(step, LinearStep)]
    sources = list({id(tensor): tensor for step in steps for tensor in own_tensors(step.module)}.values())
    # The dependencies of a registered class are unknown.
    if any(map(is_traced, sources)) or any(isinstance(step, RegisteredLinearStep) for step in steps):
        return plan.log_z(event_shape, like)
    with torch.no_grad():
        numbers = tuple(number for step in steps for number in own_numbers(step.module))
        key = (event_shape, like.dtype, like.device, numbers)
        return plan.memo.get(sources, lambda: plan.log_z(event_shape, like), key)
