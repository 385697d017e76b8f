"""Checkpoints of a training run: written atomically, the last two kept, read with a fallback to the older one.

A checkpoint is one file, ``step-00001000.pt``, that ``torch.load(weights_only=True)`` reads. The weights with the best
validation NLL are in ``best.safetensors`` (``best.pt`` without the safetensors package). All of these files contain a
checksum, which is verified.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import secrets
import sys
import warnings
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ebflow_plugin.errors import InputError, ResumeWarning, WriteError
from ebflow_plugin.model import EBFlow
from ebflow_plugin.plan.inputs import path_of

__all__ = ["CheckpointFolder", "atomic_write", "check_saveable", "compare", "load_best", "not_written", "write_weights"]

FORMAT = "ebflow_plugin.fit"
VERSION = 1
KEPT = 2  # checkpoints
FATAL = ("model", "objective", "optimizer", "scheduler", "ema")  # facts that must agree to resume from a checkpoint
NO_SUM = b"0" * 64  # the placeholder of the checksum while it is computed
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


class CheckpointFolder:
    """The folder of a run, created if it does not exist.

    Raises:
        InputError: If it cannot be created or written to.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as path:
        ...     folder = CheckpointFolder(path)
        ...     for step in (10, 20, 30):
        ...         _ = folder.save({"step": step})
        ...     [file.name for file in folder.files()], folder.load()["step"]
        (['step-00000030.pt', 'step-00000020.pt'], 30)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            atomic_write(self.path / ".writable", lambda file: file.write(b""))
            (self.path / ".writable").unlink(missing_ok=True)
        except OSError as error:
            raise InputError(
                f"the checkpoint folder {self.path} cannot be written to: {error} Choose another one, or make room."
            ) from error

    def files(self) -> list[Path]:
        """The existing checkpoints, the latest first."""
        return sorted(self.path.glob("step-*.pt"), reverse=True)

    def write(self, name: str, content: Mapping[str, Any]) -> Path:
        """Writes one file with ``torch.save``."""
        path = self.path / name
        atomic_write(path, lambda file: torch.save(dict(content), file))
        return path

    def save(self, state: Mapping[str, Any]) -> Path:
        """Writes a checkpoint, then removes all but the last two, and the temporary files of killed processes."""
        path = self.write(f"step-{state['step']:08d}.pt", {"format": FORMAT, "version": VERSION, **state})
        for old in (*self.files()[KEPT:], *self.path.glob(".*.tmp")):
            old.unlink(missing_ok=True)
        return path

    def load(self) -> dict[str, Any] | None:
        """Reads the latest intact checkpoint; None if there is no checkpoint yet.

        Warns about each file that it cannot read, and falls back to the older one.

        Raises:
            InputError: If there are checkpoints and none can be read.
        """
        reasons = []
        for path in self.files():
            try:
                state = _unzip(path)
                if not isinstance(state, dict) or state.get("format") != FORMAT:
                    raise InputError(f"{path} is no checkpoint of ebflow_plugin.fit")
                if state["version"] > VERSION:
                    raise InputError(f"{path} was written by a newer version of ebflow_plugin")
            except InputError as error:
                reasons.append(str(error))
                continue
            for reason in reasons:
                warnings.warn(f"{reason}; going on from {path.name}", ResumeWarning, stacklevel=5)
            return state
        if reasons:
            raise InputError(
                f"no checkpoint in {self.path} can be read\n  " + "\n  ".join(reasons) + "\nRemove the folder, pass "
                "another one, or resume=False to start over."
            )
        return None

    def save_best(self, state: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Path:
        """Writes the best weights, and facts about them (the step, the NLL)."""
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
        if find_spec("safetensors") is None:
            return self.write("best.pt", {"weights": tensors, "facts": dict(facts)})
        from safetensors.torch import save

        path = self.path / "best.safetensors"
        content = save(tensors, metadata={"ebflow_plugin": json.dumps(dict(facts)), "sha256": NO_SUM.decode()})
        content = content.replace(NO_SUM, _sum_of(content), 1)
        atomic_write(path, lambda file: file.write(content))
        return path

    def load_best(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Reads the best weights and the facts about them; None if there are none."""
        tensors, pickled = self.path / "best.safetensors", self.path / "best.pt"
        if tensors.exists():
            return _read_safetensors(tensors)
        if not pickled.exists():
            return None
        content = _unzip(pickled)
        if not isinstance(content, dict) or not {"weights", "facts"} <= set(content):
            raise InputError(f"{pickled} holds no best weights of ebflow_plugin.fit")
        return content["weights"], content["facts"]

    def find_best(self) -> dict[str, Tensor] | str:
        """The best weights, or why they cannot be read: a run can continue without them."""
        try:
            best = self.load_best()
        except InputError as error:
            return str(error)
        return f"{self.path} holds none" if best is None else best[0]

    def clear(self) -> None:
        """Removes the checkpoints and the best weights of an earlier run."""
        for path in (*self.files(), self.path / "best.safetensors", self.path / "best.pt"):
            path.unlink(missing_ok=True)


def _unzip(path: Path) -> Any:
    """Reads a file of torch.save, verified by the checksums of its zip archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is None:
            return torch.load(path, map_location="cpu", weights_only=True)
    except zipfile.BadZipFile as error:
        raise InputError(f"{path} is truncated, or no checkpoint ({error})") from error
    except Exception as error:
        raise InputError(f"{path} cannot be read ({_first_line(error)})") from error
    raise InputError(f"{path} is damaged ({damaged} has a wrong checksum)")


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        from safetensors import safe_open
        from safetensors.torch import load
    except ImportError as error:
        raise InputError(f"{path} needs the safetensors package: pip install safetensors") from error
    try:
        content = path.read_bytes()
        with safe_open(path, framework="pt") as file:
            known = file.metadata() or {}
        weights = load(content)
    except Exception as error:
        raise InputError(f"{path} is truncated, damaged, or no safetensors file ({_first_line(error)})") from error
    written = known.get("sha256", "").encode()
    if len(written) != len(NO_SUM) or _sum_of(content.replace(written, NO_SUM, 1)) != written:
        raise InputError(f"{path} is damaged (wrong checksum), or was not written by this version of ebflow_plugin.fit")
    return weights, json.loads(known.get("ebflow_plugin", "{}"))


def _sum_of(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def check_saveable(**parts: Any) -> None:
    """Raises, before training, if ``torch.load(weights_only=True)`` could not read a state back."""
    for name, part in parts.items():
        buffer = io.BytesIO()
        try:
            torch.save({} if part is None else part.state_dict(), buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except Exception as error:
            raise InputError(
                f"the state of the {name} cannot be saved in a checkpoint: {str(error).splitlines()[0]}. Its "
                "state_dict() must hold only tensors, numbers, strings, lists and dicts."
            ) from error


def load_best(model: EBFlow, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Loads the weights with the best validation NLL of a training run into a model.

    Arguments:
        model: A model like the one that was trained.
        folder: The ``checkpoint`` folder of :func:`~ebflow_plugin.fit`.

    Returns:
        Facts about the weights: ``step`` and ``nll``.

    Raises:
        InputError: If there are no best weights, or they belong to another model.

    Example:
        >>> import ebflow_plugin as ebf
        >>> from ebflow_plugin.training import fit
        >>> from nflows import distributions, flows, transforms
        >>> model = ebf.wrap(flows.Flow(transforms.LULinear(2), distributions.StandardNormal([2])))
        >>> x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = fit(ebf.objectives.ML(model), x, steps=4, validation=x, checkpoint=folder, progress=False)
        ...     load_best(model, folder)["nll"] == result.best_nll
        True
    """
    path = path_of("folder", folder)
    best = CheckpointFolder(path).load_best() if path.is_dir() else None
    if best is None:
        raise InputError(f"{folder} holds no best weights; fit(…, validation=…, checkpoint=folder) writes them")
    write_weights(model, best[0], f"the best weights in {folder}")
    return best[1]


def write_weights(model: EBFlow, weights: Mapping[str, Tensor], what: str) -> None:
    """Loads a state dict in place, and empties the flow's caches of the old values."""
    try:
        model.load_state_dict(dict(weights))
    except RuntimeError as error:
        raise InputError(f"{what} belong to another model: {error}") from error
    model.adapter.release(model.flow)


def compare(path: Path | None, here: Mapping[str, str], there: Mapping[str, str]) -> bool:
    """Compares the facts of a run with those of a checkpoint. Returns whether they are the same.

    Raises:
        InputError: If the model, the objective, … differ. Other differences cause a warning.
    """
    differing = [name for name in here if here[name] != there.get(name)]
    lines = "\n  ".join(f"{name}: {_shorten(there.get(name, 'nothing'), here[name])}" for name in differing)
    if set(differing) & set(FATAL):
        raise InputError(
            f"the checkpoint in {path} is of another run\n  {lines}\nPass another checkpoint folder, or resume=False "
            "to start over in this one."
        )
    if differing:
        message = f"the run in {path} resumes with other settings, and not exactly as it would have\n  {lines}"
        warnings.warn(message, ResumeWarning, stacklevel=6)
    return not differing


def _shorten(there: str, here: str) -> str:
    """Both texts, or, if they are long, the first parts that differ."""
    if len(there) + len(here) <= 160:
        return f"{there} there, {here} here"
    old, new = there.split("; "), here.split("; ")
    gone, added = [part for part in old if part not in new], [part for part in new if part not in old]
    parts = [f"only there {', '.join(gone[:3])}"] * bool(gone) + [f"only here {', '.join(added[:3])}"] * bool(added)
    return "; ".join(parts) or "in another order"
