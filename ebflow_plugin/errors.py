"""The errors and warnings of this library, and how a message is built.

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
    """Every error that this library raises on purpose."""


class NotAFlowError(EBFlowError, TypeError):
    """The object given to :func:`~ebflow_plugin.wrap` is no flow, and does not hold exactly one."""


class AdapterError(EBFlowError, ImportError):
    """No installed adapter knows the library that the object comes from."""


class UnsupportedStepError(EBFlowError, ValueError):
    """Steps of the flow cannot be part of an energy; all of them are listed."""


class InputError(EBFlowError, ValueError):
    """A tensor or an option has a shape, type, device or value that the model cannot take."""


class ContextError(InputError):
    """A context that the model cannot take, or needs and did not get."""


class SingularError(EBFlowError, ArithmeticError):
    """A linear layer is singular, or not finite, so that it has no log-determinant and no inverse."""


class NoInverseError(EBFlowError, NotImplementedError):
    """A step has no inverse, so that the model cannot be sampled through it."""


class UnknownNameError(EBFlowError, LookupError):
    """A name that nobody registered."""


class TrainingError(EBFlowError, RuntimeError):
    """Training cannot go on: the loss or a gradient is not finite."""


class VerificationError(EBFlowError, AssertionError):
    """:func:`~ebflow_plugin.verify` found that the model does not do what it should."""


class WriteError(EBFlowError, OSError):
    """A file cannot be written: the disk is full, or the folder does not allow it."""


class EBFlowWarning(UserWarning):
    """Every warning of this library.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", EBFlowWarning)  # every warning of this library is an error
        ...     warnings.simplefilter("ignore", UnknownStepWarning)  # but for one kind
    """


class AdapterWarning(EBFlowWarning):
    """An installed adapter cannot be loaded, and is left out."""


class UnknownStepWarning(EBFlowWarning):
    """Steps of the flow have a class that nobody knows; they keep their own log-det."""


class BiasWarning(EBFlowWarning):
    """Steps of the flow bias an objective, or may do so: their score or density jumps, or nobody knows."""


class UnseenParameterWarning(EBFlowWarning):
    """Trainable parameters keep their value: an objective does not see them, or they are no part of the model."""


class ConditioningWarning(EBFlowWarning):
    """A linear layer is close to singular, or a solve with it did not converge."""


class ResumeWarning(EBFlowWarning):
    """A run goes on otherwise than it would have: from an older checkpoint, with other settings, without its best."""


class EstimateWarning(EBFlowWarning):
    """An estimate is unreliable, and its standard error means nothing."""


def blame(error: Exception, part: Any, value: Any, context: Any) -> NoReturn:
    """Lets an error from inside a step or a base say where it happened. Its type stays, so that callers can catch it.

    But for one cause that torch tells in matrix sizes: a context was forgotten.
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
    """Raises if torch lacks an operation in a dtype, which is no missing inverse: the same class of error means both.

    Where it was raised tells them apart. A library without an inverse says so by a ``raise``; torch's operations are
    compiled, so that the innermost frame of Python stands at a call.
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
    """Makes the ``__getattr__`` of a module whose names have changed: asking for an old one says the new one.

    The error is no AttributeError, whose text ``from module import name`` drops.

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
    """Builds the end of a message about an unknown name: a near one, and all that are valid.

    Example:
        >>> suggest("smm", ["dsm", "ssm"])
        "Did you mean 'ssm'? Valid names: dsm, ssm."
    """
    names = sorted(map(str, known))
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return f"{hint}Valid names: {', '.join(names) or 'none'}."
