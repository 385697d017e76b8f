"""The exact log Z of a plan, cached until a parameter changes."""

from __future__ import annotations

import torch
from torch import Tensor

from ebflow_plugin.adapting.rules import RegisteredLinearStep
from ebflow_plugin.linalg.memo import Memo, is_traced, own_numbers, own_tensors
from ebflow_plugin.plan.plan import Plan
from ebflow_plugin.plan.step import LinearStep, Shape


class Normalizer:
    """Caches the log Z of a plan until a parameter or buffer of one of its linear steps changes.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> flow = flows.Flow(transforms.NaiveLinear(2, orthogonal_initialization=False),
        ...                   distributions.StandardNormal([2]))
        >>> normalizer = Normalizer(ebf.wrap(flow).plan)
        >>> bool(normalizer.log_z((2,), torch.empty(0)) == -torch.slogdet(flow._transform._weight)[1])
        True
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._memo: Memo[Tensor] = Memo()

    def log_z(self, event_shape: Shape, like: Tensor) -> Tensor:
        """Returns log Z, a scalar with the device and dtype of ``like``.

        If a gradient may be needed (grad mode is on and a linear step has parameters that require one, or they are
        differentiated in forward mode), it is computed on each call, with its graph: this is the cost of maximum
        likelihood. Otherwise it is cached.
        """
        steps = [step for step in self.plan.steps if isinstance(step, LinearStep)]
        sources = list({id(tensor): tensor for step in steps for tensor in own_tensors(step.module)}.values())
        if any(map(is_traced, sources)):
            return self.plan.log_z(event_shape, like)
        if any(isinstance(step, RegisteredLinearStep) for step in steps):
            return self.plan.log_z(event_shape, like)  # the dependencies of a registered class are unknown
        with torch.no_grad():
            numbers = tuple(number for step in steps for number in own_numbers(step.module))
            key = (event_shape, like.dtype, like.device, numbers)
            return self._memo.get(sources, lambda: self.plan.log_z(event_shape, like), key)
