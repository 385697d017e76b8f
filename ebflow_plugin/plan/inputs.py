"""Checks of inputs and options, which raise clear errors before torch sees them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ebflow_plugin.errors import ContextError, InputError, suggest
from ebflow_plugin.linalg.random import as_integer, at_least
from ebflow_plugin.plan.step import Shape

__all__ = [
    "Batch",
    "batch_of",
    "check_context",
    "check_input",
    "check_shape",
    "check_tensor",
    "flag",
    "integer",
    "is_number",
    "one_of",
    "path_of",
    "positive",
    "refuse_non_finite",
    "refuse_other_models",
    "to_device",
    "usable",
]


Batch = tuple[Tensor, Tensor | None, Tensor | None]  # x, its context, and the weights of its rows


def check_input(
    x: Tensor, context: Tensor | None, event_shape: Shape | None, anchor: Tensor | None, integers: bool = False
) -> Tensor:
    """Checks dtypes, devices and shapes, without synchronising with the device. Returns x to use.

    Arguments:
        x: Data.
        context: Its context.
        event_shape: The shape that one data point must have, if known.
        anchor: A parameter whose device and dtype x must have.
        integers: Whether integers are allowed; they are cast to the dtype of the anchor.

    Example:
        >>> check_input(torch.zeros(5, 3), None, (4,), None)
        Traceback (most recent call last):
        ebflow_plugin.errors.InputError: x must have shape (B, 4), got (5, 3)
    """
    check_tensor("x", x)
    if not x.is_floating_point():
        if not integers or x.is_complex():
            raise InputError(
                f"x must be floating point, got {x.dtype}; wrap the flow with preprocess=[Dequantize(levels), …] "
                "for integer data, or cast it"
            )
        x = x.to(torch.get_default_dtype() if anchor is None else anchor.dtype)
    shape = tuple(x.shape)
    if x.dim() < 2 or (event_shape is not None and shape[1:] != event_shape):
        wanted = "(B, *)" if event_shape is None else f"(B, {', '.join(map(str, event_shape))})"
        hint = "; add the batch dimension with x.unsqueeze(0)" if shape == event_shape or x.dim() == 1 else ""
        raise InputError(f"x must have shape {wanted}, got {shape}{hint}")
    if anchor is not None:
        if x.device != anchor.device:
            raise InputError(f"x is on {x.device}, the flow is on {anchor.device}; move one with .to()")
        _same_dtype("x", x, anchor)
    if context is not None:
        check_context(context, anchor, x.shape[0], x.device)
    return usable(x)


def usable(tensor: Tensor) -> Tensor:
    """The tensor itself; outside of inference mode, a copy of an inference tensor, which cannot be part of a graph.

    Example:
        >>> with torch.inference_mode():
        ...     x = torch.zeros(2)
        >>> x.is_inference(), usable(x).is_inference()
        (True, False)
    """
    return tensor.clone() if tensor.is_inference() and not torch.is_inference_mode_enabled() else tensor


def check_context(context: Tensor, anchor: Tensor | None, rows: int | None, device: torch.device) -> None:
    """Raises if a context has a wrong type, shape or device, or, if it is floating point, a wrong dtype.

    Arguments:
        context: The context.
        anchor: A tensor with the flow's dtype, if it has one.
        rows: The number of rows that it must have, that of x; None for any number.
        device: The device that it must be on.

    Example:
        >>> check_context([1.0], None, None, torch.device("cpu"))
        Traceback (most recent call last):
        ebflow_plugin.errors.ContextError: context must be a tensor, got list
    """
    if not isinstance(context, Tensor):
        raise ContextError(f"context must be a tensor, got {type(context).__name__}")
    if context.dim() == 0 or rows not in (None, context.shape[0]):
        wanted = "rows, one for each set of samples" if rows is None else f"{rows} rows, as x has"
        raise ContextError(f"context must have {wanted}, got shape {tuple(context.shape)}")
    if context.device != device:
        other = "the flow" if rows is None else "x"
        raise ContextError(f"context is on {context.device}, {other} is on {device}; move one with .to()")
    if anchor is not None and context.is_floating_point():
        _same_dtype("context", context, anchor)


def _same_dtype(name: str, tensor: Tensor, anchor: Tensor) -> None:
    if tensor.dtype != anchor.dtype and not torch.is_autocast_enabled(tensor.device.type):
        kind = ContextError if name == "context" else InputError
        raise kind(f"{name} is {tensor.dtype}, the flow is {anchor.dtype}; cast one with .to()")


def refuse_non_finite(name: str, tensor: Tensor) -> None:
    """Raises if a tensor holds NaN or inf; the message says how many, and where the first one is.

    Example:
        >>> refuse_non_finite("x", torch.tensor([[0.0, float("nan")]]))
        Traceback (most recent call last):
        ebflow_plugin.errors.InputError: x holds 1 NaN or inf in 1 of 1 rows, the first at [0, 1]
    """
    bad = ~torch.isfinite(tensor)
    count = int(bad.sum())
    if count:
        rows = int(bad.flatten(1).any(1).sum()) if bad.dim() > 1 else count
        first = bad.nonzero()[0].tolist()
        raise InputError(f"{name} holds {count} NaN or inf in {rows} of {tensor.shape[0]} rows, the first at {first}")


def batch_of(item: Any, name: str = "a batch") -> Batch:
    """Splits a batch into x, its context and the weights of its rows; both may be None.

    Example:
        >>> batch_of([torch.zeros(1, 3), None, torch.ones(1)])
        (tensor([[0., 0., 0.]]), None, tensor([1.]))
    """
    if isinstance(item, Tensor):
        return item, None, None
    if isinstance(item, (tuple, list)) and 1 <= len(item) <= 3 and isinstance(item[0], Tensor):
        x, context, weights = (*item, None, None)[:3]
        if all(part is None or isinstance(part, Tensor) for part in (context, weights)):
            return x, context, weights
    kind = f"{type(item).__name__} of {len(item)}" if isinstance(item, (tuple, list, dict)) else type(item).__name__
    raise InputError(
        f"{name} must be a tensor x, (x, context) or (x, context, weights), got a {kind}; choose with a collate_fn: "
        "DataLoader(…, collate_fn=lambda rows: torch.stack([row[0] for row in rows]))"
    )


def refuse_other_models(name: str, model: object) -> None:
    """Raises if a model is not a wrapped flow.

    Example:
        >>> refuse_other_models("langevin", torch.nn.Tanh())
        Traceback (most recent call last):
        ebflow_plugin.errors.InputError: langevin needs an EBFlow, got Tanh; wrap it first: ebflow_plugin.wrap(flow)
    """
    if not getattr(type(model), "is_ebflow", False):
        raise InputError(f"{name} needs an EBFlow, got {type(model).__name__}; wrap it first: ebflow_plugin.wrap(flow)")


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Moves a batch to the device of a model, as everything that iterates data does: loaders hold it on the CPU.

    What is no tensor, or one without storage, is left for the checks to refuse.

    Example:
        >>> x, context, weights = to_device((torch.zeros(2, 3), None, torch.ones(2)), torch.device("meta"))
        >>> x.device, context, weights.device
        (device(type='meta'), None, device(type='meta'))
    """
    ahead = device.type != "cpu"  # the host would read a copy that has not arrived

    def moved(part: Any) -> Any:
        return part.to(device, non_blocking=ahead) if isinstance(part, Tensor) and not part.is_meta else part

    x, context, weights = batch
    return moved(x), moved(context), moved(weights)


