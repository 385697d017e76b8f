"""What ``inspect`` and ``profile`` are pointed at: a model of the user's, or a built-in one.

``package.module:name`` and ``file.py:name`` name an object, or a function that makes one and takes no arguments; the
present folder is on the import path. Any other text is the name of a built-in model.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import ebflow_plugin as ebf
from ebflow_examples.architectures import MODELS
from ebflow_examples.data import DataSet, load
from ebflow_examples.models import flow_for, preprocessing
from ebflow_plugin.errors import InputError, UnknownNameError, suggest
from ebflow_plugin.report import FlowReport

PAPER_SHAPE = (1, 28, 28)  # MNIST's, for a built-in model when nothing else is said


@dataclass(frozen=True)
class Target:
    """A flow, with what stands in front of it.

    Attributes:
        name: What the user called it.
        flow: The library's own object.
        preprocess: Steps to put in front of it.
        rows: Data for it, if a data set was named.
        shape: The shape of one data point, if it is known.
        context: The shape of the context of one data point; None without one.
    """

    name: str
    flow: Any
    preprocess: Sequence[nn.Module] = ()
    rows: Tensor | None = None
    shape: tuple[int, ...] | None = None
    context: tuple[int, ...] | None = None

    def wrap(self) -> ebf.EBFlow:
        """The flow as an energy; an EBFlow stays what it is."""
        if isinstance(self.flow, ebf.EBFlow):
            return self.flow
        return ebf.wrap(self.flow, preprocess=list(self.preprocess))

    def report(self) -> FlowReport:
        """The table of steps. Steps that an energy cannot have are in it, without an error."""
        report = ebf.describe(self.flow)
        return self.wrap().report if self.preprocess and not report.count("refused") else report


def find_target(
    text: str,
    *,
    data: str | None = None,
    shape: tuple[int, ...] | None = None,
    linear: str = "full",
    data_root: str | None = None,
    header: bool | None = None,
    context: tuple[int, ...] | None = None,
) -> Target:
    """Finds a flow by what the user typed.

    Arguments:
        text: ``module:name``, ``file.py:name``, or a built-in name.
        data: A data set for the model; a built-in model takes its shape from it.
        shape: The shape of one data point, instead.
        linear: Of a built-in model.
        data_root: Where data sets are.
        header: Whether the first line of a .csv file holds names; by default as it looks.
        context: The shape of the context of one data point, for a conditional flow; an estimator of sbi tells it.

    Raises:
        InputError: If it cannot be imported or made; in one line.
        UnknownNameError: If there is no such built-in model.
    """
    if data is None and header is not None:
        raise InputError("--[no-]header is of a .csv file that --data names, and there is none; leave it out")
    rows = None if data is None else load(data, root=data_root, header=header)
    if ":" in text:
        found = user_object(text)
        known = getattr(found, "condition_shape", None)  # as sbi's estimators have it
        return Target(
            text,
            found,
            rows=None if rows is None else rows.train,
            shape=shape,
            context=context or (tuple(known) if known else None),
        )
    if text not in MODELS:
        raise UnknownNameError(
            f"unknown model {text!r}. {suggest(text, MODELS)} A model of your own: package.module:function."
        )
    if rows is not None:
        flow, fitting = flow_for(text, rows, linear=linear)
        steps = preprocessing(fitting, standardize=fitting.own_rows)
        return Target(text, flow, steps, fitting.train, fitting.event_shape)
    wanted = shape or PAPER_SHAPE
    blank = torch.zeros(1, *wanted)
    flow, fitting = flow_for(text, DataSet("blank", blank, blank, blank), linear=linear)
    return Target(text, flow, shape=fitting.event_shape)


def user_object(text: str) -> Any:
    """The object that ``module:name`` or ``file.py:name`` names, or what the function of this name returns.

    Raises:
        InputError: If it is not there, or fails.
    """
    where, _, path = text.rpartition(":")
    if not where or not path:
        raise InputError(f"{text!r} is no package.module:name, nor file.py:name")
    module = _import(where)
    try:
        found = reduce(getattr, path.split("."), module)
    except AttributeError:
        names = [name for name in vars(module) if not name.startswith("_")]
        raise InputError(f"{where} has no {path!r}. {suggest(path.split('.')[0], names)}") from None
    if isinstance(found, nn.Module) or not callable(found):
        return found
    try:
        return found()
    except Exception as error:
        raise InputError(
            f"{text}() failed: {_first_line(error)}. It is called without arguments; `ebflow --traceback …` shows more."
        ) from error


def parse_shape(text: str | None, flag: str = "--shape") -> tuple[int, ...] | None:
    """Reads ``784`` or ``1,28,28``.

    Example:
        >>> parse_shape("1,28,28")
        (1, 28, 28)
    """
    if text is None:
        return None
    try:
        shape = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise InputError(f"{flag} is of one data point, such as 784 or 1,28,28; got {text!r}")
    return shape


def _import(where: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        if where.endswith(".py"):
            if not Path(where).is_file():
                raise InputError(f"there is no file {where} in {here}")
            specification = importlib.util.spec_from_file_location(Path(where).stem, where)
            assert specification is not None
            assert specification.loader is not None
            module = importlib.util.module_from_spec(specification)
            sys.modules.setdefault(module.__name__, module)
            specification.loader.exec_module(module)
            return module
        return importlib.import_module(where)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{where} cannot be imported: {_first_line(error)}. Run from the folder that holds it, or install it."
        ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}".rstrip(": ")
