"""The errors and warnings of this library, and helpers for their messages.

A message says what is wrong, where (the dotted path in the user's model), and what to do about it.
"""

from __future__ import annotations

import difflib
import dis
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, NoReturn

import torch

__all__ = [
    "AdapterError",
    "AdapterWarning",
    "BiasWarning",
    "ConditioningWarning",
    "ContextError",
    "EBFlowError",
    "EBFlowWarning",
    "EstimateWarning",
    "InputError",
    "NoInverseError",
    "NotAFlowError",
    "ResumeWarning",
    "SingularError",
    "TrainingError",
    "UnknownNameError",
    "UnknownStepWarning",
    "UnseenParameterWarning",
    "UnsupportedStepError",
    "VerificationError",
    "WriteError",
    "blame",
    "refuse_precision",
    "renamed",
    "suggest",
]


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


class ResumeWarning(EBFlowWarning):
    """A run does not resume exactly: from an older checkpoint, with other settings, or without its best weights."""


class EstimateWarning(EBFlowWarning):
    """An estimate is unreliable, and its standard error cannot be trusted."""


def blame(error: Exception, part: Any, value: Any, context: Any) -> NoReturn:
    """Raises an error from a step or a base again, with a note that says where it happened. Its type does not change.

    The exception is a missing context, which torch reports as a mismatch of shapes: it raises a ContextError.
    """
    if context is None and _may_come_from_a_missing_context(error) and part.conditional:
        raise ContextError(
            f"{part.where} is conditional, and failed without a context ({type(error).__name__}: {error}). "
            "Pass context=."
        ) from error
    if not isinstance(error, EBFlowError) or part.path not in str(error):
        shape = [tuple(one.shape) for one in value] if isinstance(value, tuple) else tuple(value.shape)
        given = "without a context" if context is None else f"with a context of shape {tuple(context.shape)}"
        error.add_note(f"in step {part.where}, on an input of shape {shape}, {given}")
    raise error


def _may_come_from_a_missing_context(error: Exception) -> bool:
    kinds = (TypeError, ValueError, AttributeError, RuntimeError)
    return isinstance(error, kinds) and not isinstance(error, (EBFlowError, torch.OutOfMemoryError))


def refuse_precision(error: NotImplementedError, where: str) -> None:
    """Raises if a NotImplementedError means that torch lacks an operation in a dtype, and not a missing inverse.

    They differ in where they are raised. A library reports a missing inverse by a ``raise`` statement; torch's
    operations are compiled, so the innermost Python frame is at a call.
    """
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    if innermost is None or _is_at_raise(innermost):
        return
    raise InputError(
        f"torch cannot do this in the flow's precision: {error}\n  {where}\nMove the model to float32 or float64 with "
        ".to(dtype)."
    ) from error


def _is_at_raise(traceback: TracebackType) -> bool:
    return dis.opname[traceback.tb_frame.f_code.co_code[traceback.tb_lasti]] == "RAISE_VARARGS"


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """A ``__getattr__`` for a module whose names have changed: an old name raises an error with the new one.

    The error is no AttributeError, since ``from module import name`` drops the text of those.

    Example:
        >>> renamed("ebflow_plugin", {"objective": "make_objective"})("objective")
        Traceback (most recent call last):
        ebflow_plugin.errors.UnknownNameError: ebflow_plugin.objective is called ebflow_plugin.make_objective now
    """

    def look_up(name: str) -> NoReturn:
        if name in names:
            raise UnknownNameError(f"{module}.{name} is called {module}.{names[name]} now")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return look_up


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