def positive(name: str, value: object) -> float:
    """Returns a positive number as a float, or raises an error that names the option.

    Example:
        >>> positive("eps", -1)
        Traceback (most recent call last):
        ebflow_plugin.errors.InputError: eps must be a positive number, got -1
    """
    if not is_number(value) or value <= 0:  # type: ignore[operator]
        raise InputError(f"{name} must be a positive number, got {value!r}")
    return float(value)  # type: ignore[arg-type]


def check_shape(name: str, value: object) -> Shape:
    """Returns an event shape as a tuple of positive integers, or raises an error that names the option.

    Example:
        >>> check_shape("event_shape", 3)
        Traceback (most recent call last):
        ebflow_plugin.errors.InputError: event_shape must be a tuple of integers, such as (3, 32, 32), got 3
    """
    sizes = [as_integer(size) for size in value] if isinstance(value, (tuple, list)) else [None]
    if not all(size is not None and size > 0 for size in sizes):
        raise InputError(f"{name} must be a tuple of integers, such as (3, 32, 32), got {value!r}")
    return tuple(size for size in sizes if size is not None)


def check_tensor(name: str, value: object) -> None:
    """Raises if a value is not a tensor (a numpy array, say).

    Example:
        >>> check_tensor("x", [1.0])
        Traceback (most recent call last):
        ebflow_plugin.errors.InputError: x must be a tensor, got list; torch.as_tensor makes one
    """
    if not isinstance(value, Tensor):
        raise InputError(f"{name} must be a tensor, got {type(value).__name__}; torch.as_tensor makes one")


def integer(name: str, value: object) -> int:
    """Returns an integer of at least 1, or raises an error that names the option.

    Example:
        >>> integer("projections", 0)
        Traceback (most recent call last):
        ebflow_plugin.errors.InputError: projections must be an integer, at least 1, got 0
    """
    return at_least(1, name, value)


def flag(name: str, value: object) -> bool:
    """Returns a bool, or raises an error that names the option: the string "no" is true to Python.

    Example:
        >>> flag("resume", "no")
        Traceback (most recent call last):
        ebflow_plugin.errors.InputError: resume must be True or False, got 'no'
    """
    if isinstance(value, bool):
        return value
    raise InputError(f"{name} must be True or False, got {value!r}")


def path_of(name: str, value: object) -> Path:
    """Returns a path, or raises an error that names the option.

    Example:
        >>> path_of("checkpoint", 3)
        Traceback (most recent call last):
        ebflow_plugin.errors.InputError: checkpoint must be a path, got 3
    """
    if isinstance(value, (str, os.PathLike)) and str(value):
        return Path(value)
    raise InputError(f"{name} must be a path, got {value!r}")


def one_of(name: str, value: object, allowed: Iterable[str]) -> str:
    """Returns one of the allowed strings, or raises an error that lists them.

    Example:
        >>> one_of("reduction", "sum", ("mean", "none"))
        Traceback (most recent call last):
        ebflow_plugin.errors.InputError: unknown reduction 'sum'. Valid names: mean, none.
    """
    if not isinstance(value, str) or value not in tuple(allowed):
        raise InputError(f"unknown {name} {value!r}. {suggest(str(value), allowed)}")
    return value


def is_number(value: object) -> bool:
    """Whether a value is a finite real number (and not a bool)."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
