"""Files of a training run: written completely or not at all, and read without running any code that is in them."""

from __future__ import annotations

import errno
import os
import pickle
import secrets
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ebflow_plugin.errors import InputError, ResumeWarning, WriteError, warn
from ebflow_plugin.model import EBFlow
from ebflow_plugin.options import path_of

BEST = "best.ckpt"  # what Lightning's run leaves in its folder: the best weights, and checkpoints by step
STEPS = "step-*.ckpt"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def atomic_write(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Writes a file completely or not at all.

    The bytes are written to a temporary file in the same folder, synced to the disk, and renamed. The permissions
    follow the umask, as for any new file.

    Raises:
        WriteError: If the disk is full, or the folder cannot be written to; an existing file is not changed.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     atomic_write(Path(folder) / "a.txt", lambda file: file.write(b"complete"))
        ...     [(file.name, file.read_text()) for file in Path(folder).iterdir()]
        [('a.txt', 'complete')]
    """
    temporary, handled = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp"), sys.exception()
    try:
        with temporary.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):  # the folder may be gone
            temporary.unlink(missing_ok=True)
        reason: BaseException | None = error
        while reason is not None and reason is not handled and not isinstance(reason, OSError):
            reason = reason.__cause__ or reason.__context__  # torch.save raises its own error if the disk is full
        if isinstance(reason, OSError) and reason is not handled and isinstance(error, Exception):
            raise not_written(path, reason) from reason
        raise
    if hasattr(os, "O_DIRECTORY"):  # syncing the folder makes the rename durable
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def not_written(path: Path, reason: OSError) -> WriteError:
    """The error for a file that cannot be written."""
    hint = " Make room, and resume from the last checkpoint." if reason.errno in FULL else ""
    return WriteError(f"{path} cannot be written: {reason.strerror or reason}.{hint}")


def read(path: Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Reads a checkpoint of a run of ours, verified by the checksums of its zip archive.

    Raises:
        InputError: If it is torn, damaged, of something else, or holds more than tensors, numbers, strings, lists and
            dictionaries; no code in it is run.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        content = None if damaged else torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError:
        raise InputError(
            f"{path} cannot be read: it holds more than tensors, numbers, strings, lists and dictionaries, and could "
            "run code"
        ) from None
    except zipfile.BadZipFile as error:
        raise InputError(f"{path} is truncated, or no checkpoint ({error})") from None
    except Exception as error:
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        raise InputError(f"{path} cannot be read ({reason})") from None
    if damaged is not None:
        raise InputError(f"{path} is damaged ({damaged} has a wrong checksum)")
    if not isinstance(content, dict) or "ebflow_plugin" not in content or "state_dict" not in content:
        raise InputError(f"{path} is no checkpoint of ebflow_plugin")
    return content


def read_first(paths: Iterable[Path], map_location: Any = "cpu") -> dict[str, Any]:
    """Reads the first checkpoint that can be read, and warns about each one before it.

    Raises:
        InputError: If none can be read.
    """
    reasons: list[str] = []
    for path in paths:
        try:
            content = read(path, map_location)
        except InputError as error:
            reasons.append(str(error))
            continue
        for reason in reasons:
            warn(f"{reason}; going on from {path.name}", ResumeWarning)
        return content
    raise InputError("no checkpoint can be read: " + "; ".join(reasons))


def latest(folder: Path) -> list[Path]:
    """The checkpoints of a run, the latest first."""
    return sorted(folder.glob(STEPS), reverse=True)


def weights_of(content: Mapping[str, Any], key: str = "state_dict") -> dict[str, Tensor]:
    """The weights of the model in a checkpoint: the average, if there is one, unless the key says otherwise."""
    prefix = content["ebflow_plugin"]["prefix"]
    return {name.removeprefix(prefix): tensor for name, tensor in content[key].items() if name.startswith(prefix)}


def write_weights(model: EBFlow, weights: Mapping[str, Tensor], what: str) -> None:
    """Loads a state dict in place, and empties the flow's caches of the old values."""
    try:
        model.load_state_dict(dict(weights))
    except RuntimeError as error:
        raise InputError(f"{what} belong to another model: {error}") from error
    model.adapter.release(model.flow)


def load_best(model: EBFlow, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Loads the weights with the best validation NLL of a run of ``ebflow_plugin.lightning`` into a model.

    Needs torch alone. The weights are those that had this NLL: averaged and calibrated, if the run did so.

    Arguments:
        model: A model like the one that was trained.
        folder: The folder of the run.

    Returns:
        The ``step`` of the weights, and their ``nll``.

    Raises:
        InputError: If there are no best weights, or they belong to another model.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> load_best(model, "runs/nowhere")
        Traceback (most recent call last):
        ebflow_plugin.errors.InputError: runs/nowhere holds no best weights: there is no best.ckpt
    """
    path = path_of("folder", folder) / BEST
    if not path.is_file():
        raise InputError(f"{folder} holds no best weights: there is no {BEST}")
    content = read(path)
    write_weights(model, weights_of(content), f"the weights in {path}")
    return {"step": content["global_step"], "nll": content["ebflow_plugin"]["nll"]}
