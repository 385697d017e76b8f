r"""Exponential moving average of a model's parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ebflow_plugin.errors import EBFlowError, InputError
from ebflow_plugin.model import EBFlow
from ebflow_plugin.plan.inputs import flag

__all__ = ["EMA"]


class EMA:
    r"""An exponential moving average of a model's parameters, with a copy of its buffers.

    .. math:: \bar\theta \leftarrow d_n \bar\theta + (1 - d_n)\, \theta, \qquad
              d_n = \min\left(d, \frac{1 + n}{10 + n}\right)

    with n the number of updates so far; without warm-up :math:`d_n = d`. Create it after ``model.initialize(x)``:
    values from before the data-dependent start would stay in the average for a while.

    An update is a few fused operations on all parameters at once, and never synchronises with the device. Averages of
    half-precision parameters are in single precision.

    Arguments:
        model: A wrapped flow (:func:`~ebflow_plugin.wrap`).
        decay: The decay d, at least 0 and below 1.
        warmup: Whether early updates forget faster.

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
        if not isinstance(model, EBFlow):
            kind = f"{type(model).__module__}.{type(model).__qualname__}"
            raise InputError(f"EMA needs an EBFlow, got {kind}; wrap it first: EMA(ebflow_plugin.wrap(flow))")
        if not _is_decay(decay):
            raise InputError(f"decay must be a number, at least 0 and below 1, got {decay!r}")
        self.model, self.decay, self.warmup = model, float(decay), flag("warmup", warmup)
        self._applied = False
        self.restart()

    def restart(self) -> None:
        """Restarts the average from the model's current values."""
        self._refuse_applied("restart() inside applied() would start from the average")
        self.updates = 0
        self._averages: dict[str, Tensor] = {}
        self._copies: dict[str, Tensor] = {}
        self._follow()

    @torch.no_grad()
    def update(self) -> None:
        """Updates the average with the model's current parameters, and copies its buffers."""
        self._refuse_applied("update() inside applied() would average the average")
        parameters, buffers = self._follow()
        averages = list(self._averages.values())
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay
        if averages:
            current = [parameter.to(average.dtype) for average, parameter in zip(averages, parameters, strict=True)]
            torch._foreach_lerp_(averages, current, 1.0 - decay)
        if buffers:
            torch._foreach_copy_(list(self._copies.values()), buffers)
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
        if self._applied:
            raise EBFlowError("the average is applied already")
        parameters, buffers = self._follow()
        with torch.inference_mode(False), torch.no_grad():
            own = [tensor.clone() for tensor in (*parameters, *buffers)]
        self._applied = True
        try:
            _write(self.model, [*parameters, *buffers], [*self._averages.values(), *self._copies.values()])
            yield self.model
        finally:
            _write(self.model, [*parameters, *buffers], own)
            self._applied = False

    def copy_to(self, model: EBFlow | None = None) -> None:
        """Copies the averaged values into a model: the EMA's own, or another with the same parameters."""
        self._refuse_applied("copy_to() inside applied() would be undone at its end")
        model = self.model if model is None else model
        if not isinstance(model, EBFlow):
            raise InputError(f"copy_to() needs an EBFlow, got {type(model).__name__}")
        self._follow()
        parameters, buffers = _tensors(model)
        target, source = {**parameters, **buffers}, {**self._averages, **self._copies}
        _compare("the model", target, source)
        _write(model, [target[name] for name in source], list(source.values()))

    def state_dict(self) -> dict[str, Any]:
        """The state: plain tensors and numbers, which ``torch.load(weights_only=True)`` accepts.

        The tensors are the averages themselves, as in ``nn.Module.state_dict``: clone them to keep them.
        """
        self._follow()
        state = {"decay": self.decay, "warmup": self.warmup, "updates": self.updates}
        return {**state, "averages": dict(self._averages), "buffers": dict(self._copies)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state of :meth:`state_dict`, for a model with the same parameters.

        Raises:
            InputError: If names or shapes differ; nothing is loaded then.
        """
        _refuse_state(state)
        self._follow()
        target, source = {**self._averages, **self._copies}, {**state["averages"], **state["buffers"]}
        _compare("the state", source, target)
        for name, tensor in target.items():
            tensor.copy_(source[name])
        self.decay, self.warmup, self.updates = state["decay"], state["warmup"], state["updates"]

    def _refuse_applied(self, why: str) -> None:
        if self._applied:
            raise EBFlowError(f"{why}; leave the block first")

    def _follow(self) -> tuple[list[Tensor], list[Tensor]]:
        """The model's parameters and buffers, after moving their averages and copies to its device and dtype.

        The model may have been moved, cast, or extended by a layer; new parameters start at their current value.
        """
        parameters, buffers = _tensors(self.model)
        with torch.inference_mode(False), torch.no_grad():
            # At least single precision, so that an update by 0.001 of a difference is not rounded away.
            wide = {name: torch.promote_types(p.dtype, torch.float32) for name, p in parameters.items()}
            self._averages = {name: _moved(self._averages.get(name), p, wide[name]) for name, p in parameters.items()}
            self._copies = {name: _moved(self._copies.get(name), b, b.dtype) for name, b in buffers.items()}
        return list(parameters.values()), list(buffers.values())


def _tensors(model: EBFlow) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The floating-point parameters, which are averaged, and all other tensors, which are copied."""
    averaged: dict[str, Tensor] = {}
    copied: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():  # in one pass, which dominates an update of many small tensors
        (averaged if parameter.is_floating_point() or parameter.is_complex() else copied)[name] = parameter
    return averaged, {**copied, **dict(model.named_buffers())}


def _moved(tensor: Tensor | None, current: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor is None or tensor.shape != current.shape:
        return current.detach().clone().to(dtype)
    return tensor.to(current.device, dtype)


def _write(model: EBFlow, targets: list[Tensor], sources: list[Tensor]) -> None:
    """Writes in place, which raises version counters, and empties the flow's caches of the old values."""
    with torch.inference_mode(False), torch.no_grad():
        if targets:
            torch._foreach_copy_(targets, sources)
    model.adapter.release(model.flow)


def _is_decay(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0.0 <= float(value) < 1.0


def _refuse_state(state: Any) -> None:
    names = ("decay", "warmup", "updates", "averages", "buffers")
    missing = sorted(name for name in names if not isinstance(state, Mapping) or name not in state)
    if missing:
        raise InputError(f"this is no state of an EMA: it lacks {', '.join(missing)}")
    fits = {
        "decay": _is_decay(state["decay"]),
        "warmup": isinstance(state["warmup"], bool),
        "updates": isinstance(state["updates"], int) and state["updates"] >= 0,
    }
    for name in ("averages", "buffers"):
        held = state[name]
        fits[name] = isinstance(held, Mapping) and all(isinstance(tensor, Tensor) for tensor in held.values())
    wrong = [f"{name}={state[name]!r}"[:60] for name in names if not fits[name]]
    if wrong:
        raise InputError(f"this is no state of an EMA: it has {', '.join(wrong)}")


def _compare(what: str, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    odd = [f"{name}: lacking" for name in wanted if name not in found]
    odd += [f"{name}: not in the average" for name in found if name not in wanted]
    for name, tensor in wanted.items():
        if name in found and found[name].shape != tensor.shape:
            odd.append(f"{name}: shape {tuple(found[name].shape)}, not {tuple(tensor.shape)}")
    if odd:
        raise InputError(f"{what} does not have the parameters of this average\n  " + "\n  ".join(odd))
