"""A user's own numbers: .npy, .npz and .csv files."""

from __future__ import annotations

import csv
import math
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ebflow_plugin.errors import InputError

__all__ = ["SUFFIXES", "read"]

SUFFIXES = (".npy", ".npz", ".csv")
PARTS = ("train", "validation", "test")


def read(path: Path) -> list[Tensor]:
    """Reads a file: one tensor, or three if an .npz file has the arrays train, validation and test.

    Rows of numbers have shape (N, D) and become float32. Whole numbers of 8 bits are grey levels, and stay uint8: of
    vectors with shape (N, D), or of images with shape (N, H, W), (N, C, H, W) or (N, H, W, C), given as (N, C, H, W).
    """
    if path.suffix == ".csv":
        return [_checked(_csv(path), path)]
    try:
        loaded = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} cannot be read as a NumPy file: {error}") from error
    if isinstance(loaded, np.ndarray):
        return [_checked(loaded, path)]
    with loaded as archive:
        names = list(archive)
        if all(part in names for part in PARTS):
            tensors = [_checked(_member(archive, part, path), path, part) for part in PARTS]
            if len({(tensor.shape[1:], tensor.dtype) for tensor in tensors}) > 1:
                raise InputError(f"{path}: train, validation and test differ in their shapes or types of number")
            return tensors
        if len(names) == 1:
            return [_checked(_member(archive, names[0], path), path)]
    raise InputError(
        f"{path} has the arrays {', '.join(names) or 'none'}; it should have one, or train, validation and test"
    )


def _member(archive: Any, name: str, path: Path) -> Any:
    """One array of an .npz file, which is read only when it is asked for."""
    try:
        return archive[name]
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"{path} ({name}) cannot be read: {error}; save it as float32, or uint8 for images") from None


def _checked(array: Any, path: Path, part: str = "") -> Tensor:
    """Turns an array into a tensor, or says what is wrong with it."""
    where = f"{path} ({part})" if part else str(path)
    if array.dtype.kind not in "fiu":
        raise InputError(f"{where} holds {array.dtype}, not numbers; save it as float32, or uint8 for images")
    if array.size == 0:
        raise InputError(f"{where} is empty")
    if array.dtype == np.uint8 and array.ndim in (3, 4):
        images = torch.from_numpy(np.ascontiguousarray(array))
        if images.dim() == 3:
            return images[:, None]
        if images.shape[1] in (1, 3):
            return images
        if images.shape[3] in (1, 3):
            return images.permute(0, 3, 1, 2).contiguous()
        raise InputError(
            f"{where} has shape {array.shape}; images have 1 or 3 channels, after the first number or last"
        )
    if array.ndim != 2:
        raise InputError(
            f"{where} has shape {array.shape} and type {array.dtype}; wanted are rows of numbers, shape (N, D), or "
            "images as uint8, shape (N, C, H, W)"
        )
    if array.dtype == np.uint8:
        return torch.from_numpy(array.copy())
    rows = torch.from_numpy(array.astype(np.float32))
    bad = ~rows.isfinite()
    if bad.any():
        row, column = bad.nonzero()[0].tolist()
        raise InputError(
            f"{where} has {int(bad.sum())} values that are NaN or infinite, the first in row {row}, column {column} "
            "(counted from 0); drop or fill in these rows"
        )
    return rows


def _csv(path: Path) -> Any:
    """Reads numbers separated by commas, semicolons or tabs, with or without one line of names above them."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no text: {error}") from error
    delimiter = max(",;\t", key=lines[0].count) if lines else ","
    rows = [row for row in csv.reader(lines, delimiter=delimiter) if row]
    if not rows:
        raise InputError(f"{path} is empty")
    first = [_number(cell) for cell in rows[0]]
    if None in first and all(value is None or math.isnan(value) for value in first):
        names = rows.pop(0)  # names, of which that of an index may be empty
    else:
        names = [str(place) for place in range(len(first))]
    table = np.empty((len(rows), len(names)))
    for line, row in enumerate(rows):
        if len(row) != len(names):
            raise InputError(f"{path}: data row {line} has {len(row)} cells, but there are {len(names)} columns")
        for column, cell in enumerate(row):
            value = _number(cell)
            if value is None:
                raise InputError(
                    f"{path}: column {names[column]!r} has {cell!r} in data row {line} (counted from 0), which is no "
                    "number; drop the column, or encode it as numbers"
                )
            table[line, column] = value
    return table


def _number(cell: str) -> float | None:
    """The number that a cell holds, NaN if it is empty, None if it holds something else."""
    try:
        return float(cell) if cell.strip() else float("nan")
    except ValueError:
        return None
