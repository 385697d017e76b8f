r"""Exponential moving average of a model's parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ebflow_plugin.errors import EBFlowError, InputError
from ebflow_plugin.model import EBFlow
from ebflow_plugin.options import at_least, flag, is_number
from ebflow_plugin.plan.inputs import refuse_other_models


class EMA:
    r"""An exponential moving average of a model's parameters.

    .. math:: \bar\theta \leftarrow d_n \bar\theta + (1 - d_n)\, \theta, \qquad
              d_n = \min\left(d, \frac{1 + n}{10 + n}\right)

    with n the number of updates so far; without warm-up :math:`d_n = d`. Create it after ``model.initialize(x)``:
    values from before the data-dependent start would stay in the average for a while. Buffers are not averaged: inside
    :meth:`applied` they are the model's current ones.

    An update is a few fused operations on all parameters at once, and never synchronises with the device. Averages of
    half-precision parameters are in single precision. (``torch.optim.swa_utils.AveragedModel`` copies the whole model
    with its buffers, averages in the precision of the parameters, and reads its count from the device.)

    Arguments:
        model: A wrapped flow (:func:`~ebflow_plugin.wrap`).
        decay: The decay d, at least 0 and below 1.
        warmup: Whether early updates forget faster.

    Attributes:
        updates: The number of updates so far.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> ema = EMA(model, decay=0.999)
        >>> with torch.no_grad():
        ...     _ = model.flow._transform.bias.add_(1.0)  # an optimiser's step
        >>> ema.update()
        >>> with ema.applied():
        ...     model.flow._transform.bias.detach()
        tensor([0.9000, 0.9000])
        >>> model.flow._transform.bias.detach()
        tensor([1., 1.])
    """

    def __init__(self, model: EBFlow, decay: float = 0.999, warmup: bool = True) -> None:
        refuse_other_models("EMA", model)
        self.model, self.decay, self.warmup = model, decay_of(decay), flag("warmup", warmup)
        self._applied = False
        self.restart()

    def restart(self) -> None:
        """Restarts the average from the model's current values."""
        self._refuse_applied("restart() inside applied() would start from the average")
        with torch.inference_mode(False), torch.no_grad():
            self._averages = [p.detach().to(_wide(p), copy=True) for p in _averaged(self.model).values()]
        self.updates = 0

    @torch.no_grad()
    def update(self) -> None:
        """Updates the average with the model's current parameters."""
        self._refuse_applied("update() inside applied() would average the average")
        parameters, n = self._followed(), self.updates
        if parameters:
            decay = min(self.decay, (1 + n) / (10 + n)) if self.warmup else self.decay
            torch._foreach_lerp_(self._averages, [p.to(_wide(p)) for p in parameters.values()], 1.0 - decay)
            self.updates += 1

    @contextmanager
    def applied(self) -> Iterator[EBFlow]:
        """Loads the averaged values into the model inside a ``with`` block, and restores its own values exactly.

        The values are written into the same parameters, so that optimisers stay valid. The model's own values are
        restored even after an error; changes to the parameters inside the block are lost.

        Example:
            >>> import ebflow_plugin as ebf
            >>> from nflows import distributions, flows, transforms
            >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
            >>> with EMA(model).applied() as averaged:
            ...     averaged.log_prob(torch.randn(5, 2)).shape
            torch.Size([5])
        """
        self._refuse_applied("the average is applied already")
        parameters = list(self._followed().values())
        with torch.inference_mode(False), torch.no_grad():
            own = [parameter.clone() for parameter in parameters]
        self._applied = True
        try:
            _write(self.model, parameters, self._averages)
            yield self.model
        finally:
            _write(self.model, parameters, own)
            self._applied = False

    def copy_to(self, model: EBFlow | None = None) -> None:
        """Copies the averaged values into a model: the EMA's own, or another with the same parameters."""
        self._refuse_applied("copy_to() inside applied() would be undone at its end")
        model = self.model if model is None else model
        if not isinstance(model, EBFlow):
            raise InputError(f"copy_to() needs an EBFlow, got {type(model).__name__}")
        named, targets = self._followed(), _averaged(model)
        _compare("the model", targets, named)
        _write(model, [targets[name] for name in named], self._averages)

    def state_dict(self) -> dict[str, Any]:
        """The state: plain tensors and numbers, which ``torch.load(weights_only=True)`` accepts.

        The tensors are the averages themselves, as in ``nn.Module.state_dict``: clone them to keep them.
        """
        averages = dict(zip(self._followed(), self._averages, strict=True))
        return {"decay": self.decay, "warmup": self.warmup, "updates": self.updates, "averages": averages}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state of :meth:`state_dict`, for a model with the same parameters.

        Raises:
            InputError: If names or shapes differ; nothing is loaded then.
        """
        names = ("decay", "warmup", "updates", "averages")
        missing = [name for name in names if not isinstance(state, Mapping) or name not in state]
        if missing:
            raise InputError(f"this is no state of an EMA: it lacks {', '.join(missing)}")
        named, found = self._followed(), state["averages"]
        if not isinstance(found, Mapping) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
            raise InputError(f"averages must be tensors by name, got {found!r:.60}")
        _compare("the state", found, named)
        decay, warmup = decay_of(state["decay"]), flag("warmup", state["warmup"])
        self.updates, self.decay, self.warmup = at_least(0, "updates", state["updates"]), decay, warmup
        for name, average in zip(named, self._averages, strict=True):
            average.copy_(found[name])

    def _refuse_applied(self, why: str) -> None:
        if self._applied:
            raise EBFlowError(f"{why}; leave the block first")

    def _followed(self) -> dict[str, nn.Parameter]:
        """The parameters by name. Moves and casts the averages as the model may have been since."""
        named = _averaged(self.model)
        if [each.shape for each in self._averages] != [each.shape for each in named.values()]:
            raise EBFlowError("the model has other parameters than when its average began: call restart()")
        pairs = zip(self._averages, named.values(), strict=True)
        self._averages = [average.to(parameter.device, _wide(parameter)) for average, parameter in pairs]
        return named


def decay_of(value: object) -> float:
    """Returns a decay, or raises an error."""
    if not is_number(value) or not 0.0 <= float(value) < 1.0:  # type: ignore[arg-type]
        raise InputError(f"decay must be a number, at least 0 and below 1, got {value!r}")
    return float(value)  # type: ignore[arg-type]


def _averaged(model: EBFlow) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.is_floating_point() or p.is_complex()}


def _wide(parameter: Tensor) -> torch.dtype:
    """At least single precision, so that an update by 0.001 of a difference is not rounded away."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _write(model: EBFlow, targets: list[Any], sources: list[Tensor]) -> None:
    """Writes in place, which raises version counters, and empties the flow's caches of the old values."""
    with torch.inference_mode(False), torch.no_grad():
        if targets:
            torch._foreach_copy_(targets, sources)
    model.adapter.release(model.flow)


def _compare(what: str, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    there, here = ({name: str(tuple(one.shape)) for name, one in each.items()} for each in (found, wanted))
    names = (name for name in {**here, **there} if there.get(name) != here.get(name))
    odd = [f"\n  {name}: shape {there.get(name, 'none')}, not {here.get(name, 'none')}" for name in names]
    if odd:
        raise InputError(f"{what} does not have the parameters of this average{''.join(odd)}")
