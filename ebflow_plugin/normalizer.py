"""log Z, the constant that the energy leaves out: exact, computed once, never stale."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ebflow_plugin.memo import Memo
from ebflow_plugin.plan import Plan, Shape

__all__ = ["Normalizer"]


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
            key = (event_shape, like.dtype, like.device)
            return self._memo.get(sources, lambda: self._plan.log_z(event_shape, like), key)

    def _sources(self) -> list[Tensor]:
        """All tensors that log Z depends on, each once."""
        tensors: dict[int, Tensor] = {}
        for step in self._plan.steps:
            if step.linearity == "linear" and isinstance(step.module, nn.Module):
                for tensor in (*step.module.parameters(), *step.module.buffers()):
                    tensors[id(tensor)] = tensor
        return list(tensors.values())
