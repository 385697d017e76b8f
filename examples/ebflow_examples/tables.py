"""A user's own numbers: .npy, .npz and .csv files."""

from __future__ import annotations

import csv
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ebflow_plugin.errors import InputError

SUFFIXES = (".npy", ".npz", ".csv")
PARTS = ("train", "validation", "test")
SHOWN = 8  # cells of a line that is quoted


@dataclass(frozen=True)
class Table:
    """What a .csv file holds.

    Attributes:
        rows: Its numbers, shape (N, D).
        header: Whether its first line was taken for names.
        remark: What it was taken for, in a line.
    """

    rows: Tensor
    header: bool
    remark: str


def read(path: Path) -> list[Tensor]:
    """Reads a file: one tensor, or three if an .npz file has the arrays train, validation and test.

    Rows of numbers have shape (N, D) and become float32. Whole numbers of 8 bits are grey levels, and stay uint8: of
    vectors with shape (N, D), or of images with shape (N, H, W), (N, C, H, W) or (N, H, W, C), given as (N, C, H, W).
    """
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            names, arrays = [""], {"": loaded}
        else:
            with loaded as archive:
                names = list(archive)
                wanted = PARTS if set(PARTS) <= set(names) else names if len(names) == 1 else ()
                arrays = {name: archive[name] for name in wanted}  # of an .npz file no others are read
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(
            f"{path} cannot be read as a NumPy file: {error}; save it as float32, or uint8 for images"
        ) from error
    if not arrays:
        raise InputError(
            f"{path} has the arrays {', '.join(names) or 'none'}; it should have one, or train, validation and test"
        )
    tensors = [_checked(array, path, part if len(arrays) > 1 else "") for part, array in arrays.items()]
    if len({(tensor.shape[1:], tensor.dtype) for tensor in tensors}) > 1:
        raise InputError(f"{path}: train, validation and test differ in their shapes or types of number")
    return tensors


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


def read_csv(path: Path, header: bool | None = None) -> Table:
    """Reads numbers separated by commas, semicolons or tabs, with or without one line of names above them.

    Arguments:
        path: The file.
        header: Whether the first line holds names. By default it does if no cell of it is a number, or if its numbers
            stand in quotes and those below do not.

    Raises:
        InputError: If the file is no good, or its first line may be either.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no text: {error}") from error
    if not lines:
        raise InputError(f"{path} is empty")
    delimiter = max(",;\t", key=lines[0].count)
    rows = list(csv.reader(lines, delimiter=delimiter))
    named = _is_header(lines, rows, path) if header is None else header
    quoted = ", ".join(cell.strip() or "(empty)" for cell in rows[0][:SHOWN]) + ", …" * (len(rows[0]) > SHOWN)
    names = [cell.strip() for cell in rows.pop(0)] if named else [str(place) for place in range(len(rows[0]))]
    if not rows:
        raise InputError(f"{path} has no rows below its header, {quoted}")
    table = np.empty((len(rows), len(names)))
    for line, row in enumerate(rows):
        if len(row) != len(names):
            raise InputError(f"{path}: data row {line} has {len(row)} cells, but there are {len(names)} columns")
        for column, cell in enumerate(row):
            value = _number(cell)
            if value is None:
                hint = ", or take the first line for names, with --header" if line == 0 and not named else ""
                raise InputError(
                    f"{path}: column {names[column]!r} has {cell!r} in data row {line} (counted from 0), which is no "
                    f"number; drop the column, or encode it as numbers{hint}"
                )
            table[line, column] = value
    remark = f"{path.name}: no header, {quoted} is the first row of data (--header if these are names)"
    if named:
        remark = f"{path.name}: the header is {quoted} (--no-header if that is a row of data)"
    if len(table) > 2 and np.array_equal(table[:, 0], table[0, 0] + np.arange(len(table))):
        remark += f"; column {names[0]!r} counts the rows, and is data too: drop it if it is an index"
    return Table(_checked(table, path), named, remark)


def _is_header(lines: list[str], rows: list[list[str]], path: Path) -> bool:
    """Whether the first line holds names: it has no number, or quotes that the numbers below do not have.

    Raises:
        InputError: If it has numbers and other words, so that nobody knows.
    """
    words = [cell for cell in rows[0] if _number(cell) is None]
    numbers = [cell for cell in rows[0] if cell.strip() and _number(cell) is not None]
    blank = len(rows[0]) - len(words) - len(numbers)
    if not numbers:
        return bool(words)
    if lines[0].count('"') == 2 * len(rows[0]) and len(lines) > 1 and '"' not in "".join(lines[1:]):
        return True
    if words or (blank and all(cell.strip() for row in rows[1:] for cell in row)):  # the name of an index is empty
        other = repr(words[0]) if words else "an empty cell"
        raise InputError(
            f"the first line of {path} has numbers ({numbers[0]}) and {other}, and may be a header or data: --header "
            "takes it for names, --no-header for a row"
        )
    return False


def _number(cell: str) -> float | None:
    """The number that a cell holds, NaN if it is empty, None if it holds something else."""
    try:  # 2019_20 is a season, and a number in Python alone
        return None if "_" in cell else float(cell) if cell.strip() else float("nan")
    except ValueError:
        return None
