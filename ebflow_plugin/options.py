"""Checks of options, which raise errors that name the option."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable
from numbers import Real
from pathlib import Path

from torch import Generator, Tensor

from ebflow_plugin.errors import InputError, suggest


def as_integer(value: object) -> int | None:
    """Returns an integer of any type (numpy's, say) as an int; None for anything that cannot be an index.

    Example:
        >>> as_integer(3), as_integer(3.0), as_integer(True)
        (3, None, None)
    """
    if isinstance(value, (bool, Tensor)) or type(value).__name__ in ("bool_", "bool"):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def at_least(low: int, name: str, value: object) -> int:
    """Returns an integer of at least ``low``, or raises an error that names the option.

    Example:
        >>> at_least(2, "chains", 1)
        Traceback (most recent call last):
        ebflow_plugin.errors.InputError: chains must be an integer, at least 2, got 1
    """
    number = as_integer(value)
    if number is None or number < low:
        raise InputError(f"{name} must be an integer, at least {low}, got {value!r}")
    return number


def integer(name: str, value: object) -> int:
    """Returns an integer of at least 1, or raises an error that names the option.

    Example:
        >>> integer("projections", 0)
        Traceback (most recent call last):
        ebflow_plugin.errors.InputError: projections must be an integer, at least 1, got 0
    """
    return at_least(1, name, value)


def is_number(value: object) -> bool:
    """Whether a value is a finite real number (and not a bool)."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


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


def check_shape(name: str, value: object) -> tuple[int, ...]:
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


def check_generator(generator: object) -> None:
    """Raises if a value is neither a generator nor None.

    Example:
        >>> check_generator(0)
        Traceback (most recent call last):
        ebflow_plugin.errors.InputError: generator must be a torch.Generator or None, got 0; seed one with .manual_seed
    """
    if generator is not None and not isinstance(generator, Generator):
        raise InputError(f"generator must be a torch.Generator or None, got {generator!r}; seed one with .manual_seed")
