"""Batches: checks that raise clear errors before torch sees them, and the weights of rows (importance weights, say)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ebflow_plugin.errors import ContextError, InputError
from ebflow_plugin.linalg.memo import free_to_read, is_readable
from ebflow_plugin.plan.step import Shape

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


def check_tensor(name: str, value: object) -> None:
    """Raises if a value is not a tensor (a numpy array, say).

    Example:
        >>> check_tensor("x", [1.0])
        Traceback (most recent call last):
        ebflow_plugin.errors.InputError: x must be a tensor, got list; torch.as_tensor makes one
    """
    if not isinstance(value, Tensor):
        raise InputError(f"{name} must be a tensor, got {type(value).__name__}; torch.as_tensor makes one")


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


def in_memory(data: Any, name: str = "data") -> Batch | None:
    """Data that are a tensor, or a tuple of a tensor, its context and its weights, as these three; None for others.

    Example:
        >>> in_memory((torch.zeros(1, 3), torch.ones(1)))
        (tensor([[0., 0., 0.]]), tensor([1.]), None)
        >>> in_memory([torch.zeros(1, 3)]) is None
        True
    """
    parts = data if isinstance(data, tuple) else (data,)
    if not (1 <= len(parts) <= 3 and isinstance(parts[0], Tensor)):  # a longer tuple is one of batches
        return None
    if not all(part is None or isinstance(part, Tensor) for part in parts):
        return None
    x, *others = whole = batch_of(data, name)
    for what, part in zip(("context", "weights"), others, strict=True):
        if part is not None and (part.dim() == 0 or len(part) != len(x)):
            raise InputError(f"{name} and its {what} have {len(x)} and {len(part) if part.dim() else 0} rows")
    return whole


def counted(batch: Batch) -> Batch:
    """A batch without its rows of weight zero."""
    x, context, weights = batch
    if weights is None:
        return batch
    refuse_weights(weights, x, read=True)
    kept = weights > 0
    return x[kept], None if context is None else context[kept], weights[kept]


def refuse_other_models(name: str, model: object) -> None:
    """Raises if a model is not a wrapped flow.

    Example:
        >>> refuse_other_models("langevin", torch.nn.Tanh())
        Traceback (most recent call last):
        ebflow_plugin.errors.InputError: langevin needs an EBFlow, got torch.nn...Tanh; wrap it first: ...
    """
    if not getattr(type(model), "is_ebflow", False):
        kind = f"{type(model).__module__}.{type(model).__qualname__}"
        raise InputError(f"{name} needs an EBFlow, got {kind}; wrap it first: ebflow_plugin.wrap(flow)")


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


def check_weights(weights: Tensor, x: Tensor) -> Tensor:
    """Returns the weights of the rows of x, over the largest of them, so that equal weights become exact ones.

    Values are checked on the CPU alone: elsewhere, where a check would synchronise with the device, weights that are
    negative, NaN, inf or all zero return NaN, and so does the loss.

    Example:
        >>> check_weights(torch.tensor([0.0, 0.3, 0.3]), torch.zeros(3, 2))
        tensor([0., 1., 1.])
        >>> check_weights(torch.tensor([0.5, -0.5]), torch.zeros(2, 2))
        Traceback (most recent call last):
        ebflow_plugin.errors.InputError: weights must be at least 0, finite, and not all 0, got 1 of 2 that are not
    """
    refuse_weights(weights, x)
    if weights.device != x.device:
        raise InputError(f"weights are on {weights.device}, x is on {x.device}; move one with .to()")
    if len(weights) == 0:
        return weights.detach()
    weights = weights.detach().to(x.dtype if x.is_floating_point() else torch.get_default_dtype())
    if free_to_read(weights) and not bool(weights.any()):
        raise InputError(f"weights must be at least 0, finite, and not all 0, got {len(weights)} zeros")
    scaled = weights / weights.amax()
    return torch.where((weights >= 0).all(), scaled, torch.full_like(scaled, torch.nan))


def refuse_weights(weights: Tensor, x: Tensor, read: bool = False) -> None:
    """Raises if weights have a wrong shape, or are negative, NaN or inf. They may all be zero.

    Arguments:
        weights: The weights.
        x: The rows.
        read: Reads the values on any device, not on the CPU alone.

    Example:
        >>> refuse_weights(torch.ones(2, 1), torch.zeros(2, 3))
        Traceback (most recent call last):
        ebflow_plugin.errors.InputError: weights must be a real tensor of shape (2,), one for each row of x, got (2, 1)
    """
    if not isinstance(weights, Tensor) or weights.shape != x.shape[:1] or weights.is_complex():
        got = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise InputError(f"weights must be a real tensor of shape ({len(x)},), one for each row of x, got {got}")
    if not (is_readable if read else free_to_read)(weights):
        return
    bad = int((~(torch.isfinite(weights) & (weights >= 0))).sum())
    if bad:
        raise InputError(f"weights must be at least 0, finite, and not all 0, got {bad} of {len(weights)} that are not")


def counted_rows(weights: Tensor) -> Tensor:
    """Indices that replace the rows of weight zero by the heaviest one, so that nothing of them enters a graph.

    A zero times a gradient that is NaN would be NaN.

    Example:
        >>> counted_rows(torch.tensor([0.5, 0.0, 1.0, 0.2]))
        tensor([0, 2, 2, 3])
    """
    return torch.where(weights == 0, weights.argmax(), torch.arange(len(weights), device=weights.device))


def resampled_rows(weights: Tensor) -> Tensor:
    """Indices that repeat each row as often as its weight asks, for a start that cannot weight its rows.

    Example:
        >>> resampled_rows(torch.tensor([0.0, 1.0, 1.0, 2.0]))
        tensor([1, 2, 3, 3])
    """
    edges = weights.double().cumsum(0)
    places = (torch.arange(len(weights), device=weights.device, dtype=edges.dtype) + 0.5) * (edges[-1] / len(weights))
    return torch.searchsorted(edges, places).clamp_max(len(weights) - 1)
