"""The errors and warnings of this library, and helpers for their messages.

A message says what is wrong, where (the dotted path in the user's model), and what to do about it.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable
from typing import Any, NoReturn

import torch

_INSIDE = ("ebflow_plugin", "ebflow_nflows", "ebflow_normflows", "ebflow_zuko", "torch", "contextlib")


class EBFlowError(Exception):
    """The base class of all errors that this library raises deliberately."""


class NotAFlowError(EBFlowError, TypeError):
    """The object passed to :func:`~ebflow_plugin.wrap` is no flow, and does not hold exactly one."""


class AdapterError(EBFlowError, ImportError):
    """No adapter is installed, or an adapter's library is missing."""


class UnsupportedStepError(EBFlowError, ValueError):
    """Steps of the flow cannot be part of an energy; the message lists all of them."""


class InputError(EBFlowError, ValueError):
    """A tensor or an option has a shape, type, device or value that the model cannot take."""


class ContextError(InputError):
    """A context is missing, or the model cannot take it."""


class SingularError(EBFlowError, ArithmeticError):
    """A linear layer is singular, or not finite, and has no log-determinant and no inverse."""


class NoInverseError(EBFlowError, NotImplementedError):
    """A step has no inverse, so the model cannot be sampled."""


class UnknownNameError(EBFlowError, LookupError):
    """A name is not registered."""


class TrainingError(EBFlowError, RuntimeError):
    """Training cannot continue: the loss or a gradient is not finite."""


class VerificationError(EBFlowError, AssertionError):
    """A check of :func:`~ebflow_plugin.verify` failed."""


class WriteError(EBFlowError, OSError):
    """A file cannot be written: the disk is full, or the folder is not writable."""


class EBFlowWarning(UserWarning):
    """The base class of all warnings of this library.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", EBFlowWarning)  # every warning of this library is an error
        ...     warnings.simplefilter("ignore", UnknownStepWarning)  # but for one kind
    """


class AdapterWarning(EBFlowWarning):
    """An installed adapter cannot be loaded, and is skipped."""


class UnknownStepWarning(EBFlowWarning):
    """Steps of the flow have an unknown class; they keep their own log-det."""


class BiasWarning(EBFlowWarning):
    """Steps of the flow bias an objective, or may do so: their score or density jumps, or is unknown."""


class UnseenParameterWarning(EBFlowWarning):
    """Trainable parameters will not be trained: the objective does not depend on them, or the model lacks them."""


class ConditioningWarning(EBFlowWarning):
    """A linear layer is close to singular, or a solve with it did not converge."""


class CoverageWarning(EBFlowWarning):
    """The samples of a model do not lie where the data lie: see :func:`~ebflow_plugin.coverage`."""


class ResumeWarning(EBFlowWarning):
    """A run does not resume exactly: from an older checkpoint, with other settings, or without its best weights."""


class EstimateWarning(EBFlowWarning):
    """An estimate is unreliable, and its standard error cannot be trusted."""


def raise_from_step(error: Exception, part: Any, value: Any, context: Any) -> NoReturn:
    """Raises an error from a step or a base again, with a note that says where it happened. Its type does not change.

    The exception is a missing context, which torch reports as a mismatch of shapes: it raises a ContextError.
    """
    if context is None and _may_come_from_a_missing_context(error) and part.conditional:
        raise ContextError(
            f"{part.where} is conditional, and failed without a context ({type(error).__name__}: {error}). "
            "Pass context=."
        ) from error
    refuse_inference_tensors(error, part.module, part.path)
    if not isinstance(error, EBFlowError) or part.path not in str(error):
        shape = [tuple(one.shape) for one in value] if isinstance(value, tuple) else tuple(value.shape)
        given = "without a context" if context is None else f"with a context of shape {tuple(context.shape)}"
        error.add_note(f"in step {part.where}, on an input of shape {shape}, {given}")
    raise error


def refuse_inference_tensors(error: Exception, module: object, path: str) -> None:
    """Raises if an error of torch comes from tensors of a module that autograd cannot use.

    Example:
        >>> with torch.inference_mode():
        ...     layer = torch.nn.Linear(2, 2)
        >>> refuse_inference_tensors(RuntimeError(), layer, "flow.3")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ebflow_plugin.errors.InputError: flow.3.weight was made under torch.inference_mode(), and has no derivatives...
    """
    if not isinstance(error, RuntimeError) or isinstance(error, EBFlowError):
        return
    named = (*module.named_parameters(), *module.named_buffers()) if isinstance(module, torch.nn.Module) else ()
    found = [f"{path}.{name}" for name, tensor in named if tensor.is_inference()]
    if not found and "Inference tensors cannot be saved" in str(error):  # a plain tensor, or that of another module
        found = [f"a tensor of {path}"]
    if found:
        raise InputError(
            f"{found[0]} was made under torch.inference_mode(), and has no derivatives. Make or load the flow "
            "outside of it, or wrap a copy that is made outside: copy.deepcopy(flow)."
        ) from error


def _may_come_from_a_missing_context(error: Exception) -> bool:
    kinds = (TypeError, ValueError, AttributeError, RuntimeError)
    return isinstance(error, kinds) and not isinstance(error, (EBFlowError, torch.OutOfMemoryError))


def no_inverse(what: str, where: str, error: NotImplementedError, dtype: torch.dtype) -> NoReturn:
    """Raises a NoInverseError: a library has no inverse, or torch lacks an operation of it in this precision."""
    message = f"the model cannot be sampled: {what}\n  {where}"
    if torch.finfo(dtype).bits < 32:
        message += f"\nIf torch lacks an operation in {dtype} ({error}), move the model to float32 with .to(dtype)."
    raise NoInverseError(message) from error


def warn(message: str, category: type[EBFlowWarning]) -> None:
    """Warns at the line of the user that led here: the first one outside of this library, its adapters and torch.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn("a layer is nearly singular", ConditioningWarning)
        >>> str(caught[0].message)
        'a layer is nearly singular'
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def suggest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: a similar name, and all valid ones.

    Example:
        >>> suggest("smm", ["dsm", "ssm"])
        "Did you mean 'ssm'? Valid names: dsm, ssm."
    """
    names = sorted(map(str, known))
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return f"{hint}Valid names: {', '.join(names) or 'none'}."
