"""Folders that are written to: found to be writable before the work, and held by one process at a time."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ebflow_plugin.errors import InputError

LOCK = ".lock"


def writable(folder: Path) -> Path:
    """Makes a folder, and sees that files can be written into it, before anything is computed for it.

    Raises:
        InputError: If it cannot be made, or not be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        try:
            probe.write_bytes(b"0")
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"the folder {folder} cannot be written to: {reason}. Choose another --out.") from None
    return folder


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Holds a run folder, so that no other process trains into it. Whatever ends this process lets go of it.

    Raises:
        InputError: If another process holds it.
    """
    with (folder / LOCK).open("a+b") as file:
        try:
            _lock(file.fileno())
        except OSError:
            raise InputError(
                f"another process is training into {folder}: wait for it, stop it, or choose another --out"
            ) from None
        yield  # closing the file lets go


if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> None:
        os.lseek(descriptor, 0, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
